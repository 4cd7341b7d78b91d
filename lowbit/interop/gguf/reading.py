"""Reads a GGUF file into a model of transformers, and keeps the codes that lowbit has schemes for.

The file is untrusted: shapes are checked against the model before weights are read.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import EXPERTS, find
from lowbit.files import shown
from lowbit.interop.files import Contents, require_library
from lowbit.interop.gguf.architectures import TOKEN_TYPES, Architecture, Change, find_architecture, with_factors
from lowbit.interop.gguf.blocks import BLOCK_TYPES, from_blocks
from lowbit.interop.gguf.header import Header
from lowbit.interop.gguf.names import IN_FP32, TensorNames, parts_of
from lowbit.interop.joining import joined, rearranged
from lowbit.nn.experts import stacks
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import RECIPES, Gemm, Recipe
from lowbit.scaling import Scheme
from lowbit.serialize import huggingface
from lowbit.serialize.empty import empty_weights, to_meta_
from lowbit.serialize.loading import Layer, Saved, load_into
from lowbit.tensor.quantized import Quantized

__all__ = ["contents", "read"]

#: The dtypes of float matrices.
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: Metadata of heads, whose rotary frequencies are computed before any weight is read, and their largest value.
_HEADS, _MOST_HEAD = ("attention.key_length", "attention.value_length", "rope.dimension_count"), 1 << 16

#: Tensors whose shape ``[rows, columns]`` the metadata repeat. A model may allocate tables of these sizes.
_SIZES = {"token_embd.weight": ("vocab_size", "embedding_length"), "position_embd.weight": ("context_length", None)}

#: Tensors that transformers computes from the config.
_COMPUTED = re.compile(r"rope_freqs\.weight|.*\.(attn_rot_embd|rope_freqs)\.weight")


class _File(Header):
    """A file whose tensors can be decoded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gguf = require_library("gguf")
        self.name = self.values.get("general.architecture")
        self.read_scales: set[str] = set()  # names of global scales

    def settings(self) -> dict[str, Any]:
        """The metadata of the architecture, by keys after its name."""
        prefix = f"{self.name}."
        shared = {key: self.values[key] for key in (TOKEN_TYPES,) if key in self.values}
        return shared | {key[len(prefix) :]: value for key, value in self.values.items() if key.startswith(prefix)}

    def matrices(self, name: str, dtype: torch.dtype) -> list[Quantized] | None:
        """The matrices of a tensor with their codes: one, or one per expert. None if lowbit has no scheme for them."""
        stored = self.tensors[name]
        row = BLOCK_TYPES.get(stored.type)
        if row is None or len(stored.shape) not in (2, 3):
            return None
        stack = self.read(name).view(-1, *stored.shape[-2:-1], stored.row_bytes)
        scales: list[Tensor | None] = [None] * len(stack)
        if row.scheme.global_scale == "tensor":
            scales = [scale.view(1, 1) for scale in self.global_scales(name)]
        return [from_blocks(row, raw, stored.shape[-1], dtype, scale) for raw, scale in zip(stack, scales, strict=True)]

    def global_scales(self, name: str) -> Tensor:
        """The scales of a matrix, or of a stack of matrices, that their blocks do not have."""
        count = math.prod(self.tensors[name].shape[:-2])
        other = name.removesuffix("weight") + "scale"
        self.read_scales.add(other)
        scale = self.float(other, torch.float32) if other in self.tensors else torch.ones(count)
        if scale.numel() != count:
            raise ValueError(f"{self.path} has {other} with shape {list(scale.shape)}, expected {count} numbers")
        return scale.flatten()

    def float(self, name: str, dtype: torch.dtype) -> Tensor:
        """The decoded tensor."""
        stored = self.tensors[name]
        if stored.type in _FLOATS:
            return self.read(name).view(_FLOATS[stored.type]).view(stored.shape).to(dtype)
        matrices = self.matrices(name, dtype)
        if matrices is not None:
            return torch.stack([matrix.dequantize(dtype) for matrix in matrices]).view(stored.shape)
        decoded = self.gguf.dequantize(self.read(name).numpy(), self.gguf.GGMLQuantizationType[stored.type])
        return torch.from_numpy(decoded).view(stored.shape).to(dtype)

    def dtype(self) -> torch.dtype:
        """The dtype of the model: that of most float matrices, or bf16."""
        sizes = dict.fromkeys(_FLOATS, 0)
        for stored in self.tensors.values():
            if len(stored.shape) > 1 and stored.type in sizes and not IN_FP32.fullmatch(stored.name):
                sizes[stored.type] += torch.Size(stored.shape).numel()
        most = max(sizes, key=lambda name: sizes[name])
        return _FLOATS[most] if sizes[most] else torch.bfloat16


