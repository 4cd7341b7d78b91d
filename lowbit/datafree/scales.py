"""The scale of a block that loses least: candidates for every kind of scheme, tried one after the other.

The loss of a block is ``sum_j h_j (w_j - s Q(w_j / s))^2``, with ``h`` the importance of each column, such as E[x^2] of
the inputs that it multiplies, or of each weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.functional import fake_quantize, quantize
from lowbit.reference import in_blocks, spread
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Scales

__all__ = ["nearest", "rescaled", "search", "signed", "signed_extreme"]

#: Elements that are worked on at a time: with the error beside it this stays in a second-level cache.
_PIECE = 1 << 17

#: How far an integer's largest element may lie beyond the last code, in tenths of a step; and fewer of these, which
#: find nearly as much in a quarter of the time.
_TENTHS, _COARSE_TENTHS = range(-5, 41), range(-4, 41, 4)

#: Fractions of the amax that other formats are scaled to.
_FRACTIONS = tuple(1.04 - 0.01 * k for k in range(45))

#: How far from the nearest E4M3 code of a block's scale another one is tried, and E8M0 exponents.
_E4M3_CODES, _E8M0_CODES = range(-8, 8), (-1, 1)

#: How often the least-squares scale of fixed codes is taken.
_ROUNDS = 2


def nearest(weight: Tensor, scheme: Scheme) -> Scales:
    """The scales that ``quantize`` makes."""
    return Scales.of(quantize(weight, scheme))


def signed(weight: Tensor, scheme: Scheme) -> Scales:
    """Scales of either sign, by which the element of largest magnitude of each block takes an integer's least code."""
    return rescaled(nearest(weight, scheme), signed_extreme(weight, scheme) / float(scheme.format.qmin))


def signed_extreme(weight: Tensor, scheme: Scheme) -> Tensor:
    """The element of largest magnitude of each block, with its sign: [R, C]."""
    blocks = in_blocks(weight, scheme)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return torch.where(high >= -low, high, low)


