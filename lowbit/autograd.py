"""Gradients of the ops that have one: straight-through for fake_quantize, through the decoded operand for scaled_mm.

A backward pass runs on the backend that served its forward, also where ``use_backend`` has ended meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.backends.registry import forced, use_backend
from lowbit.ops import OPS


def _fake_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = OPS["fake_quantize"].args(*inputs)
    ctx.backend, ctx.scheme = forced(), call.scheme
    ctx.save_for_backward(call.x, call.scale, call.zero_point, call.outer_scale)


def _fake_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point, outer = ctx.saved_tensors
    with use_backend(ctx.backend):
        grad_x, grad_scale = torch.ops.lowbit.fake_quantize_backward(grad, x, ctx.scheme, scale, zero_point, outer)
    learned = scale is not None and scale.is_floating_point() and ctx.needs_input_grad[2]
    return grad_x, None, grad_scale.to(scale.dtype) if learned else None, *[None] * 8


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = OPS["scaled_mm"].args(*inputs)
    ctx.backend, ctx.cols = forced(), call.cols
    ctx.schemes = (call.a_scheme, call.b_scheme)
    ctx.bias_dtype = None if call.bias is None else call.bias.dtype
    ctx.save_for_backward(
        call.a, call.b, call.a_scale, call.a_zero_point, call.a_outer_scale,
        call.b_scale, call.b_zero_point, call.b_outer_scale,
    )  # fmt: skip


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, *scales = ctx.saved_tensors
    grad_a = grad_b = grad_bias = None
    with use_backend(ctx.backend):
        if ctx.needs_input_grad[0]:
            grad_a = (grad @ _decoded(b, ctx.schemes[1], ctx.cols, scales[3:], grad.dtype)).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = (grad.T @ _decoded(a, ctx.schemes[0], ctx.cols, scales[:3], grad.dtype)).to(b.dtype)
        if ctx.needs_input_grad[11]:
            grad_bias = grad.sum(0).to(ctx.bias_dtype)
    return grad_a, grad_b, *[None] * 9, grad_bias, None


def _decoded(data: Tensor, scheme: str | None, cols: int, scales: list[Any], dtype: torch.dtype) -> Tensor:
    if scheme is None:
        return data.to(dtype)
    y: Tensor = torch.ops.lowbit.dequantize(data, scheme, cols, *scales, dtype)
    return y


def _register() -> None:
    torch.library.register_autograd("lowbit::fake_quantize", _fake_backward, setup_context=_fake_setup)
    torch.library.register_autograd("lowbit::scaled_mm", _mm_backward, setup_context=_mm_setup)


_register()
