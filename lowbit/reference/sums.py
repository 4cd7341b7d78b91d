"""Sums of squares of the rows or columns of a matrix, as integers (section 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.reference.codec import require_subnormals

#: Elements that are looked at together.
_RUN = 1 << 18
#: Exponents beyond these mean the same as these: no fp32 number but 0 is below the least one in magnitude, and squares
#: of all are less than half a step of the largest one.
_ENDS = (-256, 256)


def square_sums(x: Tensor, exponents: Tensor, axis: int, bits: int) -> Tensor:
    """int64 sums over rows (axis 0) or columns (1) of ``x^2`` in steps of ``2^(2 exponent - bits)``.

    Each term is rounded to nearest; elements whose magnitude is not below ``2^exponent`` count as 0.
    ``x: [rows, cols]``; ``exponents``: integers, one for each row or column.
    """
    require_subnormals(x)
    scale = _power_of_two(bits - 2 * exponents.long().clamp(*_ENDS))
    step = max(1, _RUN // max(x.shape[1], 1))
    if axis == 0:
        runs = zip(x.split(step), scale[:, None].split(step), strict=True)
        return torch.cat([_terms(rows, here, bits).sum(1) for rows, here in runs])
    sums = torch.zeros_like(exponents, dtype=torch.int64)
    for rows in x.split(step):
        sums += _terms(rows, scale, bits).sum(0)
    return sums


def _terms(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Squares times powers of two, which fp64 holds exactly, rounded once."""
    exact = x.double().square() * scale
    return exact.where(exact < 2.0**bits, 0.0).round().long()


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp64, by its bits: exact on every device."""
    return (exponent + 1023 << 52).view(torch.float64)
