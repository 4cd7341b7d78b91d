"""Reads a Hugging Face directory with quantized matrices, and keeps their codes.

The files are untrusted. Names, dtypes and shapes are checked against the model before any tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import EXPERTS, find
from lowbit.files import shown
from lowbit.interop.directories.names import Names
from lowbit.interop.directories.rules import CONFIG, SCALE_OPTIONS, Kind, Matrix, Rules, quantization_of
from lowbit.interop.files import Contents
from lowbit.interop.joining import joined
from lowbit.models import cache_scales
from lowbit.nn.experts import stacks
from lowbit.nn.linear import QuantLinear
from lowbit.serialize import huggingface
from lowbit.serialize.loading import Layer, Saved, load_into
from lowbit.serialize.shards import Checkpoint
from lowbit.user_warnings import warn

__all__ = ["contents", "read"]

#: Parts that belong to a quantized KV cache.
_CACHE = re.compile(r".*\.(k_scale|v_scale|q_scale|k_zero_point|v_zero_point)")

#: The layers of ``QuantExperts`` for the stacks of ``lowbit.nn.experts.stacks``.
_INNER = ("gate_up", "down")


class _Wanted(NamedTuple):
    """A weight of a QuantLinear.

    Attributes:
        path: The QuantLinear.
        matrices: The matrices below each other in it, by their names in the checkpoint.
        cols: Its columns.
        bias: The stack of biases of all experts, and the expert's number; None for other layers.
    """

    path: str
    matrices: dict[str, Matrix]
    cols: int
    bias: tuple[str, int] | None = None


@torch.no_grad()
def read(path: str | Path, rules: type[Rules]) -> nn.Module:
    """Load a Hugging Face model in eval mode; its quantized layers keep their codes.

    Args:
        path: The directory. Code in it does not run.
        rules: The rules of the program that wrote it.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, the config has a scheme that lowbit does not have, or config and files do not
            fit each other. The message names the tensor.
    """
    source = _Source(Path(path), rules)
    checkpoint, model = source.checkpoint, source.model
    files = _Files(checkpoint)
    tensors: dict[str, Tensor] = {}
    for wanted in source.weights:
        tensors |= _state(files, wanted)
    rest, tied = _plain(files, model, source.layers, source.names, source.rules)
    _refuse_unused(files, model, source.rules)
    saved = Saved(source.path / CONFIG, source.layers, {**tensors, **rest}, tied, None)
    load_into(model, saved, built=False)
    return model.eval()  # type: ignore[no-any-return]


def contents(path: str | Path, rules: type[Rules]) -> Contents:
    """The model of a directory without its weights. Raises the errors of ``read`` that need no weights."""
    source = _Source(Path(path), rules)
    return Contents(source.model, {name: layer.recipe for name, layer in source.layers.items()}, ())


class _Source:
    """A directory whose config has been compared with the model and the names in its files.

    Attributes:
        model: The float model, on the meta device.
        layers: The quantized layers by name.
        weights: The weights of their QuantLinears.
    """

    def __init__(self, path: Path, rules: type[Rules]) -> None:
        self.path, self.checkpoint = path, Checkpoint(path)
        self.rules = rules(path, quantization_of(path), self.checkpoint)
        model: Any = huggingface.without_weights(path)
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config
        self.model, self.names = model, Names(model)
        self._add_cache_scales()
        self.layers: dict[str, Layer] = {}
        self.weights: list[_Wanted] = []
        for name, module in self.model.named_modules(remove_duplicate=False):
            for wanted in self._weights(name, module):
                self._add(name, wanted)

    def _add(self, name: str, wanted: _Wanted) -> None:
        recipes = [matrix.recipe for matrix in wanted.matrices.values()]
        before = self.layers.get(name, Layer(recipes[0], self.model.dtype, []))
        if any(recipe != before.recipe for recipe in recipes):
            raise ValueError(f"{self.path / CONFIG} has several schemes within {name}, and lowbit one for all experts")
        self.layers[name] = before._replace(widths=[*(before.widths or ()), wanted.cols])
        self.weights.append(wanted)

    def _add_cache_scales(self) -> None:
        """Register the static scales of keys and values that the files have, on the meta device."""
        scales = {}
        for place, (name, _) in cache_scales.attention_of(self.model).items():
            stored = self.rules.cache_names(self.names.stored(f"{name}.weight").removesuffix(".weight"))
            entries = [entry for part in stored or () if (entry := self.checkpoint.entries.get(part)) is not None]
            if len(entries) == len(cache_scales.NAMES):
                first, second = (torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries)
                scales[place] = (first, second)
        if scales:
            cache_scales.add_(self.model, scales)

    # -- layers --------------------------------------------------------------------------------------------------------
    def _weights(self, path: str, module: Any) -> list[_Wanted]:
        """The quantized weights of a module; none if it has none in the checkpoint."""
        _, listed, _ = find(module)
        if listed == EXPERTS:
            return self._expert_stacks(path, module) or self._experts(path, module)
        name = self._name(path)
        if not self.rules.is_quantized(name):
            return []
        if listed is None or not isinstance(module, nn.Linear):
            file = self.checkpoint.entries[f"{name}.{self.rules.marker}"].path
            raise ValueError(f"{file} has {name}.{self.rules.marker}, and {path} is a {type(module).__name__}")
        shape = (module.out_features, module.in_features)
        return [_Wanted(path, {name: self._matrix(name, shape)}, module.in_features)]

    def _experts(self, path: str, module: Any) -> list[_Wanted]:
        """The weights of experts that have a matrix each."""
        children = None if module.is_transposed else self.names.experts(path, module)
        if children is None:
            return []
        weights: list[_Wanted] = []
        for inner, stack, parts in zip(_INNER, stacks(module), children, strict=True):
            count, rows, cols = getattr(module, stack).shape
            for index in range(count):
                names = [self._name(f"{path}.{index}.{part}") for part in parts]
                if not weights and not any(map(self.rules.is_quantized, names)):
                    return []
                shape = (rows // len(parts), cols)
                weights.append(
                    _Wanted(f"{path}.{inner}.{index}", {name: self._matrix(name, shape) for name in names}, cols)
                )
        return weights

    def _expert_stacks(self, path: str, module: Any) -> list[_Wanted]:
        """The weights of experts that are stacks in the checkpoint."""
        weights: list[_Wanted] = []
        for inner, stack in zip(_INNER, stacks(module), strict=True):
            count, rows, cols = getattr(module, stack).shape
            shape = (count, cols, rows) if module.is_transposed else (count, rows, cols)
            name = f"{self._name(path)}.{stack}"
            try:
                matrices = self.rules.experts(name, shape, self.model.dtype)
            except ValueError as error:
                raise ValueError(f"{self.path / CONFIG}: layer {name!r}: {error}") from None
            if matrices is None:
                return []
            bias = f"{path}.{stack}_bias" if getattr(module, f"{stack}_bias", None) is not None else None
            weights += [
                _Wanted(f"{path}.{inner}.{i}", {name: matrix}, shape[2], None if bias is None else (bias, i))
                for i, matrix in enumerate(matrices)
            ]
        return weights

    def _name(self, path: str) -> str:
        """The name of a layer in this checkpoint, which may be that of the model."""
        return path if self.rules.is_quantized(path) else self.names.layer(path)

    def _matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        if not self.rules.is_quantized(name):
            part = f"{name}.{self.rules.marker}"
            raise ValueError(f"{self.path} lacks {part}, and has others of the same module; copy it again")
        try:
            return self.rules.matrix(name, shape, self.model.dtype)
        except ValueError as error:
            raise ValueError(f"{self.path / CONFIG}: layer {name!r}: {error}") from None


# -- tensors -----------------------------------------------------------------------------------------------------------
class _Files:
    """The tensors of a checkpoint, and the names of those that are used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.entries = checkpoint, checkpoint.entries
        self.used: set[str] = set()
        self._last: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        self.used.add(name)
        return self.checkpoint.read(name)

    def parts(self, tensors: Mapping[str, tuple[str, Kind]]) -> dict[str, Tensor]:
        """The tensors of a matrix. Those of the matrix before are kept, because experts may share a stack."""
        for name, kind in tensors.values():
            self._check(name, kind)
        self._last = {
            name: self._last[name] if name in self._last else self.read(name).reshape(kind.shape)
            for name, kind in tensors.values()
        }
        return {part: self._last[name] for part, (name, _) in tensors.items()}

    def _check(self, name: str, kind: Kind) -> None:
        """Raise ValueError for a tensor of another kind. Static scales may have another floating-point dtype."""
        entry = self.entries.get(name)
        if entry is None:
            raise ValueError(
                f"{self.checkpoint.directory} lacks {name}, which its config needs; copy the directory again"
            )
        same_dtype = entry.dtype == kind.dtype or (entry.dtype.is_floating_point and name.endswith("input_scale"))
        if not same_dtype or [n for n in entry.shape if n != 1] != [n for n in kind.shape if n != 1]:
            raise ValueError(
                f"{entry.path} has {name} as {entry.dtype} {list(entry.shape)}, expected {kind.dtype} "
                f"{list(kind.shape)}; its config is of another checkpoint, or the file is damaged"
            )

    def file(self, matrix: Matrix) -> Path:
        return self.entries[next(iter(matrix.tensors.values()))[0]].path


