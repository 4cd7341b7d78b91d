"""Searches the scale of each block with the least squared error, among candidates for each kind of scheme.

The loss of a block is ``sum_j h_j (w_j - s Q(w_j / s))^2``. ``h`` is the importance of each column, such as E[x^2] of
its inputs, or of each weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.functional import fake_quantize, quantize
from lowbit.reference import in_blocks, of_range, spread
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Scales

__all__ = ["nearest", "rescaled", "search", "signed", "signed_extreme"]

#: Elements per piece, which with their errors stay in a second-level cache.
_PIECE = 1 << 17

#: How far the largest element may exceed the last integer code, in tenths of a step; and a coarser grid, which gains
#: nearly as much in a quarter of the time.
_TENTHS, _COARSE_TENTHS = range(-5, 41), range(-4, 41, 4)

#: Fractions of the amax for other formats.
_FRACTIONS = tuple(1.04 - 0.01 * k for k in range(45))

#: Offsets from the nearest E4M3 code of a block's scale, and from the E8M0 exponent.
_E4M3_CODES, _E8M0_CODES = range(-8, 8), (-1, 1)

#: Offsets from the integer scale of a block of a superblock, and fractions of a block's range around its center.
_INTEGER_CODES, _SHARES = (-2, -1, 1, 2), (1.04, 0.96, 0.92, 0.88, 0.84)

#: Rounds of the least-squares fit of scales to codes.
_ROUNDS = 2


def nearest(weight: Tensor, scheme: Scheme) -> Scales:
    """The scales of ``quantize``."""
    return Scales.of(quantize(weight, scheme))


def signed(weight: Tensor, scheme: Scheme) -> Scales:
    """Scales of either sign, so that the element of largest magnitude of each block gets an integer's least code."""
    return rescaled(nearest(weight, scheme), signed_extreme(weight, scheme) / float(scheme.format.qmin))


def signed_extreme(weight: Tensor, scheme: Scheme) -> Tensor:
    """The element of largest magnitude of each block, with its sign: [R, C]."""
    blocks = in_blocks(weight, scheme)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return torch.where(high >= -low, high, low)


