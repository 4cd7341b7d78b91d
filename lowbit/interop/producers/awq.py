"""The rules by which AWQ's programs (AutoAWQ, transformers) store quantized matrices.

A word of ``qweight [K, N / 8]`` and ``qzeros [K / group, N / 8]`` has eight neighbors along N. Their order is 0, 2, 4,
6, 1, 3, 5, 7 from the lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import shown
from lowbit.interop.directories.recipes import recipe_of
from lowbit.interop.directories.rules import CONFIG, Kind, Matrix, Rules, positive
from lowbit.interop.layouts import from_runs
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.packing import pack
from lowbit.tensor.quantized import Quantized

__all__ = ["AWQ"]

#: The place in a word, in codes, of each of eight neighbors.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ(Rules):
    """AWQ of 4 bits in the layout ``gemm``."""

    method = "awq"
    marker = "qweight"

    def __init__(self, path: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(path, config, checkpoint)
        try:
            self.group = None if config.get("group_size") == -1 else positive(config, "group_size")
            layout, bits = str(config.get("version", "gemm")).lower(), config.get("bits", config.get("w_bit", 4))
            if layout != "gemm" or bits != 4:
                raise ValueError(f"version is {shown(layout)} with {shown(bits)} bits, expected gemm with 4 bits")
        except ValueError as error:
            raise ValueError(f"{path / CONFIG}: {error}") from None

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        rows, cols = shape
        if rows % 8:
            raise ValueError(f"it has {rows} rows, and the layout needs a multiple of 8")
        affine = self.config.get("zero_point") is not False
        scaling = "row" if self.group is None else f"group{self.group}"
        kind = f"uint4:{scaling}:affine" if affine else f"int4:{scaling}"
        recipe = recipe_of(find_scheme(f"{kind}{self.scale_option(f'{name}.scales')}"), None)
        groups = recipe.weight.scale_shape(rows, cols)[1]
        kinds = {
            "qweight": Kind(torch.int32, (cols, rows // 8)),
            "scales": Kind(self.checkpoint.entries[f"{name}.scales"].dtype, (groups, rows)),
            **({"qzeros": Kind(torch.int32, (groups, rows // 8))} if affine else {}),
        }
        return Matrix(
            recipe,
            {part: (f"{name}.{part}", kind) for part, kind in kinds.items()},
            partial(_weight, scheme=recipe.weight, shape=shape, dtype=dtype),
        )


def _weight(tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> Quantized:
    codes = _columns(tensors["qweight"])
    zeros = tensors.get("qzeros")
    packed = pack(codes if scheme.affine else codes ^ 8, 4)
    zero_point = None if zeros is None else _columns(zeros).contiguous()
    scale = tensors["scales"].t().contiguous()
    return Quantized(packed, scale, zero_point, None, scheme, torch.Size(shape), dtype)


def _columns(words: Tensor) -> Tensor:
    """The codes ``[N, rows]``, one per byte, in words ``[rows, N / 8]``."""
    codes = from_runs(words.contiguous().view(torch.uint8), 4, 1).unflatten(-1, (-1, 8))
    columns: Tensor = codes[..., list(_PLACES)].flatten(-2).t()
    return columns
