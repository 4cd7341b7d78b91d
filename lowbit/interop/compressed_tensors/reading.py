"""Reads a directory in the layout of compressed-tensors, and keeps its codes.

The files are untrusted. Names, dtypes and shapes are checked against the model before any tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import EXPERTS, find
from lowbit.files import read_json, shown
from lowbit.interop.compressed_tensors import layouts
from lowbit.interop.compressed_tensors.names import Names
from lowbit.interop.compressed_tensors.schemes import Format, input_of, is_static_cache, recipe_of, scheme_of
from lowbit.interop.files import Contents
from lowbit.models import cache_scales
from lowbit.nn.experts import stacks
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe
from lowbit.scaling import Scheme
from lowbit.serialize import huggingface
from lowbit.serialize.loading import Layer, Saved, load_into
from lowbit.serialize.shards import Checkpoint
from lowbit.user_warnings import warn

__all__ = ["contents", "detect", "read"]

CONFIG = "config.json"

#: Parts of a layer's state that other programs write and lowbit does not use.
_UNUSED = ("input_global_scale",)

#: Parts that belong to a quantized KV cache.
_CACHE = re.compile(r".*\.(k_scale|v_scale|q_scale|k_zero_point|v_zero_point)")


#: Names of classes in targets that mean every Linear.
_CLASSES = ("Linear", "Module")


class _Matrix(NamedTuple):
    """A quantized matrix in the checkpoint."""

    name: str
    format: Format
    scheme: Scheme
    recipe: Recipe
    shape: tuple[int, int]

    def kinds(self) -> dict[str, layouts.Kind]:
        """The dtypes and shapes of its tensors by name."""
        kinds = layouts.weight_kinds(self.format, self.scheme, self.shape)
        input = self.recipe.input
        return kinds | layouts.input_kinds(input) if self.recipe.static and input is not None else kinds


class _Wanted(NamedTuple):
    """The weight of a QuantLinear, and the names in the checkpoint of the matrices below each other in it."""

    path: str
    names: tuple[str, ...]
    rows: int
    cols: int


def detect(path: str | Path) -> bool:
    """Whether ``path`` is a directory in the layout of compressed-tensors."""
    try:
        config = read_json(Path(path) / CONFIG)
    except (OSError, ValueError):
        return False
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors"


@torch.no_grad()
def read(path: str | Path) -> nn.Module:
    """Load a Hugging Face model in the layout of compressed-tensors, in eval mode; its Linears keep their codes.

    Quantized Linears become QuantLinears. Their global scale, if any, is the reciprocal of the stored one, in fp32.
    Inputs of NVFP4 get a global scale per row at run time instead of the stored one.

    Args:
        path: The directory. Code in it does not run.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, the config has a scheme that lowbit does not have, or config and files do not
            fit each other. The message names the tensor.
    """
    source = _Source(Path(path))
    checkpoint, model = source.checkpoint, source.model
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for weight, matrices in source.weights:
        tensors |= _state(checkpoint, weight, matrices, model.dtype, used)
    rest, tied = _plain(checkpoint, model, source.layers, source.names, used)
    _refuse_unused(checkpoint, model, used, source.config)
    saved = Saved(source.path / CONFIG, source.layers, {**tensors, **rest}, tied, None)
    load_into(model, saved, built=False)
    return model.eval()  # type: ignore[no-any-return]


def contents(path: str | Path) -> Contents:
    """The model of a directory without its weights. Raises the errors of ``read`` that need no weights."""
    source = _Source(Path(path))
    return Contents(source.model, {name: layer.recipe for name, layer in source.layers.items()}, ())


class _Source:
    """A directory whose config has been compared with the model and the names in its files.

    Attributes:
        model: The float model, on the meta device.
        layers: The quantized layers by name.
        weights: The path of each quantized weight, with its matrices.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.config, self.checkpoint = path, _quantization_config(path), Checkpoint(path)
        model: Any = huggingface.without_weights(path)
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config
        self.model, self.names = model, Names(model)
        if is_static_cache(self.config.get("kv_cache_scheme")):
            self._add_cache_scales()
        self.layers: dict[str, Layer] = {}
        self.weights: list[tuple[str, list[_Matrix]]] = []
        for name, module in self.model.named_modules(remove_duplicate=False):
            for wanted in _weights(self.checkpoint, name, module, self.names):
                self._add(name, wanted)

    def _add_cache_scales(self) -> None:
        """Register the static scales of keys and values that the files have, on the meta device."""
        scales = {}
        for place, (name, _) in cache_scales.attention_of(self.model).items():
            stored = [self.names.stored(f"{name}.{part}") for part in cache_scales.NAMES]
            entries = [entry for part in stored if (entry := self.checkpoint.entries.get(part)) is not None]
            if len(entries) == len(stored):
                first, second = (torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries)
                scales[place] = (first, second)
        if scales:
            cache_scales.add_(self.model, scales)

    def _add(self, name: str, wanted: _Wanted) -> None:
        matrices = [_matrix(self.path, self.config, self.checkpoint, stored, wanted) for stored in wanted.names]
        before = self.layers.get(name, Layer(matrices[0].recipe, self.model.dtype, []))
        if any(matrix.recipe != before.recipe for matrix in matrices):
            raise ValueError(f"{self.path / CONFIG} has several schemes within {name}, and lowbit one for all experts")
        self.layers[name] = before._replace(widths=[*(before.widths or ()), wanted.cols])
        self.weights.append((wanted.path, matrices))


