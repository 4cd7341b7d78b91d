"""GPTQ: columns are rounded one after the other, and what is not rounded yet makes up for the errors.

Columns come in the order of falling E[x^2]; the scales are chosen before, for the columns in their own order, so that
no index is needed at run time. Source: Frantar et al., arXiv 2210.17323. Then, where scales are floating-point numbers,
those that fit the codes best are found by least squares and columns are rounded again, as long as rows lose less.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.calibrate.statistics import Statistics
from lowbit.datafree import scales
from lowbit.functional import decode, encode, quantize
from lowbit.reference import scale_value, spread
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized, Scales
from lowbit.user_warnings import warn

__all__ = ["damped", "solve", "solve_corrected"]

#: What is added to the diagonal of the Gram matrix, as a fraction of its mean; and how often ten times as much is
#: tried where it has no Cholesky factor.
_DAMPING, _TRIES = 0.01, 6

#: How often scales are fitted to the codes, and what keeps the fit solvable, as a fraction of its mean diagonal.
_FITS, _RIDGE = 2, 1e-6

#: Numbers in the equations that are solved at a time.
_EQUATIONS = 1 << 24

#: Columns whose errors are applied together to the columns behind them.
_COLUMNS = 128


def solve(weight: Tensor, scheme: Scheme, statistics: Statistics | None) -> Quantized:
    """The weight with each column's error made up for by the columns after it."""
    assert statistics is not None
    return _solve(weight, scheme, statistics.gram)


def solve_corrected(weight: Tensor, scheme: Scheme, statistics: Statistics | None) -> Quantized:
    """GPTQ of ``W (G + d I) (H + d I)^-1``: on the inputs that the quantized layers before give (``H = E[x x^T]``) it
    comes closest to what ``W`` computes of the inputs ``p`` of the unquantized model (``G = E[p x^T]``).
    """
    assert statistics is not None
    gram, cross = statistics.gram, statistics.cross
    damping, factor = damped(gram)
    target = weight @ cross + damping * weight
    return _solve(torch.cholesky_solve(target.t(), factor).t().contiguous(), scheme, gram)


def damped(gram: Tensor) -> tuple[float, Tensor]:
    """What was added to the diagonal of ``gram``, and the lower Cholesky factor of the sum.

    Raises ValueError where there is none.
    """
    mean = float(gram.diagonal().mean())
    damping = _DAMPING * mean if mean > 0 else 1.0
    eye = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    for attempt in range(_TRIES):
        factor, wrong = torch.linalg.cholesky_ex(gram + damping * eye)
        if int(wrong) == 0 and bool(factor.isfinite().all()):
            if attempt:
                warn(
                    f"the inputs' Gram matrix [{gram.shape[0]}, {gram.shape[0]}] has no Cholesky factor with the usual "
                    f"damping; {10**attempt} times as much was added to its diagonal"
                )
            return damping, factor
        damping *= 10
    raise ValueError("the Gram matrix of the inputs has no Cholesky factor even with much damping; use method='search'")


def _solve(weight: Tensor, scheme: Scheme, gram: Tensor) -> Quantized:
    chosen = scales.search(weight, scheme, gram.diagonal())
    order = gram.diagonal().argsort(descending=True, stable=True)
    damping, factor = damped(gram[order][:, order])
    upper = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    best = found = _rounded_all(weight, scheme, chosen, order, upper)
    if scheme.affine or not chosen.scale.is_floating_point() or scheme.block[0] != 1:
        return best
    full = gram + damping * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    least = _losses(best, weight, full)
    for _ in range(_FITS):
        found = _rounded_all(weight, scheme, _fitted(found, weight, full), order, upper)
        loss = _losses(found, weight, full)
        less = (loss < least)[:, None]
        least = torch.minimum(loss, least)
        best = replace(
            best, codes=torch.where(less, found.codes, best.codes), scale=torch.where(less, found.scale, best.scale)
        )
    return best