@torch.no_grad()
def read(path: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a GGUF file as a model of transformers, in eval mode.

    Linears whose block type lowbit has become QuantLinears with the codes of the file, and experts QuantExperts.
    Other types are decoded.

    Args:
        path: The file.
        dtype: The dtype of the model. None: that of the file's float matrices, or bf16 if all matrices are quantized.

    Raises:
        ImportError: transformers or gguf is not installed.
        ValueError: The file is damaged, or its architecture is not known. The message names the tensor.
    """
    with _named(Path(path)):
        reader = _Reader(_File(Path(path)), dtype)
        reader.run()
        saved = Saved(Path(path), reader.layers, reader.tensors, reader.tied, None)
        load_into(reader.model, saved, built=False)
        model: nn.Module = reader.model.eval()
        return model


def contents(path: str | Path) -> Contents:
    """The model of a GGUF file without its weights. Raises the errors of ``read`` that need no weights."""
    with _named(Path(path)):
        reader = _Reader(_File(Path(path)), None)
        kept, recipes = set(), {}
        for name, module in reader.model.named_modules():
            for stored in itertools.chain(*reader.kept(name, module).values()):
                kept.add(stored)
                recipes[name] = _recipe(BLOCK_TYPES[reader.file.tensors[stored].type].scheme)
        rows = (row.type for name, row in reader.file.tensors.items() if name not in kept and row.type not in _FLOATS)
        return Contents(reader.model, recipes, tuple(dict.fromkeys(rows)))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise errors that untrusted metadata cause in other packages as ValueErrors with the file's name."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


class _Reader:
    """Collects the state of a model from a file."""

    def __init__(self, file: _File, dtype: torch.dtype | None) -> None:
        self.file, self.dtype = file, dtype or file.dtype()
        self.architecture = find_architecture(file.name, file.settings())
        self.model: Any = _without_weights(file, self.architecture)
        for parameter in self.model.parameters():  # and no tables of rotary embeddings, which are fp32
            parameter.data = parameter.data.to(self.dtype)
        self.model.config.dtype = self.dtype
        self.names = TensorNames(file.gguf, self.model, self.architecture)
        self.layers: dict[str, Layer] = {}
        self.tensors: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}
        self._used: set[str] = set()

    def run(self) -> None:
        """Raises ValueError if file and model do not have the same tensors."""
        first: dict[int, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            stored_names = self.kept(path, module)
            for place, stored in stored_names.items():
                self._add(path, place, [self._codes(name) for name in stored])
            for short, value in (*module._parameters.items(), *module._buffers.items()):
                name = f"{path}.{short}" if path else short
                if value is None or short in module._non_persistent_buffers_set:
                    continue
                source = first.setdefault(id(value), name)
                if source != name:
                    self.tied[name], self.tensors[name] = source, self.tensors[source]
                elif not stored_names or short == "bias":
                    self.tensors[name] = self._values(name, module, value)
        used = self._used | self.file.read_scales
        unused = sorted(name for name in self.file.tensors if name not in used and not _COMPUTED.fullmatch(name))
        if unused:
            raise ValueError(f"{self.file.path} has {shown(unused[0])}, which a {_class(self.model)} does not use")

    def kept(self, path: str, module: Any) -> dict[str, list[str]]:
        """The stored names of the matrices that keep their codes, below each other; none if the module is decoded.

        The keys are the paths of QuantLinears, or of the two lists of them in QuantExperts.
        """
        listed = find(module).listed
        if isinstance(module, nn.Linear) and listed is not None:
            weights = {path: ("weight", module.weight)}
        elif listed == EXPERTS and not module.is_transposed and len(module._parameters) == len(stacks(module)):
            names = zip(("gate_up", "down"), stacks(module), strict=True)
            weights = {f"{path}.{inner}": (stack, getattr(module, stack)) for inner, stack in names}
        else:
            return {}
        parts = {place: list(parts_of(f"{path}.{name}", module, value)) for place, (name, value) in weights.items()}
        stored_names: dict[str, list[str]] = {}
        for place, matrices in parts.items():
            stored = [(self.names.of(name) or "", tuple(value.shape)) for name, value in matrices]
            if any(name not in self.file.tensors or not self._keeps(name) for name, _ in stored):
                return {}
            for name, shape in stored:
                self._check_shape(name, shape)
            stored_names[place] = [name for name, _ in stored]
        types = {self.file.tensors[name].type for names in stored_names.values() for name in names}
        return stored_names if len(types) == 1 and all(map(self._joins, stored_names.values())) else {}

    def _keeps(self, stored: str) -> bool:
        """Whether lowbit has a scheme for the codes of a tensor, and the architecture does not change its values."""
        changed = any(change.values is not None for change in self._changes(stored))
        return self.file.tensors[stored].type in BLOCK_TYPES and not changed

    def _joins(self, stored: list[str]) -> bool:
        """Whether matrices that one matmul computes have the same global scales."""
        if BLOCK_TYPES[self.file.tensors[stored[0]].type].scheme.global_scale != "tensor":
            return True
        first, *others = (self.file.global_scales(name) for name in stored)
        return all(torch.equal(first, other) for other in others)

    def _add(self, path: str, place: str, matrices: list[list[Quantized]]) -> None:
        """Add the layers at ``place``, given for each of its stored tensors a matrix per layer."""
        weights = [joined(below) for below in zip(*matrices, strict=True)]
        recipe = _recipe(weights[0].scheme)
        before = self.layers.get(path, Layer(recipe, self.dtype, []))
        self.layers[path] = before._replace(widths=[*(before.widths or ()), *(weight.shape[1] for weight in weights)])
        for index, weight in enumerate(weights):
            name = place if place == path else f"{place}.{index}"
            self.tensors |= QuantLinear(weight, None, recipe).state_dict(prefix=f"{name}.")

    def _codes(self, stored: str) -> list[Quantized]:
        """The matrices of a tensor with their codes."""
        weights = self.file.matrices(stored, self.dtype)
        assert weights is not None
        self._used.add(stored)
        for change in self._changes(stored):
            if change.rows is not None:
                back = change.rows(weights[0].shape[0], self.model.config).argsort()
                weights = [rearranged(weight, back) for weight in weights]
        return weights

    def _values(self, name: str, module: nn.Module, value: Tensor) -> Tensor:
        """A float parameter, from one or more tensors of the file."""
        for part, view in parts_of(name, module, value):  # all shapes, before memory is allocated
            stored = self.names.of(part)
            if stored is not None:
                self._check_shape(stored, tuple(view.shape))
        filled = torch.zeros(value.shape, dtype=self.dtype)  # a pooler stays zero: llama.cpp has none
        for part, view in parts_of(name, module, filled):
            stored = self.names.of(part)
            if stored is None:
                continue
            self._used.add(stored)
            matrix = self.file.float(stored, torch.float32 if view.ndim == 1 else self.dtype)
            for change in self._changes(stored):
                if change.rows is not None:
                    matrix = matrix[change.rows(len(matrix), self.model.config).argsort()]
                if change.values is not None:
                    matrix = change.values[1](matrix.float())
            view.copy_(matrix)
        return filled

    def _changes(self, stored: str) -> list[Change]:
        return [change for change in self.architecture.changes if re.fullmatch(change.pattern, stored)]

    def _check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        if stored not in self.file.tensors:
            raise ValueError(f"{self.file.path} lacks {stored}, which a {_class(self.model)} needs; copy it again")
        actual = self.file.tensors[stored].shape
        if actual != shape:
            raise ValueError(
                f"{self.file.path} has {stored} with shape {list(actual)}, expected {list(shape)}; its metadata are "
                f"of another model, or the file is damaged"
            )


def _class(model: nn.Module) -> str:
    return type(model).__name__


def _recipe(scheme: Scheme) -> Recipe:
    """The weight-only recipe of this scheme, by its name if it has one."""
    named = (row for row in RECIPES.values() if row.input is None and row.weight == scheme)
    return next(named, Recipe(Gemm(None, scheme), name=f"{scheme.name}-weight-only"))


def _without_weights(file: _File, architecture: Architecture) -> nn.Module:
    """The model on the meta device."""
    values = file.settings()
    _check_metadata(file, values, architecture)
    settings: dict[str, Any] = {"model_type": architecture.model_type}
    tokens = file.values.get("tokenizer.ggml.tokens") or ()
    for key, attribute in architecture.keys.items():
        value = len(tokens) if key == "vocab_size" and key not in values else values.get(key)
        if value is not None:
            settings[attribute] = value
    settings |= architecture.config(values)
    heads, rotated = settings.get("head_dim"), values.get("rope.dimension_count")
    if heads is not None and rotated not in (None, heads):
        raise ValueError(f"{file.path} rotates {rotated} of {heads} elements of a head, which lowbit does not read")
    if "rope_freqs.weight" in file.tensors:
        original = values.get("rope.scaling.original_context_length")
        factors = file.float("rope_freqs.weight", torch.float32)
        settings["rope_parameters"] = with_factors(settings["rope_parameters"], factors, original)
    settings["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    settings["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    for role in ("bos", "eos"):
        number = file.values.get(f"tokenizer.ggml.{role}_token_id")
        if number is not None:
            settings[f"{role}_token_id"] = int(number)
    described = {"architecture": architecture.model_class, "config": settings, "generation": None}
    with empty_weights(most=4 * len(file.tensors) + 1000):
        return to_meta_(huggingface.build(described))


def _check_metadata(file: _File, values: dict[str, Any], architecture: Architecture) -> None:
    """Raise ValueError for numbers that no model has, before a model is built with them."""
    for key, value in values.items():
        counts = key in architecture.keys or key in _HEADS
        if not counts and not isinstance(value, float):
            continue
        number = value if isinstance(value, int | float) else math.nan
        if not math.isfinite(number) or (number <= 0 and (counts or key == "rope.freq_base")):
            raise ValueError(f"{file.path} has {file.name}.{key} {shown(value)}, expected a positive number")
        if key in _HEADS and number > _MOST_HEAD:
            raise ValueError(f"{file.path} has {file.name}.{key} {value}, and heads have {_MOST_HEAD} elements at most")
    for name, keys in _SIZES.items():
        if name not in file.tensors and (name == "token_embd.weight" or architecture.positions):
            raise ValueError(f"{file.path} lacks {name}, which a {architecture.model_class} needs; copy it again")
        shape = file.tensors[name].shape if name in file.tensors else ()
        for size_key, size in zip(keys, shape, strict=False):
            if size_key is not None and values.get(size_key, size) != size:
                raise ValueError(
                    f"{file.path} has {file.name}.{size_key} {values[size_key]}, and {name} has shape {list(shape)}; "
                    f"its metadata are of another model, or the file is damaged"
                )
