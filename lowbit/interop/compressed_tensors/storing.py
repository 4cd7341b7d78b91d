"""How compressed-tensors stores a Linear."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lowbit.interop.compressed_tensors import layouts
from lowbit.interop.compressed_tensors.schemes import Format, group_of
from lowbit.interop.directories.layers import Stored
from lowbit.interop.joining import rows

__all__ = ["About", "store"]


class About(NamedTuple):
    """The format of a weight, and its entry of ``config_groups`` without ``targets``."""

    format: Format
    group: dict[str, Any]


def store(layer: Any, begin: int, end: int) -> Stored:
    """The tensors of rows of a layer. Raises ValueError if compressed-tensors cannot express them."""
    _check(layer, begin)
    about, recipe = About(*group_of(layer.recipe)), layer.recipe
    kinds = layouts.weight_kinds(about.format, layer.scheme, (end - begin, layer.in_features))
    if recipe.static and recipe.input is not None:
        kinds |= layouts.input_kinds(recipe.input)
    return Stored(kinds, partial(_tensors, layer, begin, end, about.format), about)


def _tensors(layer: Any, begin: int, end: int, format: Format) -> dict[str, Tensor]:
    tensors = layouts.to_tensors(rows(layer.weight, begin, end), format)
    scales, scheme = getattr(layer, "input_scales", None), layer.recipe.input
    return tensors if scales is None or scheme is None else tensors | layouts.input_tensors(scales, scheme)


def _check(layer: Any, begin: int) -> None:
    rows, cols = layer.scheme.block
    if rows == 1 and cols is not None and layer.in_features % cols:
        raise ValueError(
            f"in_features is {layer.in_features}, no multiple of its groups of {cols}, and compressed-tensors has "
            f"whole groups only; quantize it with another group, or with one scale per row"
        )
    if rows is not None and begin % rows:
        raise ValueError(f"row {begin} begins a matrix within a block of {rows} rows; use a recipe with groups or rows")