def _state(files: _Files, wanted: _Wanted) -> dict[str, Tensor]:
    """The state of a QuantLinear, without the bias unless experts share a stack of biases."""
    weights, scales, orders = [], [], []
    for name, matrix in wanted.matrices.items():
        tensors = files.parts(matrix.tensors)
        files.used |= set(matrix.unused)
        try:
            weights.append(matrix.weight(tensors))
            if matrix.inputs is not None:
                scales.append(matrix.inputs(tensors))
            if matrix.columns is not None:
                orders.append(matrix.columns(tensors))
        except ValueError as error:
            raise ValueError(f"{files.file(matrix)}: layer {name!r}: {error}") from None
    first = next(iter(wanted.matrices.values()))
    pairs = ((a, b) for row in scales for a, b in zip(row, scales[0], strict=True))
    if any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs):
        raise ValueError(f"{files.file(first)}: {wanted.path} has different input scales for one input")
    if any(not torch.equal(order, orders[0]) for order in orders):
        raise ValueError(f"{files.file(first)}: {wanted.path} has different orders of columns for one input")
    try:
        weight = joined(weights)
    except ValueError as error:
        raise ValueError(f"{files.file(first)}: {wanted.path}: {error}") from None
    layer = QuantLinear(weight, None, first.recipe, scales[0] if scales else None, orders[0] if orders else None)
    state = layer.state_dict(prefix=f"{wanted.path}.")
    if wanted.bias is not None:
        name, index = wanted.bias
        entry = files.entries.get(name)
        if entry is None or len(entry.shape) != 2 or entry.shape[0] <= index or entry.shape[1] != weight.shape[0]:
            raise ValueError(f"{files.checkpoint.directory} lacks {name} for {weight.shape[0]} rows; copy it again")
        state[f"{wanted.path}.bias"] = files.read(name)[index].clone()
    return state


