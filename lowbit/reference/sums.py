"""Reference of integer sums of squares of the rows or columns of a matrix (section 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.reference.codec import require_subnormals

#: Elements per chunk.
_RUN = 1 << 18
#: Exponents are clamped to these without an effect: no fp32 number except 0 is smaller in magnitude than the first, and
#: for the second all squares are less than half a step.
_ENDS = (-256, 256)


def square_sums(x: Tensor, exponents: Tensor, axis: int, bits: int) -> Tensor:
    """int64 sums over rows (axis 0) or columns (1) of ``x^2``, in units of ``2^(2 exponent - bits)``.

    Each term is rounded to nearest. Elements with a magnitude of at least ``2^exponent`` count as 0. ``x`` is
    ``[rows, cols]``; ``exponents`` are integers, one per row or column.
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
    """Squares times powers of two, exact in fp64, then rounded once."""
    exact = x.double().square() * scale
    return exact.where(exact < 2.0**bits, 0.0).round().long()


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp64 from bits, which is exact on every device."""
    return (exponent + 1023 << 52).view(torch.float64)
