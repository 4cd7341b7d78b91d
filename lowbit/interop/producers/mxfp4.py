"""The rules by which gpt-oss stores its experts in MXFP4.

A stack is ``*_blocks [E, N, K / 32, 16]`` and ``*_scales [E, N, K / 32]``. The even column is in the low bits of a
byte, and scales are the bytes of E8M0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from lowbit.interop.directories.recipes import recipe_of
from lowbit.interop.directories.rules import Kind, Matrix, Rules
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["MXFP4"]

_BLOCK = 32


class MXFP4(Rules):
    """Experts in MXFP4; all other layers are floats."""

    method = "mxfp4"
    marker = "weight_blocks"

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        raise ValueError("only experts are quantized in this layout")

    def experts(self, name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Matrix] | None:
        count, rows, cols = shape
        if f"{name}_blocks" not in self.checkpoint.entries:
            return None
        if cols % _BLOCK:
            raise ValueError(f"it has {cols} columns, no multiple of {_BLOCK}")
        recipe = recipe_of(find_scheme("mxfp4"), None)
        tensors = {
            "blocks": (f"{name}_blocks", Kind(torch.uint8, (count, rows, cols // _BLOCK, _BLOCK // 2))),
            "scales": (f"{name}_scales", Kind(torch.uint8, (count, rows, cols // _BLOCK))),
        }
        weight = partial(_weight, scheme=recipe.weight, shape=(rows, cols), dtype=dtype)
        return [Matrix(recipe, tensors, partial(weight, index=index)) for index in range(count)]


def _weight(
    tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype, index: int
) -> Quantized:
    codes, scale = tensors["blocks"][index].flatten(1), tensors["scales"][index]
    return Quantized(codes.clone(), scale.clone(), None, None, scheme, torch.Size(shape), dtype)