def _quantization_config(path: Path) -> dict[str, Any]:
    """The checked ``quantization_config``."""
    config = read_json(path / CONFIG).get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        raise ValueError(f"{path / CONFIG} has no quantization_config of compressed-tensors")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"{path / CONFIG} is damaged: config_groups is {shown(groups)}; copy it again")
    for rows in (config.get("ignore") or [], *(group.get("targets") for group in groups.values())):
        if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
            raise ValueError(f"{path / CONFIG} is damaged: expected a list of names, got {shown(rows)}; copy it again")
    if config.get("transform_config"):
        raise ValueError(
            f"{path / CONFIG} has a transform_config, and lowbit reads no rotated weights; use the original model "
            f"with lowbit.quantize_(model, 'NAME:hadamard')"
        )
    if config.get("sparsity_config"):
        raise ValueError(f"{path / CONFIG} has a sparsity_config, and lowbit reads dense codes only")
    return config


# -- layers ------------------------------------------------------------------------------------------------------------
def _weights(checkpoint: Checkpoint, path: str, module: Any, names: Names) -> list[_Wanted]:
    """The quantized weights of a module; none if it has none in the checkpoint."""
    _, listed, _ = find(module)
    if listed == EXPERTS and not module.is_transposed and (children := names.experts(path, module)) is not None:
        stacked = [
            (inner, getattr(module, stack), parts)
            for inner, stack, parts in zip(("gate_up", "down"), stacks(module), children, strict=True)
        ]
        wanted = [
            _Wanted(
                f"{path}.{inner}.{index}",
                tuple(_found(checkpoint, f"{path}.{index}.{child}", names) for child in parts),
                stack.shape[1],
                stack.shape[2],
            )
            for inner, stack, parts in stacked
            for index in range(stack.shape[0])
        ]
        return wanted if any(f"{name}.weight_scale" in checkpoint.entries for name in wanted[0].names) else []
    name = _found(checkpoint, path, names)
    scale = checkpoint.entries.get(f"{name}.weight_scale")
    if scale is None:
        return []
    if listed is None or not isinstance(module, nn.Linear):
        raise ValueError(f"{scale.path} has {name}.weight_scale, and {path} is a {type(module).__name__}")
    return [_Wanted(path, (name,), module.out_features, module.in_features)]


