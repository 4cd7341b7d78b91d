"""The rules by which GPTQ's programs (AutoGPTQ, GPTQModel, optimum) store quantized matrices.

A column of ``qweight [K bits / 32, N]`` is a stream of bits with the codes along K, from the lowest bit of its first
word. ``qzeros [K / group, N bits / 32]`` has the zero points along N; version 1 of the format stores them minus 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.files import shown
from lowbit.interop.columns import in_order, order_of, taken, to_groups
from lowbit.interop.directories.layers import Stored, StoredLayer
from lowbit.interop.directories.names import Names
from lowbit.interop.directories.recipes import recipe_of
from lowbit.interop.directories.rules import CONFIG, Kind, Matrix, Rules, positive
from lowbit.interop.directories.writing import Layout
from lowbit.interop.files import Refusal
from lowbit.interop.joining import rows as rows_of
from lowbit.models.names import plain_name
from lowbit.nn.base import kind
from lowbit.recipes import Recipe
from lowbit.scaling import Scheme, packed_cols
from lowbit.scaling import scheme as find_scheme
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized

__all__ = ["GPTQ", "LAYOUT", "refuses"]

_BITS = (2, 3, 4, 8)

#: The beginning of patterns in ``dynamic`` for layers that are not quantized.
_FLOAT = "-:"

#: The offset of stored zero points in each version of the format.
_VERSIONS = {"gptq": 1, "gptq_v2": 0}


class GPTQ(Rules):
    """GPTQ of 2, 3, 4 and 8 bits, with columns in the order of activations (``desc_act``) or not."""

    method = "gptq"
    marker = "qweight"

    def __init__(self, path: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(path, config, checkpoint)
        try:
            self.bits = positive(config, "bits")
            self.group = None if config.get("group_size") in (-1, None) else positive(config, "group_size")
            if self.bits not in _BITS:
                raise ValueError(f"bits is {self.bits}, expected 2, 3, 4 or 8")
            version = config.get("checkpoint_format") or "gptq"
            if version not in _VERSIONS:
                raise ValueError(f"checkpoint_format is {shown(version)}, expected one of {', '.join(_VERSIONS)}")
            dynamic = config.get("dynamic") or {}
            if not isinstance(dynamic, dict) or any(not str(pattern).startswith(_FLOAT) for pattern in dynamic):
                raise ValueError("its layers have several schemes ('dynamic'), which lowbit does not read")
        except ValueError as error:
            raise ValueError(f"{path / CONFIG}: {error}") from None
        self.offset, self.symmetric = _VERSIONS[version], config.get("sym") is not False
        self.reordered = config.get("desc_act") is True

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        rows, cols = shape
        scaling = "row" if self.group is None else f"group{self.group}"
        option = self.scale_option(f"{name}.scales")
        kind = f"int{self.bits}:{scaling}" if self.symmetric else f"uint{self.bits}:{scaling}:affine"
        recipe = recipe_of(find_scheme(f"{kind}{option}"), None)
        if self.reordered:
            recipe = recipe.with_reordered()
        scheme, groups = recipe.weight, recipe.weight.scale_shape(rows, cols)[1]
        kinds = {
            "qweight": Kind(torch.int32, (_words(cols, self.bits), rows)),
            "qzeros": Kind(torch.int32, (groups, _words(rows, self.bits))),
            "scales": Kind(self.checkpoint.entries[f"{name}.scales"].dtype, (groups, rows)),
        }
        if self.reordered or f"{name}.g_idx" in self.checkpoint.entries:
            kinds["g_idx"] = Kind(torch.int32, (cols,))
        return Matrix(
            recipe,
            {part: (f"{name}.{part}", kind) for part, kind in kinds.items()},
            partial(self._weight, scheme=scheme, shape=shape, dtype=dtype),
            columns=partial(_columns, scheme=scheme) if self.reordered else None,
        )

    def _weight(
        self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantized:
        columns = None if "g_idx" not in tensors else _columns(tensors, scheme)
        if columns is not None and not self.reordered and not bool((columns.diff() == 1).all()):
            raise ValueError("its columns are in another order, and its config says that they are not (desc_act)")
        weight = self._in_order(tensors, scheme, shape, dtype)
        return weight if columns is None or not self.reordered else taken(weight, columns)

    def _in_order(
        self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantized:
        """The weight with its columns in the order of the input."""
        rows, cols = shape
        packed = tensors["qweight"].t().contiguous().view(torch.uint8)[:, : packed_cols(cols, self.bits)].contiguous()
        zeros = unpack(tensors["qzeros"].contiguous().view(torch.uint8), self.bits, rows).t() + self.offset
        zeros = (zeros & (1 << self.bits) - 1).contiguous()
        scale, half = tensors["scales"].t().contiguous(), 1 << (self.bits - 1)
        if not self.symmetric:
            return Quantized(packed, scale, zeros, None, scheme, torch.Size(shape), dtype)
        if not bool((zeros == half).all()):
            raise ValueError(f"its config says sym, and a zero point is not {half}; the files are of another model")
        flips = pack(torch.full((1, cols), half, dtype=torch.uint8), self.bits)
        return Quantized(packed ^ flips, scale, None, None, scheme, torch.Size(shape), dtype)


def _columns(tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    return order_of(tensors["g_idx"], scheme)


def _words(count: int, bits: int) -> int:
    """The 32-bit words of ``count`` codes."""
    return -(-count * bits // 32)


# -- writing -----------------------------------------------------------------------------------------------------------
def refuses(recipe: Recipe) -> Refusal | None:
    """Why GPTQ's programs cannot express a recipe, with the nearest recipe; None if they can."""
    scheme = recipe.weight
    group = scheme.block[1]
    scaling = f"group{group}" if group and scheme.block[0] == 1 and group in (32, 64, 128) else "group128"
    bits = next((bits for bits in _BITS if bits >= scheme.format.bits), 8)
    nearest = f"int{4 if scheme.format.kind != 'integer' else bits}-weight-only:{scaling}:fp16"
    if recipe.input is not None:
        return Refusal("GPTQ has no quantized inputs", nearest)
    if recipe.rotation is not None:
        return Refusal("its weights are rotated by a Hadamard transform", nearest)
    integers = scheme.format.kind == "integer" and scheme.format.bits in _BITS and not scheme.reference_only
    if not integers or scheme.block[0] != 1 or scheme.format.signed == scheme.affine:
        return Refusal(f"GPTQ has integers of 2, 3, 4 and 8 bits in groups within rows, not {scheme}", nearest)
    if scheme.scale_format.name != "fp16":
        return Refusal(f"GPTQ's scales are fp16, those of {scheme} are {scheme.scale_format.name}", nearest)
    return None