def _losses(q: Quantized, weight: Tensor, gram: Tensor) -> Tensor:
    """What each row loses: [N]."""
    wrong = q.dequantize(torch.float32).sub_(weight)
    return ((wrong @ gram) * wrong).sum(1)


def _fitted(q: Quantized, weight: Tensor, gram: Tensor) -> Scales:
    """For each row the scales of its blocks that fit its codes best: those of least squares in the inputs' measure."""
    rows, cols = weight.shape
    block = q.scheme.block_of(rows, cols)
    codes = q.dequantize(torch.float32).div_(spread(q.scale.float(), block, rows, cols))
    member = torch.arange(cols, device=weight.device) // block[1]
    piece = max(1, _EQUATIONS // (q.scale.shape[1] ** 2))
    fitted = [
        _least_squares(one, target, gram, member)
        for one, target in zip(codes.split(piece), weight.split(piece), strict=True)
    ]
    return scales.rescaled(Scales.of(q), torch.cat(fitted))


def _least_squares(codes: Tensor, weight: Tensor, gram: Tensor, member: Tensor) -> Tensor:
    """The scales [N, C] by which ``codes`` come closest to ``weight``; ``member`` [K]: the block of each column."""
    blocks = int(member[-1]) + 1

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(values.shape[0], blocks).index_add_(1, member, values)

    left = torch.stack([sums((codes[:, member == i] @ gram[member == i]) * codes) for i in range(blocks)], 1)
    ridge = _RIDGE * left.diagonal(dim1=1, dim2=2).mean(1)
    left.diagonal(dim1=1, dim2=2).add_(ridge[:, None] + torch.finfo(left.dtype).tiny)
    found: Tensor = torch.linalg.solve(left, sums((weight @ gram) * codes))
    return found


def _rounded_all(weight: Tensor, scheme: Scheme, chosen: Scales, order: Tensor, upper: Tensor) -> Quantized:
    """The weight with each column's error made up for by the columns after it in ``order``, by these scales."""
    rows, cols = weight.shape
    block = scheme.block_of(rows, cols)
    steps = spread(scale_value(chosen.scale, scheme, chosen.global_scale), block, rows, cols)[:, order].t().contiguous()
    zeros = None
    if chosen.zero_point is not None:
        zeros = spread(chosen.zero_point.float(), block, rows, cols)[:, order].t().contiguous()
    done = _columns(weight[:, order].t().contiguous(), steps, zeros, upper, scheme)
    adjusted = torch.empty_like(weight)
    adjusted[:, order] = done.t()
    return quantize(adjusted, scheme, *chosen)


def _columns(left: Tensor, steps: Tensor, zeros: Tensor | None, upper: Tensor, scheme: Scheme) -> Tensor:
    """The weights as they are when they are rounded, one column a row: [K, N]. Overwrites ``left``."""
    for start in range(0, left.shape[0], _COLUMNS):
        stop = min(start + _COLUMNS, left.shape[0])
        piece, errors = left[start:stop], torch.empty_like(left[start:stop])
        inside = upper[start:stop, start:stop]
        for j in range(stop - start):
            column = piece[j]
            rounded = _rounded(column, steps[start + j], None if zeros is None else zeros[start + j], scheme)
            errors[j] = (column - rounded) / inside[j, j]
            if j + 1 < stop - start:
                piece[j + 1 :].addr_(inside[j, j + 1 :], errors[j], alpha=-1)
        if stop < left.shape[0]:
            left[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    return left


def _rounded(column: Tensor, step: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """The nearest numbers that codes stand for."""
    format, units = scheme.format, column / step
    if format.kind != "integer":
        return decode(encode(units, format.name), format.name) * step
    if zero is None:
        return units.round_().clamp_(format.qmin, format.qmax).mul_(step)
    return units.round_().add_(zero).clamp_(format.qmin, format.qmax).sub_(zero).mul_(step)