def _plain(
    files: _Files, model: nn.Module, layers: Iterable[str], names: Names, rules: Rules
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All other tensors of the model, and for each other name of a tied tensor the name with its value."""
    quantized = tuple(f"{path}." for path in layers)
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    stored = {
        name: name if name in files.entries else names.stored(name)
        for name in model.state_dict()
        if not name.startswith(quantized) or name.endswith(".bias")
    }
    state = model.state_dict(keep_vars=True)
    for name in sorted(stored, key=lambda name: stored[name] not in files.entries):
        source = first.setdefault(id(state[name]), name)
        entry = files.entries.get(stored[name])
        files.used.add(stored[name])
        parts = None if entry is not None else _expert_names(model, name, names)
        if source != name:
            tied[name], tensors[name] = source, tensors[source]
        elif parts is not None:
            tensors[name] = _stack(files, state[name], parts)
        elif entry is None:
            raise ValueError(f"{files.checkpoint.directory} lacks {stored[name]}, which the model needs; copy it again")
        elif entry.shape != state[name].shape:
            raise ValueError(
                f"{entry.path} has {stored[name]} with shape {list(entry.shape)}, expected {list(state[name].shape)}"
            )
        elif state[name].is_floating_point() and entry.dtype not in SCALE_OPTIONS:
            raise ValueError(
                f"{entry.path} has {stored[name]} as {entry.dtype}, and lacks the scales that would decode it "
                f"({rules.marker}); copy it again"
            )
        else:
            tensors[name] = files.read(stored[name])
    return tensors, tied


def _expert_names(model: nn.Module, name: str, names: Names) -> list[list[str]] | None:
    """For a stack of float experts the names of the matrices of each expert, below each other; else None."""
    path, _, stack = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if find(module).listed != EXPERTS or stack not in stacks(module):
        return None
    children = names.experts(path, module)
    if children is None:
        return None
    parts = children[stacks(module).index(stack)]
    count = len(getattr(module, stack))
    return [[f"{names.layer(f'{path}.{index}.{child}')}.weight" for child in parts] for index in range(count)]


def _stack(files: _Files, like: Tensor, parts: list[list[str]]) -> Tensor:
    """The float matrices of all experts, with the shape of ``like``."""
    missing = next((name for rows in parts for name in rows if name not in files.entries), None)
    if missing is not None:
        raise ValueError(f"{files.checkpoint.directory} lacks {missing}, which the model needs; copy it again")
    shape = (like.shape[1] // len(parts[0]), like.shape[2])
    for name in (name for rows in parts for name in rows):
        entry = files.entries[name]
        if entry.shape != shape:
            raise ValueError(f"{entry.path} has {name} with shape {list(entry.shape)}, expected {list(shape)}")
    return torch.stack([torch.cat([files.read(name) for name in rows]) for rows in parts])


def _refuse_unused(files: _Files, model: Any, rules: Rules) -> None:
    """Raise ValueError for tensors that the model does not have; warn if they are of a quantized KV cache."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [
        name
        for name in files.entries
        if name not in files.used and not any(re.search(pattern, name) for pattern in ignored)
    ]
    cache = [name for name in unused if _CACHE.fullmatch(name)]
    if cache or rules.unknown_cache():
        warn(f"{rules.path} has a quantized KV cache, which lowbit does not read; the cache stays float")
    other = sorted(set(unused) - set(cache))
    if other:
        remedy = rules.remedy(other[0])
        raise ValueError(
            f"{files.entries[other[0]].path} has {shown(other[0])}, which the model does not use: {remedy}"
        )
