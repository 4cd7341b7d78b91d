"""How a block's scale follows from its elements, besides their largest magnitude: ``Cast.rule``.

A candidate's error is summed in one order of additions, so that every backend chooses the same scale. Source:
docs/numerics.md section 14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.formats import find
from lowbit.functional.quantizers import quantize
from lowbit.recipes import Cast
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["ROOM", "block_sums", "quantized", "refuses", "ruled"]

#: How far from the code of the nearest scale others are tried: from the largest element clipped to four fifths, up to
#: where it takes 4 of FP4's 6.
_OFFSETS = {"fp8_e4m3": (-2, -1, 1, 2, 3, 4, 5), "e8m0": (-1, 1)}
#: The largest codes that are numbers.
_MOST = {"fp8_e4m3": 126, "e8m0": 254}
#: What the global scale is raised by where block scales may become larger than amax makes them, up to this many times:
#: their largest number over 256, the largest that the papers let amax give.
ROOM = find("fp8_e4m3").max / 256


def refuses(cast: Cast, role: str) -> str | None:
    """Why training cannot make the scales of this cast, or None."""
    contracted = 1 if role in ("output.a", "output.b", "grad_input.a") else 0
    if cast.rounding == "eden" and cast.scheme.block[contracted] == 1:
        return f"eden corrects vectors along the axis that is contracted, and {cast.scheme} has blocks along the other"
    if cast.rule == "amax":
        return None
    if cast.rounding != "nearest":
        return f"rule={cast.rule!r} may clip, which makes stochastic rounding biased; say rule='amax'"
    found = cast.scheme.scale_format.name
    if found not in _OFFSETS:
        return f"rule={cast.rule!r} tries codes of scales (e4m3, e8m0), and {cast.scheme} has {found} ones"
    return None


def quantized(x: Tensor, cast: Cast, factors: Tensor | None = None) -> Quantized:
    """``x [rows, cols]``, times ``factors`` in fp32, to nearest as a cast says that needs no training state."""
    if cast.rule == "amax":
        return quantize(x, cast.scheme, factors=factors)
    return ruled(x if factors is None else x * factors, cast)


def ruled(x: Tensor, cast: Cast) -> Quantized:
    """``x [rows, cols]`` with the scale of each block that has the least squared error of the rule's candidates."""
    exact = x.float()
    best = least = None
    for candidate in _CANDIDATES[cast.rule](x, cast):
        wrong = quantize(x, cast.scheme, *candidate).dequantize(torch.float32) - exact
        loss = block_sums(wrong * wrong, cast.scheme.block_of(*x.shape))
        if best is None or least is None:
            best, least = candidate, loss
            continue
        less = loss < least  # a block with NaN keeps its scale, and so does one of zeros
        best = best._replace(scale=torch.where(less, candidate.scale, best.scale))
        least = torch.where(less, loss, least)
    assert best is not None
    return quantize(x, cast.scheme, *best)


def _searched(x: Tensor, cast: Cast) -> Iterator[Scales]:
    """The scale that the largest magnitude gives, and its neighbours."""
    first = Scales.of(quantize(x, cast.scheme))
    yield first
    kind = cast.scheme.scale_format.name
    for offset in _OFFSETS[kind]:
        moved = (first.scale.int() + offset).clamp(1, _MOST[kind])
        yield first._replace(scale=moved.to(torch.uint8))


def _four_over_six(x: Tensor, cast: Cast) -> Iterator[Scales]:
    """The largest element of a block becomes 6, or 4 (arXiv 2512.02010)."""
    above = Scales.of(quantize(x, cast.scheme)).global_scale
    assert above is not None
    above = above * ROOM
    for matrix in (x, x.float() * 1.5):
        yield Scales.of(quantize(matrix, cast.scheme, global_scale=above))


_CANDIDATES: dict[str, Callable[[Tensor, Cast], Iterator[Scales]]] = {
    "search": _searched,
    "four-over-six": _four_over_six,
}


def block_sums(values: Tensor, block: tuple[int, int]) -> Tensor:
    """fp32 ``[R, C]``: halves are added until one number is left, first of the columns of a block, then of its rows."""
    rows, cols = values.shape
    r, c = block
    values = pad(values, (0, -cols % c, 0, -rows % r)).reshape(-(-rows // r), r, -(-cols // c), c)
    return _halved(_halved(values, 3), 1).reshape(-(-rows // r), -(-cols // c))


def _halved(values: Tensor, axis: int) -> Tensor:
    while values.shape[axis] > 1:
        count = values.shape[axis]
        if count % 2:
            values, count = torch.cat([values, torch.zeros_like(values.narrow(axis, 0, 1))], axis), count + 1
        values = values.narrow(axis, 0, count // 2) + values.narrow(axis, count // 2, count // 2)
    return values
