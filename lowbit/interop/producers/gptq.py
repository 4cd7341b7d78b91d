"""The rules by which GPTQ's programs (AutoGPTQ, GPTQModel, optimum) store quantized matrices.

A column of ``qweight [K bits / 32, N]`` is a stream of bits with the codes along K, from the lowest bit of its first
word. ``qzeros [K / group, N bits / 32]`` has the zero points along N; version 1 of the format stores them minus 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import shown
from lowbit.interop.columns import order_of, taken
from lowbit.interop.directories.recipes import recipe_of
from lowbit.interop.directories.rules import CONFIG, Kind, Matrix, Rules, positive
from lowbit.scaling import Scheme, packed_cols
from lowbit.scaling import scheme as find_scheme
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized

__all__ = ["GPTQ"]

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
            if self.bits not in (2, 3, 4, 8):
                raise ValueError(f"bits is {self.bits}, expected 2, 3, 4 or 8")
            version = config.get("checkpoint_format") or "gptq"
            if version not in _VERSIONS:
                raise ValueError(f"checkpoint_format is {shown(version)}, expected one of {', '.join(_VERSIONS)}")
            if config.get("dynamic"):
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
