"""The rows of ``train.watch``: what the casts of an operand lost, and how a table writes it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEAD", "NUMBERS", "Row", "written"]

#: What a table shows: a column's title, the field, and how it is written.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("layer", "layer", ""), ("role", "role", ""), ("cast", "cast", ""), ("SQNR, dB", "sqnr", ".1f"),
    ("underflow", "underflow", ".2%"), ("saturated", "saturated", ".2%"), ("overflow", "overflow", ".2%"),
    ("not finite", "nonfinite", ","), ("amax", "amax", ".3g"),
)  # fmt: skip
#: The titles, and which columns are numbers.
HEAD, NUMBERS = tuple(title for title, _, _ in _COLUMNS), range(3, len(_COLUMNS))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the casts of one operand of one layer lost in one step, all micro-batches together.

    ``role``: the operand, as ``Recipe.casts`` names it. ``elements``: how many were quantized. ``nonfinite``: how many
    of them were Inf or NaN before. ``amax``: the largest finite magnitude before. ``overflow``: the share that is not
    finite before or after. ``underflow``: the share that was not zero and became zero. ``saturated``: the share that
    has the least or the largest code and lies more than half a step beyond it, so that more than rounding is lost; 0 of
    affine schemes, whose scales span what they quantize. ``sqnr``: 10 log10 of the sum of squares over that of errors,
    in dB, of elements that are finite before and after; Inf without errors, NaN without elements other than 0.
    """

    step: int
    layer: str
    role: str
    cast: str
    elements: int
    nonfinite: int
    amax: float
    overflow: float
    underflow: float
    saturated: float
    sqnr: float


def written(row: Row) -> tuple[str, ...]:
    """The cells of a row, below ``HEAD``."""
    return tuple(format(getattr(row, name), style) for _, name, style in _COLUMNS)