def _found(checkpoint: Checkpoint, path: str, names: Names) -> str:
    """The name of a Linear in this checkpoint, which may be that of the model."""
    return path if f"{path}.weight_scale" in checkpoint.entries else names.layer(path)


def _matrix(path: Path, config: dict[str, Any], checkpoint: Checkpoint, name: str, wanted: _Wanted) -> _Matrix:
    scale = checkpoint.entries.get(f"{name}.weight_scale")
    if scale is None:
        raise ValueError(f"{path} lacks {name}.weight_scale, and has others of the same module; copy it again")
    group = _group_of(name, config["config_groups"], config.get("ignore") or [])
    if group is None:
        raise ValueError(f"{path / CONFIG} has no config group for {name}, whose weight_scale {scale.path} holds")
    try:
        weights = group.get("weights")
        if not isinstance(weights, dict) or group.get("output_activations"):
            raise ValueError("a group needs weights, and no output_activations")
        dtype = str(scale.dtype).removeprefix("torch.")
        format, scheme = scheme_of(weights, str(group.get("format") or config.get("format")), dtype)
        recipe = recipe_of(scheme, input_of(group.get("input_activations")))
    except ValueError as error:
        raise ValueError(f"{path / CONFIG}: layer {name!r}: {error}") from None
    shape = (wanted.rows // len(wanted.names), wanted.cols)
    return _Matrix(name, format, recipe.weight, recipe, shape)


def _group_of(name: str, groups: dict[str, Any], ignore: list[str]) -> dict[str, Any] | None:
    """The group for a Linear: one that names it, else one whose pattern matches, else one that names its class."""
    ways: tuple[Callable[[str], bool], ...] = (
        lambda target: target == name,
        lambda target: target.startswith("re:") and _matches(target[3:], name),
        lambda target: target in _CLASSES,
    )
    if any(way(target) for target in ignore for way in ways):
        return None
    for way in ways:
        for group in groups.values():
            if any(way(target) for target in group["targets"]):
                return dict(group)
    return None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"the target {shown(pattern)} is no regular expression: {error}") from None


# -- tensors -----------------------------------------------------------------------------------------------------------
def _state(
    checkpoint: Checkpoint, path: str, matrices: list[_Matrix], dtype: torch.dtype, used: set[str]
) -> dict[str, Tensor]:
    """The state of a QuantLinear without the bias. Adds the names that it has read to ``used``."""
    weights, scales = [], []
    for matrix in matrices:
        tensors = {}
        for part, kind in matrix.kinds().items():
            tensors[part] = _read(checkpoint, f"{matrix.name}.{part}", kind)
            used.add(f"{matrix.name}.{part}")
        used |= {f"{matrix.name}.{part}" for part in _UNUSED}
        try:
            weights.append(layouts.from_tensors(tensors, matrix.format, matrix.scheme, matrix.shape, dtype))
            if matrix.recipe.static and matrix.recipe.input is not None:
                scales.append(layouts.input_scales(tensors, matrix.recipe.input))
        except ValueError as error:
            raise ValueError(f"{_file(checkpoint, matrix)}: layer {matrix.name!r}: {error}") from None
    pairs = ((a, b) for row in scales for a, b in zip(row, scales[0], strict=True))
    if any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs):
        raise ValueError(f"{_file(checkpoint, matrices[0])}: {path} has different input scales for one input")
    try:
        weight = layouts.joined(weights)
    except ValueError as error:
        raise ValueError(f"{_file(checkpoint, matrices[0])}: {path}: {error}") from None
    return QuantLinear(weight, None, matrices[0].recipe, scales[0] if scales else None).state_dict(prefix=f"{path}.")


def _file(checkpoint: Checkpoint, matrix: _Matrix) -> Path:
    return checkpoint.entries[f"{matrix.name}.weight_scale"].path


