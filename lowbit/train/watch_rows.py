"""Row: one line of ``train.watch``, with the quantization error of one operand, and its format in a table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEAD", "NUMBERS", "Row", "written"]

#: The columns of a table: title, field and format.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("layer", "layer", ""), ("role", "role", ""), ("cast", "cast", ""), ("SQNR, dB", "sqnr", ".1f"),
    ("underflow", "underflow", ".2%"), ("saturated", "saturated", ".2%"), ("overflow", "overflow", ".2%"),
    ("not finite", "nonfinite", ","), ("amax", "amax", ".3g"),
)  # fmt: skip
#: The titles, and the indices of numeric columns.
HEAD, NUMBERS = tuple(title for title, _, _ in _COLUMNS), range(3, len(_COLUMNS))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Quantization error of one operand of one layer in one step, summed over its micro-batches.

    Attributes:
        step: number of the step.
        layer: name of the layer.
        role: the operand, as ``Recipe.casts`` names it.
        cast: the cast as text.
        elements: number of quantized elements.
        nonfinite: number of elements that were Inf or NaN before the cast.
        amax: the largest finite magnitude before the cast.
        overflow: share of elements that are not finite before or after the cast.
        underflow: share of elements that were not zero and became zero.
        saturated: share of elements with the smallest or largest code that lie more than half a step beyond it. 0 for
            affine schemes, whose scales cover the range.
        sqnr: 10 log10 of the sum of squares over the sum of squared errors, in dB, of elements that are finite before
            and after the cast. Inf without errors, NaN if all elements are 0.
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
    """The cells of a row, in the order of ``HEAD``."""
    return tuple(format(getattr(row, name), style) for _, name, style in _COLUMNS)
