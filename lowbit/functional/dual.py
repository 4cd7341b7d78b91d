"""Dual quantization: ``quantize_both`` quantizes a matrix in two schemes, on a GPU in one kernel.

Source: docs/numerics.md sections 3, 5, 7 and 13.
"""

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
    """Quantizes ``x`` in ``first``, and in ``second`` after a ``signed_hadamard`` along its rows.

    The result has no gradient.

    Args:
        x: Float ``[rows, cols]``.
        first: Scheme without zero points.
        second: Scheme without zero points, usually one whose blocks run along the other axis.
        block: Block size of the transform, a power of two up to 128; None for no transform.
        rng: int64 ``[2]`` of seed and step for stochastic rounding.
        streams: Random streams of the two schemes; None rounds to nearest.
    """
    if not by_kernel(x):
        q = quantize(x, first, rounding=_rounding(rng, streams[0]))
        rotated = x if block is None else signed_hadamard(x, block, 0)
        return q, quantize(rotated, second, rounding=_rounding(rng, streams[1]))
    roundings = ["nearest" if stream is None else "stochastic" for stream in streams]
    seed_and_step = rng if "stochastic" in roundings else None
    numbers = [stream or 0 for stream in streams]
    parts = call("quantize_both", x.detach(), first.name, second.name, block or 1, *roundings, seed_and_step, *numbers)
    return _quantized(x, first, parts[:3]), _quantized(x, second, parts[3:])


def _rounding(rng: Tensor | None, stream: int | None) -> Rounding | str:
    return "nearest" if stream is None else Rounding(rng, stream=stream)


def _quantized(x: Tensor, scheme: Scheme, parts: tuple[Tensor, ...]) -> Quantized:
    codes, scale, global_scale = parts
    return Quantized(codes, scale, None, global_scale if scheme.global_scale else None, scheme, x.shape, x.dtype)