def _read(checkpoint: Checkpoint, name: str, kind: layouts.Kind) -> Tensor:
    """A tensor of that kind. Scales may have another floating-point dtype, and axes of length 1."""
    entry = checkpoint.entries.get(name)
    if entry is None:
        raise ValueError(f"{checkpoint.directory} lacks {name}, which its config needs; copy the directory again")
    same_dtype = entry.dtype == kind.dtype or (entry.dtype.is_floating_point and name.endswith("input_scale"))
    if not same_dtype or [n for n in entry.shape if n != 1] != [n for n in kind.shape if n != 1]:
        raise ValueError(
            f"{entry.path} has {name} as {entry.dtype} {list(entry.shape)}, expected {kind.dtype} {list(kind.shape)}; "
            f"its config is of another checkpoint, or the file is damaged"
        )
    return checkpoint.read(name).reshape(kind.shape)


def _plain(
    checkpoint: Checkpoint, model: nn.Module, layers: Iterable[str], names: Names, used: set[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All other tensors of the model, and for each other name of a tied tensor the name with its value."""
    quantized = tuple(f"{path}." for path in layers)
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    stored = {
        name: name if name in checkpoint.entries else names.stored(name)
        for name in model.state_dict()
        if not name.startswith(quantized) or name.endswith(".bias")
    }
    state = model.state_dict(keep_vars=True)
    for name in sorted(stored, key=lambda name: stored[name] not in checkpoint.entries):
        source = first.setdefault(id(state[name]), name)
        entry = checkpoint.entries.get(stored[name])
        used.add(stored[name])
        parts = None if entry is not None else _expert_names(model, name, names)
        if source != name:
            tied[name], tensors[name] = source, tensors[source]
        elif parts is not None:
            tensors[name] = _stack(checkpoint, state[name], parts)
            used |= {part for rows in parts for part in rows}
        elif entry is None:
            raise ValueError(f"{checkpoint.directory} lacks {stored[name]}, which the model needs; copy it again")
        elif entry.shape != state[name].shape:
            raise ValueError(
                f"{entry.path} has {stored[name]} with shape {list(entry.shape)}, expected {list(state[name].shape)}"
            )
        else:
            tensors[name] = checkpoint.read(stored[name])
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


def _stack(checkpoint: Checkpoint, like: Tensor, parts: list[list[str]]) -> Tensor:
    """The float matrices of all experts, with the shape of ``like``."""
    missing = next((name for rows in parts for name in rows if name not in checkpoint.entries), None)
    if missing is not None:
        raise ValueError(f"{checkpoint.directory} lacks {missing}, which the model needs; copy it again")
    shape = (like.shape[1] // len(parts[0]), like.shape[2])
    for name in (name for rows in parts for name in rows):
        entry = checkpoint.entries[name]
        if entry.shape != shape:
            raise ValueError(f"{entry.path} has {name} with shape {list(entry.shape)}, expected {list(shape)}")
    return torch.stack([torch.cat([checkpoint.read(name) for name in rows]) for rows in parts])


def _refuse_unused(checkpoint: Checkpoint, model: Any, used: set[str], config: dict[str, Any]) -> None:
    """Raise ValueError for tensors that the model does not have; warn if they are of a quantized KV cache."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [
        name
        for name in checkpoint.entries
        if name not in used and not any(re.search(pattern, name) for pattern in ignored)
    ]
    cache = [name for name in unused if _CACHE.fullmatch(name)]
    if cache or (config.get("kv_cache_scheme") and not is_static_cache(config["kv_cache_scheme"])):
        warn(f"{checkpoint.directory} has a quantized KV cache, which lowbit does not read; the cache stays float")
    other = sorted(set(unused) - set(cache))
    if not other:
        return
    name = other[0]
    remedy = "it is of another model, or of a layout that lowbit does not read"
    if name.endswith("weight_g_idx"):
        remedy = "columns in the order of activations are not read; make the checkpoint again with actorder 'weight'"
    raise ValueError(f"{checkpoint.entries[name].path} has {shown(name)}, which the model does not use: {remedy}")