def search(weight: Tensor, scheme: Scheme, importance: Tensor | None = None, coarse: bool = False) -> Scales:
    """The best candidate scales of ``weight`` [N, K], never worse than the scales of ``quantize``.

    ``importance``: of each column fp32 [K], or of each weight [N, K]. ``coarse``: try fewer scales of integers.
    """
    rows, cols = weight.shape
    block = scheme.block[0]
    step = rows if block is None else max(1, _PIECE // max(cols, 1) // block) * block
    global_scale = nearest(weight, scheme).global_scale
    parts = []
    for start in range(0, rows, max(step, 1)):
        piece = weight[start : start + step]
        shared = global_scale is None or global_scale.shape[0] == 1
        above = global_scale if shared else global_scale[start : start + step]  # type: ignore[index]
        by_column = importance is None or importance.dim() == 1
        counts = importance if by_column else importance[start : start + step]  # type: ignore[index]
        parts.append(_search(piece, scheme, counts, above, _COARSE_TENTHS if coarse else _TENTHS))
    zero = None if parts[0].zero_point is None else torch.cat([part.zero_point for part in parts])  # type: ignore[misc]
    return Scales(torch.cat([part.scale for part in parts]), zero, global_scale)


def _search(weight: Tensor, scheme: Scheme, importance: Tensor | None, above: Tensor | None, tenths: range) -> Scales:
    best = Scales.of(quantize(weight, scheme, global_scale=above))
    loss = _loss(weight, scheme, best, importance)
    for candidate in _candidates(weight, scheme, best, tenths):
        best, loss = _better(weight, scheme, importance, best, loss, candidate)
    return _refined(weight, scheme, best, importance)


def _refined(weight: Tensor, scheme: Scheme, best: Scales, importance: Tensor | None) -> Scales:
    """The least-squares scales of the codes, if they are better. Scales stored as codes, and zero points, stay."""
    if scheme.affine or not best.scale.is_floating_point():
        return best
    loss = _loss(weight, scheme, best, importance)
    for _ in range(_ROUNDS):
        step = _spread(best.scale.float(), weight, scheme)
        code = fake_quantize(weight, scheme, *best) / step
        h = 1.0 if importance is None else importance
        numerator, denominator = (_sums(h * code * factor, scheme) for factor in (weight, code))
        fitted = torch.where(denominator > 0, numerator / denominator, best.scale.float())
        best, loss = _better(weight, scheme, importance, best, loss, rescaled(best, fitted))
    return best


def _better(
    weight: Tensor, scheme: Scheme, importance: Tensor | None, best: Scales, loss: Tensor, candidate: Scales
) -> tuple[Scales, Tensor]:
    """For each block the scale with the smaller loss, and that loss."""
    new_loss = _loss(weight, scheme, candidate, importance)
    less = new_loss < loss
    zero = best.zero_point
    if zero is not None and candidate.zero_point is not None:
        zero = torch.where(less, candidate.zero_point, zero)
    best = best._replace(scale=torch.where(less, candidate.scale, best.scale), zero_point=zero)
    return best, torch.where(less, new_loss, loss)


def _loss(weight: Tensor, scheme: Scheme, scales: Scales, importance: Tensor | None) -> Tensor:
    squares = fake_quantize(weight, scheme, *scales).sub_(weight).square_()
    return _sums(squares if importance is None else squares.mul_(importance), scheme)


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
    """``best`` with other floating-point scales in its dtype, except those that are not finite and normal there."""
    stored = scale.to(best.scale.dtype)
    usable = stored.isfinite() & (stored.abs() >= torch.finfo(stored.dtype).tiny)
    return best._replace(scale=torch.where(usable, stored, best.scale))


# -- candidates -------------------------------------------------------------------------------------------------------
def _candidates(weight: Tensor, scheme: Scheme, best: Scales, tenths: range) -> Iterator[Scales]:
    """Candidates besides the scheme's default scales. ``tenths``: the grid for integers."""
    if scheme.minimum:
        yield from _around_center(weight, scheme, best)
    elif scheme.superblocks:
        for offset in _INTEGER_CODES:
            yield best._replace(scale=(best.scale.int() + offset).clamp(1, 127).to(torch.uint8))
    elif scheme.affine:
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
    """Neighbouring codes of the scheme's scale format."""
    e8m0 = scheme.scale_format.name == "e8m0"
    offsets, most = (_E8M0_CODES, 254) if e8m0 else (_E4M3_CODES, 126)
    least = 0 if e8m0 else 1
    magnitude = best.scale.int() if e8m0 else best.scale.int() & 0x7F
    for offset in offsets:
        code = (magnitude + offset).clamp(least, most)
        yield best._replace(scale=(code if e8m0 else code | (best.scale.int() & 0x80)).to(torch.uint8))


def _around_center(weight: Tensor, scheme: Scheme, best: Scales) -> Iterator[Scales]:
    """For schemes with minima: wider and narrower ranges."""
    high, low = (in_blocks(end, scheme, -torch.inf).amax((1, 3)) for end in (weight, -weight))
    center, half = (high - low) / 2, (high + low) / 2
    for share in _SHARES:
        pair = of_range(center - share * half, center + share * half, scheme, best.global_scale)
        yield Scales(*pair, best.global_scale)


def _narrowed(weight: Tensor, scheme: Scheme, best: Scales) -> Iterator[Scales]:
    """For schemes with zero points: ranges between fractions of a block's minimum and maximum."""

    blocks, format = in_blocks(weight, scheme), scheme.format
    low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
    for fraction in _FRACTIONS:
        candidate = rescaled(best, (high - low) * (fraction / (format.qmax - format.qmin)))
        zero = (format.qmin - (low * fraction / candidate.scale.float()).round()).clamp(format.qmin, format.qmax)
        assert best.zero_point is not None
        yield candidate._replace(zero_point=zero.to(best.zero_point.dtype))
