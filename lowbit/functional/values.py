"""``round_to``: values of a tensor rounded to a format, to simulate TF32, bf16 and fp16. docs/numerics.md section 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit import formats
from lowbit.formats import Format
from lowbit.functional.arguments import refuse_tangents
from lowbit.functional.codec import decode, encode

__all__ = ["round_to"]

_MAGNITUDE, _INF = 0x7FFFFFFF, 0x7F800000
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


def round_to(x: Tensor, format: str | Format, saturate: bool = False) -> Tensor:
    """Rounds the values of ``x`` to ``format`` (nearest, ties to even), without scales.

    Simulates a dtype that the machine lacks: ``round_to(a, "tf32") @ round_to(b, "tf32").T`` is a TF32 matmul with
    fp32 accumulation. -0 keeps its sign, and so does NaN in formats with NaN. For formats of at most 8 bits the
    result is bit-identical to ``decode(encode(x, format, saturate=saturate), format)``.

    The gradient is straight-through: it passes unchanged where ``|x|`` is at most the format's maximum, and is 0
    elsewhere.

    Args:
        x: float32, bfloat16 or float16 tensor of any shape.
        format: A format or its name, such as ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"fp8_e4m3"``.
        saturate: False, as casts of torch, returns Inf or NaN for values that are too large, if the format has these.
            True clips them to the format's maximum.

    Returns:
        The rounded values in the shape and dtype of ``x``. A format with more mantissa bits than this dtype changes
        no value in range.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: The format is unknown, or holds only scales (e8m0).

    Source: docs/numerics.md section 2.
    """
    format = formats.find(format)
    if not isinstance(x, Tensor) or x.dtype not in _INPUTS:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"round_to: expected a float32, bfloat16 or float16 tensor, got {kind}; convert it first")
    refuse_tangents("round_to", x)
    rounded: Tensor = _RoundTo.apply(x, format, saturate)  # type: ignore[no-untyped-call]
    return rounded


class _RoundTo(torch.autograd.Function):
    """The rounding of ``round_to`` with its straight-through gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, format: Format, saturate: bool) -> Tensor:
        return _rounded(x, format, saturate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, format, _ = inputs
        ctx.save_for_backward(x)
        ctx.largest = format.max

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # A selection, not a product, so an Inf in the gradient does not become NaN.
        return torch.where(x.float().abs() <= ctx.largest, grad, 0.0), None, None


def _rounded(x: Tensor, format: Format, saturate: bool) -> Tensor:
    if format.bits <= 8:
        return decode(encode(x, format, saturate=saturate), format, x.dtype)
    y = x.float()
    magnitude = y.view(torch.int32) & _MAGNITUDE
    rounded = (_on_fp32_grid if format.exponent == 8 else _on_fp16_grid)(y, magnitude, format)
    if saturate:
        rounded = rounded.clamp(max=formats.fp32_bits(format.max))
    # One NaN for all payloads; integer arithmetic, so that modes that flush subnormals change nothing.
    rounded = torch.where(magnitude > _INF, 0x7FC00000, rounded)
    return _signed(x, rounded)


def _on_fp32_grid(y: Tensor, magnitude: Tensor, format: Format) -> Tensor:
    """fp32 bits of magnitudes rounded to a format with the exponents of fp32. Overflow carries into Inf."""
    drop = 23 - format.mantissa
    if drop == 0:
        return magnitude
    half, last = (1 << (drop - 1)) - 1, (magnitude >> drop) & 1
    return (magnitude + (half + last)) & -(1 << drop)


def _on_fp16_grid(y: Tensor, magnitude: Tensor, format: Format) -> Tensor:
    """fp32 bits of magnitudes rounded to fp16."""
    return y.to(torch.float16).float().view(torch.int32) & _MAGNITUDE


def _signed(x: Tensor, magnitude: Tensor) -> Tensor:
    """Numbers in the dtype of ``x`` from fp32 bits without signs, with the signs of ``x``."""
    values = magnitude.view(torch.float32).to(x.dtype)
    bits, sign = (torch.int32, -(1 << 31)) if x.dtype == torch.float32 else (torch.int16, -(1 << 15))
    return ((values.view(bits) & ~sign) | (x.view(bits) & sign)).view(x.dtype)
