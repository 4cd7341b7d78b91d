"""Rules for block scales other than the largest magnitude: ``Cast.rule`` (``search``, ``four-over-six``).

The error of a candidate is summed in a fixed order, so that every backend chooses the same scale. Source:
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

#: Offsets from the code of the amax scale that ``search`` tries: from clipping the largest element to four fifths, up
#: to the scale at which it becomes 4 instead of FP4's 6.
_OFFSETS = {"fp8_e4m3": (-2, -1, 1, 2, 3, 4, 5), "e8m0": (-1, 1)}
#: The largest code of each scale format that is not NaN.
_MOST = {"fp8_e4m3": 126, "e8m0": 254}
#: Factor on the global scale if block scales may exceed the amax scale: the largest E4M3 number over 256, which the
#: papers use as the largest amax scale.
ROOM = find("fp8_e4m3").max / 256


def refuses(cast: Cast, role: str) -> str | None:
    """The reason why training does not support the scales of this cast, or None."""
    contracted = 1 if role in ("output.a", "output.b", "grad_input.a") else 0
    if cast.rounding == "eden" and cast.scheme.block[contracted] == 1:
        return f"eden needs blocks along the contracted axis, and {cast.scheme} has them along the other"
    if cast.rule == "amax":
        return None
    if cast.rounding != "nearest":
        return f"rule={cast.rule!r} may clip, which makes stochastic rounding biased; use rule='amax'"
    scale_format = cast.scheme.scale_format.name
    if scale_format not in _OFFSETS:
        return f"rule={cast.rule!r} needs e4m3 or e8m0 scales, and {cast.scheme} has {scale_format} scales"
    return None


def quantized(x: Tensor, cast: Cast, factors: Tensor | None = None) -> Quantized:
    """Quantize ``x [rows, cols]``, multiplied by ``factors`` in fp32 if given, with a cast that needs no training
    state.
    """
    if cast.rule == "amax":
        return quantize(x, cast.scheme, factors=factors)
    return ruled(x if factors is None else x * factors, cast)


def ruled(x: Tensor, cast: Cast) -> Quantized:
    """Quantize ``x [rows, cols]``, choosing for each block the candidate scale of the rule with the least squared
    error.
    """
    exact = x.float()
    best = least = None
    for candidate in _CANDIDATES[cast.rule](x, cast):
        error = quantize(x, cast.scheme, *candidate).dequantize(torch.float32) - exact
        loss = block_sums(error * error, cast.scheme.block_of(*x.shape))
        if best is None or least is None:
            best, least = candidate, loss
            continue
        less = loss < least  # False for blocks with NaN and blocks of zeros, which keep the first scale
        best = best._replace(scale=torch.where(less, candidate.scale, best.scale))
        least = torch.where(less, loss, least)
    assert best is not None
    return quantize(x, cast.scheme, *best)


def _searched(x: Tensor, cast: Cast) -> Iterator[Scales]:
    """The amax scale and its neighbours."""
    first = Scales.of(quantize(x, cast.scheme))
    yield first
    scale_format = cast.scheme.scale_format.name
    for offset in _OFFSETS[scale_format]:
        moved = (first.scale.int() + offset).clamp(1, _MOST[scale_format])
        yield first._replace(scale=moved.to(torch.uint8))


def _four_over_six(x: Tensor, cast: Cast) -> Iterator[Scales]:
    """Scales at which the largest element of a block becomes 6, or 4 (arXiv 2512.02010)."""
    global_scale = Scales.of(quantize(x, cast.scheme)).global_scale
    assert global_scale is not None
    global_scale = global_scale * ROOM
    for matrix in (x, x.float() * 1.5):
        yield Scales.of(quantize(matrix, cast.scheme, global_scale=global_scale))


_CANDIDATES: dict[str, Callable[[Tensor, Cast], Iterator[Scales]]] = {
    "search": _searched,
    "four-over-six": _four_over_six,
}


def block_sums(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Sum each block, fp32 ``[R, C]``, by adding halves repeatedly, first over its columns, then over its rows."""
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
