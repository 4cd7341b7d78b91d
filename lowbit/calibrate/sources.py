"""Weights that methods without data make, for what takes them one by one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.calibrate.methods import METHODS, Method
from lowbit.convert.maker import Nearest, Source, energies, require_numbers
from lowbit.functional import hadamard
from lowbit.recipes import Recipe
from lowbit.tensor.quantized import Quantized

__all__ = ["without_data"]


def without_data(method: str | Method, caller: str) -> Source:
    """The weights that a method makes, or that of a name. Raises ValueError for one that is unknown or needs data."""
    found = METHODS.get(method) if isinstance(method, str) else method
    if found is None or found.need != "nothing":
        free = ", ".join(row.name for row in METHODS.values() if row.need == "nothing")
        raise ValueError(
            f"{caller} takes methods without data, one of {free}; got {(found.name if found else method)!r}"
        )
    return Nearest() if found == METHODS["nearest"] else _Solved(found)


class _Solved(Nearest):
    """Weights are what a method without data makes of them."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor]:
        require_numbers(matrix)
        reason = self.method.refuses(recipe.weight)
        if reason is not None:
            raise ValueError(f"method {self.method.name!r} cannot serve it: {reason}")
        rotated = matrix.float() if recipe.rotation is None else hadamard(matrix.float(), recipe.rotation)
        made = replace(self.method.solve(rotated, recipe.weight, None), dtype=matrix.dtype)
        return made, energies(rotated, made.dequantize(torch.float32))
