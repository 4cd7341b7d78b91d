"""GPTQ: rounds column by column, and adjusts the later columns to compensate for the errors.

Columns are rounded in the order of falling E[x^2]. Scales are chosen first, for the columns in their original order, so
that no index is needed at run time. Source: Frantar et al., arXiv 2210.17323. Floating-point scales are then fitted to
the codes by least squares, and columns are rounded again. Rows with a smaller error are kept.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.calibrate.statistics import Statistics
from lowbit.datafree import scales
from lowbit.functional import decode, encode, quantize
from lowbit.reference import minimum_value, scale_value, spread
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized, Scales
from lowbit.user_warnings import warn

__all__ = ["damped", "solve", "solve_corrected"]

#: The damping of the Gram matrix, as a fraction of its mean diagonal; and the number of tries, each with ten times as
#: much, if it has no Cholesky factor.
_DAMPING, _TRIES = 0.01, 6

#: How often scales are fitted to the codes, and the ridge of the fit, as a fraction of its mean diagonal.
_FITS, _RIDGE = 2, 1e-6

#: Elements of the equation systems that are solved at a time.
_EQUATIONS = 1 << 24

#: Columns whose errors are applied together to later columns.
_COLUMNS = 128


def solve(weight: Tensor, scheme: Scheme, statistics: Statistics | None) -> Quantized:
    """GPTQ of the weight."""
    assert statistics is not None
    return _solve(weight, scheme, statistics.gram)


def solve_corrected(weight: Tensor, scheme: Scheme, statistics: Statistics | None) -> Quantized:
    """GPTQ of ``W (G + d I) (H + d I)^-1``, the least-squares target on inputs x from quantized layers.

    It comes closest to ``W p`` for the inputs p of the unquantized model, with ``H = E[x x^T]`` and ``G = E[p x^T]``.
    """
    assert statistics is not None
    gram, cross = statistics.gram, statistics.cross
    damping, factor = damped(gram)
    target = weight @ cross + damping * weight
    return _solve(torch.cholesky_solve(target.t(), factor).t().contiguous(), scheme, gram)


def damped(gram: Tensor) -> tuple[float, Tensor]:
    """The damping of ``gram``, and the lower Cholesky factor with it. Raises ValueError if there is no factor."""
    mean = float(gram.diagonal().mean())
    damping = _DAMPING * mean if mean > 0 else 1.0
    eye = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    for attempt in range(_TRIES):
        factor, failed = torch.linalg.cholesky_ex(gram + damping * eye)
        if int(failed) == 0 and bool(factor.isfinite().all()):
            if attempt:
                warn(
                    f"the inputs' Gram matrix [{gram.shape[0]}, {gram.shape[0]}] has no Cholesky factor with the usual "
                    f"damping; {10**attempt} times as much was added to its diagonal"
                )
            return damping, factor
        damping *= 10
    raise ValueError("the inputs' Gram matrix has no Cholesky factor even with high damping; use method='search'")


def _solve(weight: Tensor, scheme: Scheme, gram: Tensor) -> Quantized:
    chosen = scales.search(weight, scheme, gram.diagonal())
    order = gram.diagonal().argsort(descending=True, stable=True)
    damping, factor = damped(gram[order][:, order])
    upper = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    best = current = _rounded_all(weight, scheme, chosen, order, upper)
    if scheme.affine or not chosen.scale.is_floating_point() or scheme.block[0] != 1:
        return best
    full = gram + damping * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    least = _losses(best, weight, full)
    for _ in range(_FITS):
        current = _rounded_all(weight, scheme, _fitted(current, weight, full), order, upper)
        loss = _losses(current, weight, full)
        less = (loss < least)[:, None]
        least = torch.minimum(loss, least)
        best = replace(
            best, codes=torch.where(less, current.codes, best.codes), scale=torch.where(less, current.scale, best.scale)
        )
    return best


def _losses(q: Quantized, weight: Tensor, gram: Tensor) -> Tensor:
    """The squared output error of each row: [N]."""
    error = q.dequantize(torch.float32).sub_(weight)
    return ((error @ gram) * error).sum(1)


def _fitted(q: Quantized, weight: Tensor, gram: Tensor) -> Scales:
    """The scales with the least squared output error of each row's codes."""
    rows, cols = weight.shape
    block = q.scheme.block_of(rows, cols)
    codes = q.dequantize(torch.float32).div_(spread(q.scale.float(), block, rows, cols))
    member = torch.arange(cols, device=weight.device) // block[1]
    piece = max(1, _EQUATIONS // (q.scale.shape[1] ** 2))
    fitted = [
        _least_squares(rows, target, gram, member)
        for rows, target in zip(codes.split(piece), weight.split(piece), strict=True)
    ]
    return scales.rescaled(Scales.of(q), torch.cat(fitted))


def _least_squares(codes: Tensor, weight: Tensor, gram: Tensor, member: Tensor) -> Tensor:
    """The least-squares scales [N, C] of ``codes``. ``member`` [K]: the block of each column."""
    blocks = int(member[-1]) + 1

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(values.shape[0], blocks).index_add_(1, member, values)

    left = torch.stack([sums((codes[:, member == i] @ gram[member == i]) * codes) for i in range(blocks)], 1)
    ridge = _RIDGE * left.diagonal(dim1=1, dim2=2).mean(1)
    left.diagonal(dim1=1, dim2=2).add_(ridge[:, None] + torch.finfo(left.dtype).tiny)
    solution: Tensor = torch.linalg.solve(left, sums((weight @ gram) * codes))
    return solution


def _rounded_all(weight: Tensor, scheme: Scheme, chosen: Scales, order: Tensor, upper: Tensor) -> Quantized:
    """GPTQ in ``order`` with fixed scales."""
    rows, cols = weight.shape
    block = scheme.block_of(rows, cols)
    steps = spread(scale_value(chosen.scale, scheme, chosen.global_scale), block, rows, cols)[:, order].t().contiguous()
    zeros = None
    if chosen.zero_point is not None:
        zero = chosen.zero_point.float()
        if scheme.minimum:
            zero = minimum_value(chosen.zero_point, scheme, chosen.global_scale)
        zeros = spread(zero, block, rows, cols)[:, order].t().contiguous()
    done = _columns(weight[:, order].t().contiguous(), steps, zeros, upper, scheme)
    adjusted = torch.empty_like(weight)
    adjusted[:, order] = done.t()
    return quantize(adjusted, scheme, *chosen)


def _columns(left: Tensor, steps: Tensor, zeros: Tensor | None, upper: Tensor, scheme: Scheme) -> Tensor:
    """The transposed weights [K, N] as they are when they are rounded. Overwrites ``left``."""
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
    """The nearest decoded values; ``zero`` is the zero point or minimum of each."""
    format = scheme.format
    if scheme.minimum and zero is not None:
        return ((column - zero) / step).round_().clamp_(format.qmin, format.qmax).mul_(step).add_(zero)
    units = column / step
    if format.kind != "integer":
        return decode(encode(units, format.name), format.name) * step
    if zero is None:
        return units.round_().clamp_(format.qmin, format.qmax).mul_(step)
    return units.round_().add_(zero).clamp_(format.qmin, format.qmax).sub_(zero).mul_(step)
