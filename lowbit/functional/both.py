"""quantize_both: a matrix in two schemes, which a GPU reads once. Source: docs/numerics.md sections 3, 5, 7 and 13."""

from __future__ import annotations

from torch import Tensor

from lowbit.functional.quantizers import quantize
from lowbit.functional.rotation import by_kernel, signed_hadamard
from lowbit.op_calls import call
from lowbit.rounding import Rounding
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["quantize_both"]


def quantize_both(
    x: Tensor,
    first: Scheme,
    second: Scheme,
    block: int | None = None,
    rng: Tensor | None = None,
    streams: tuple[int | None, int | None] = (None, None),
) -> tuple[Quantized, Quantized]:
    """``quantize(x, first)``, and ``quantize(x, second)`` of ``x`` after ``signed_hadamard`` along its rows.

    ``x``: float ``[rows, cols]``. ``block``: of the transform, a power of two up to 128; None: there is none.
    ``rng``: int64 ``[2]`` of seed and step for stochastic rounding. ``streams``: those of the two, None to nearest.
    Neither scheme has zero points. No gradient passes.
    """
    if not by_kernel(x):
        made = quantize(x, first, rounding=_rounding(rng, streams[0]))
        turned = x if block is None else signed_hadamard(x, block, 0)
        return made, quantize(turned, second, rounding=_rounding(rng, streams[1]))
    words = ["nearest" if stream is None else "stochastic" for stream in streams]
    given = rng if "stochastic" in words else None
    places = [stream or 0 for stream in streams]
    parts = call("quantize_both", x.detach(), first.name, second.name, block or 1, *words, given, *places)
    return _quantized(x, first, parts[:3]), _quantized(x, second, parts[3:])


def _rounding(rng: Tensor | None, stream: int | None) -> Rounding | str:
    return "nearest" if stream is None else Rounding(rng, stream=stream)


def _quantized(x: Tensor, scheme: Scheme, parts: tuple[Tensor, ...]) -> Quantized:
    codes, scale, above = parts
    return Quantized(codes, scale, None, above if scheme.global_scale else None, scheme, x.shape, x.dtype)