def search(weight: Tensor, scheme: Scheme, importance: Tensor | None = None, coarse: bool = False) -> Scales:
    """The best scales of ``weight`` [N, K] that the candidates have; never worse than those of ``quantize``.

    ``importance``: of each column, fp32 [K], or of each weight [N, K]. ``coarse``: try fewer scales of integers.
    """
    rows, cols = weight.shape
    block = scheme.block[0]
    step = rows if block is None else max(1, _PIECE // max(cols, 1) // block) * block
    whole = nearest(weight, scheme).global_scale
    parts = []
    for start in range(0, rows, max(step, 1)):
        piece = weight[start : start + step]
        above = whole if whole is None or whole.shape[0] == 1 else whole[start : start + step]
        by_column = importance is None or importance.dim() == 1
        counts = importance if by_column else importance[start : start + step]  # type: ignore[index]
        parts.append(_search(piece, scheme, counts, above, _COARSE_TENTHS if coarse else _TENTHS))
    zero = None if parts[0].zero_point is None else torch.cat([one.zero_point for one in parts])  # type: ignore[misc]
    return Scales(torch.cat([one.scale for one in parts]), zero, whole)


def _search(weight: Tensor, scheme: Scheme, importance: Tensor | None, above: Tensor | None, tenths: range) -> Scales:
    best = Scales.of(quantize(weight, scheme, global_scale=above))
    loss = _loss(weight, scheme, best, importance)
    for candidate in _candidates(weight, scheme, best, tenths):
        best, loss = _better(weight, scheme, importance, best, loss, candidate)
    return _refined(weight, scheme, best, importance)


def _refined(weight: Tensor, scheme: Scheme, best: Scales, importance: Tensor | None) -> Scales:
    """The scales that fit the codes best by least squares, where that loses less; schemes with stored codes of scales,
    and with zero points, stay as they are.
    """
    if scheme.affine or not best.scale.is_floating_point():
        return best
    loss = _loss(weight, scheme, best, importance)
    for _ in range(_ROUNDS):
        step = _spread(best.scale.float(), weight, scheme)
        code = fake_quantize(weight, scheme, *best) / step
        h = 1.0 if importance is None else importance
        above, below = (_sums(h * code * other, scheme) for other in (weight, code))
        fitted = torch.where(below > 0, above / below, best.scale.float())
        best, loss = _better(weight, scheme, importance, best, loss, rescaled(best, fitted))
    return best


def _better(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, best: Scales, loss: Tensor, candidate: Scales
) -> tuple[Scales, Tensor]:
    """Of each block the scale that loses less."""
    other = _loss(weight, scheme, candidate, importance)
    less = other < loss
    zero = best.zero_point
    if zero is not None and candidate.zero_point is not None:
        zero = torch.where(less, candidate.zero_point, zero)
    return best._replace(scale=torch.where(less, candidate.scale, best.scale), zero_point=zero), torch.where(
        less, other, loss
    )


def _loss(weight: Tensor, scheme: Scheme, scales: Scales, importance: Tensor | None) -> Tensor:
    wrong = fake_quantize(weight, scheme, *scales).sub_(weight).square_()
    return _sums(wrong if importance is None else wrong.mul_(importance), scheme)


def _sums(values: Tensor, scheme: Scheme) -> Tensor:
    """The sum over each block: [R, C]."""
    rows, cols = values.shape
    r, c = scheme.block_of(rows, cols)
    if r == 1 and cols % c == 0:
        return values.view(rows, cols // c, c).sum(2)
    return in_blocks(values, scheme).sum((1, 3))


def _spread(per_block: Tensor, like: Tensor, scheme: Scheme) -> Tensor:
    rows, cols = like.shape
    return spread(per_block, scheme.block_of(rows, cols), rows, cols)


def rescaled(best: Scales, scale: Tensor) -> Scales:
    """``best`` with floating-point scales in the dtype that it stores; where that holds no usable number, its own."""
    stored = scale.to(best.scale.dtype)
    usable = stored.isfinite() & (stored.abs() >= torch.finfo(stored.dtype).tiny)
    return best._replace(scale=torch.where(usable, stored, best.scale))


# -- candidates -------------------------------------------------------------------------------------------------------
def _candidates(weight: Tensor, scheme: Scheme, best: Scales, tenths: range) -> Iterator[Scales]:
    """Scales to try, other than the scheme's own; ``tenths``: of integers."""
    if scheme.affine:
        yield from _narrowed(weight, scheme, best)
    elif not best.scale.is_floating_point():
        yield from _codes(scheme, best)
    elif scheme.format.kind == "integer":
        extreme, least = signed_extreme(weight, scheme), float(scheme.format.qmin)
        for beyond in tenths:
            yield rescaled(best, extreme / (least - 0.1 * beyond))
    else:
        extreme = signed_extreme(weight, scheme)
        for fraction in _FRACTIONS:
            yield rescaled(best, extreme.abs() * (fraction / scheme.format.max))


def _codes(scheme: Scheme, best: Scales) -> Iterator[Scales]:
    """Neighbours among the codes of the scheme's scale format."""
    e8m0 = scheme.scale_format.name == "e8m0"
    offsets, most = (_E8M0_CODES, 254) if e8m0 else (_E4M3_CODES, 126)
    least = 0 if e8m0 else 1
    magnitude = best.scale.int() if e8m0 else best.scale.int() & 0x7F
    for offset in offsets:
        moved = (magnitude + offset).clamp(least, most)
        yield best._replace(scale=(moved if e8m0 else moved | (best.scale.int() & 0x80)).to(torch.uint8))


def _narrowed(weight: Tensor, scheme: Scheme, best: Scales) -> Iterator[Scales]:
    """Of schemes with zero points: ranges between fractions of a block's minimum and maximum."""
    blocks, format = in_blocks(weight, scheme), scheme.format
    low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
    for fraction in _FRACTIONS:
        candidate = rescaled(best, (high - low) * (fraction / (format.qmax - format.qmin)))
        zero = (format.qmin - (low * fraction / candidate.scale.float()).round()).clamp(format.qmin, format.qmax)
        assert best.zero_point is not None
        yield candidate._replace(zero_point=zero.to(best.zero_point.dtype))