def _store(layer: Any, begin: int, end: int) -> Stored:
    recipe, scheme = layer.recipe, layer.scheme
    refusal = refuses(recipe)
    if refusal is not None:
        raise ValueError(f"recipe {recipe.name!r}: {refusal.why}; the nearest recipe that works is {refusal.nearest!r}")
    bits, cols, rows = scheme.format.bits, layer.in_features, end - begin
    if cols * bits % 32 or rows * bits % 32 or cols % (scheme.block[1] or cols):
        raise ValueError(f"[{rows}, {cols}] is no whole number of groups and of words of 32 bits; leave it in fp16")
    groups = scheme.scale_shape(rows, cols)[1]
    kinds = {
        "qweight": Kind(torch.int32, (_words(cols, bits), rows)),
        "qzeros": Kind(torch.int32, (groups, _words(rows, bits))),
        "scales": Kind(torch.float16, (groups, rows)),
        "g_idx": Kind(torch.int32, (cols,)),
    }
    about = {
        "bits": bits, "group_size": scheme.block[1] or -1, "sym": not scheme.affine, "desc_act": recipe.reordered,
    }  # fmt: skip
    return Stored(kinds, partial(_tensors, layer, begin, end), about)


def _tensors(layer: Any, begin: int, end: int) -> dict[str, Tensor]:
    weight, scheme = rows_of(layer.weight, begin, end), layer.scheme
    bits, cols, half = scheme.format.bits, int(weight.shape[1]), 1 << (scheme.format.bits - 1)
    columns = getattr(layer, "columns", None)
    weight = weight if columns is None else in_order(weight, columns)
    order = torch.arange(cols) if columns is None else columns
    packed = weight.codes if scheme.affine else weight.codes ^ pack(torch.full((1, cols), half).byte(), bits)
    zeros = torch.full_like(weight.scale, half).byte() if weight.zero_point is None else weight.zero_point.byte()
    stored = zeros - _VERSIONS[_version(scheme.affine)] & (1 << bits) - 1
    return {
        "qweight": packed.contiguous().view(torch.int32).t().contiguous(),
        "qzeros": pack(stored.t().contiguous(), bits).view(torch.int32),
        "scales": weight.scale.t().contiguous(),
        "g_idx": to_groups(order, scheme),
    }


def _version(affine: bool) -> str:
    """Version 1 cannot store a zero point of 0."""
    return "gptq_v2" if affine else "gptq"


def _config(model: Any, layers: dict[str, StoredLayer], names: Names) -> dict[str, Any]:
    abouts = [layer.stored.about for layer in layers.values()]
    name = next((name for name, layer in layers.items() if layer.stored.about != abouts[0]), None)
    if name is not None:
        raise ValueError(f"layer {name!r}: GPTQ has one scheme for all layers; give all layers one recipe")
    output = model.get_output_embeddings()
    inside = tuple(f"{plain_name(path)}." for path in quantized_layers(model))
    plain = [
        names.layer(plain_name(path))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output and not plain_name(path).startswith(inside)
    ]
    return {
        "quant_method": GPTQ.method,
        "checkpoint_format": _version(not abouts[0]["sym"]),
        "lm_head": kind(output) in ("quantized", "packed"),
        "dynamic": {f"{_FLOAT}^{re.escape(name)}$": {} for name in plain},
        **abouts[0],
    }


#: The layout, for ``directories.write``.
LAYOUT = Layout(GPTQ.method, _store, _config)
