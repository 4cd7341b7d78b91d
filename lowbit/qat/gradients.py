"""The forward of a quantized layer from a float weight, with gradients for weight, input and scales.

Forward is bit-identical to the deployed layer: the weight is quantized and the op ``linear`` multiplies its codes.
Backward uses the decoded operands and passes each gradient straight through the rounding of values in range. Which
values are in range is recomputed, not stored. Source: docs/numerics.md sections 10 and 12.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowbit.autograd import backend_now, bias_gradient, on_backend
from lowbit.functional import quantize
from lowbit.op_calls import call
from lowbit.ops.conv import Window, spans_tensor
from lowbit.qat.learned import Learned, gradient_scale
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["Operand", "fake_quant_conv", "fake_quant_linear", "multiply", "quantized"]


class Operand(NamedTuple):
    """Quantization of one operand: its scheme, and learned scales or None if they are computed from the tensor."""

    scheme: Scheme
    learned: Learned | None = None

    @property
    def scales(self) -> Scales | None:
        """The learned scales as stored, or None."""
        return None if self.learned is None else self.learned.scales(self.scheme)


def quantized(weight: Tensor, operand: Operand) -> Quantized:
    """The weight as the deployed layer has it."""
    return quantize(weight.detach(), operand.scheme, *(operand.scales or ()))


def multiply(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None,
    input: Operand | None,
    dtype: torch.dtype,
    window: Window | None = None,
) -> Tensor:
    """The result of the deployed layer; of a convolution if ``window`` is given."""
    y: Tensor = call(
        "linear" if window is None else "conv",
        x, weight.codes, weight.scheme.name, weight.scale, weight.zero_point, weight.global_scale, bias,
        *(window or ()), None if input is None else input.scheme.name, dtype,
        *((input.scales if input else None) or ()),
    )  # fmt: skip
    return y


def fake_quant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, of_weight: Operand, of_input: Operand | None, dtype: torch.dtype
) -> Tensor:
    """``multiply`` with the quantized ``weight``, with gradients."""
    numbers = (*_numbers(of_weight), *_numbers(of_input))
    y: Tensor = _FakeQuantLinear.apply(x, weight, bias, *numbers, of_weight, of_input, dtype)  # type: ignore[no-untyped-call]
    return y


def _numbers(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    """The learned scale and zero point, which autograd needs as separate arguments."""
    return (None, None) if operand is None or operand.learned is None else operand.learned[:2]


def fake_quant_conv(
    window: Window, x: Tensor, weight: Tensor, bias: Tensor | None, of_weight: Operand, of_input: Operand | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``fake_quant_linear`` for a convolution of ``x [N, *S, C]``.

    If input scales are per patch, the input is unfolded to patches. Otherwise torch's gradients of a convolution are
    applied to the decoded operands.
    """
    if of_input is not None and not spans_tensor(of_input.scheme):
        patches = window.unfold(x).squeeze(-2)  # qat.prepare_ raises for grouped convolutions with such scales
        return fake_quant_linear(patches, weight, bias, of_weight, of_input, dtype)
    codes = quantized(weight, of_weight)
    y = multiply(x.detach(), codes, None if bias is None else bias.detach(), of_input, dtype, window)
    decoded = x if of_input is None else _Decoded.apply(x, *_numbers(of_input), of_input, 1)  # type: ignore[no-untyped-call]
    matrix = _Decoded.apply(weight, *_numbers(of_weight), of_weight, weight.shape[0])  # type: ignore[no-untyped-call]
    result: Tensor = _Convolution.apply(decoded.to(dtype), matrix.to(dtype), bias, y, window)  # type: ignore[no-untyped-call]
    return result


class _Decoded(torch.autograd.Function):
    """The decoded values of ``x``; ``rows`` rows of its last axis share a scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, zero: Tensor | None, operand: Operand, rows: int
    ) -> Tensor:  # fmt: skip
        ctx.backend, ctx.operand, ctx.rows = backend_now(), operand, rows
        ctx.save_for_backward(x, scale, zero)
        return _decoded(x.reshape(-1, x.shape[-1]), operand).view(x.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cols = ctx.saved_tensors[0], grad.shape[-1]
        with on_backend(ctx.backend):
            gradients = _through(grad.reshape(-1, cols), x.reshape(-1, cols), ctx.operand, ctx.rows)
        assert gradients.x is not None
        return gradients.x.to(x.dtype).view(x.shape), gradients.scale, gradients.zero_point, None, None


class _Convolution(torch.autograd.Function):
    """Returns ``y``, which the deployed layer computed, with the gradients of a convolution of the decoded operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, y: Tensor, window: Window
    ) -> Tensor:  # fmt: skip
        ctx.window, ctx.bias_dtype = window, None if bias is None else bias.dtype
        ctx.save_for_backward(x, matrix)
        return y.view_as(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        of_x, of_matrix = ctx.window.gradients(grad, x, matrix, tuple(ctx.needs_input_grad[:2]))
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = bias_gradient(grad, ctx.bias_dtype)
        return of_x, of_matrix, of_bias, None, None


class _FakeQuantLinear(torch.autograd.Function):
    """``fake_quant_linear``; learned scales are also separate arguments, as autograd needs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_scale: Tensor | None,
        weight_zero: Tensor | None, input_scale: Tensor | None, input_zero: Tensor | None,
        of_weight: Operand, of_input: Operand | None, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        codes = quantized(weight, of_weight)
        y = multiply(x, codes, bias, of_input, dtype)
        ctx.backend, ctx.of_weight, ctx.of_input = backend_now(), of_weight, of_input
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.weight = codes if ctx.needs_input_grad[0] or input_scale is not None else None
        ctx.save_for_backward(x, weight, weight_scale, weight_zero, input_scale, input_zero)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *_ = ctx.saved_tensors
        g, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x, of_weight, of_bias = _NONE, _NONE, None
        with on_backend(ctx.backend):
            if ctx.weight is not None:
                grad_rows = g @ ctx.weight.dequantize(g.dtype)
                # Input scales apply to each row, so N counts the elements of one row that share the scale.
                of_x = (
                    _Gradients(grad_rows) if ctx.of_input is None else _through(grad_rows, rows, ctx.of_input, rows=1)
                )
            if ctx.needs_input_grad[1] or ctx.of_weight.learned is not None:
                decoded = rows if ctx.of_input is None else _decoded(rows, ctx.of_input)
                of_weight = _through(g.t() @ decoded.to(g.dtype), weight, ctx.of_weight, rows=weight.shape[0])
            if ctx.needs_input_grad[2]:
                of_bias = bias_gradient(g, ctx.bias_dtype)
        return (
            None if of_x.x is None else of_x.x.to(x.dtype).reshape(x.shape),
            None if of_weight.x is None else of_weight.x.to(weight.dtype),
            of_bias, *of_weight[1:], *of_x[1:], None, None, None,
        )  # fmt: skip


class _Gradients(NamedTuple):
    """Gradients of an operand, and of the learned numbers for its scales and zero points."""

    x: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None


_NONE = _Gradients()


def _scales(x: Tensor, operand: Operand) -> tuple[Tensor | None, ...]:
    """Scale, zero point and global scale as arguments of ops."""
    if operand.scales is not None:
        return tuple(operand.scales)
    return None, None, call("global_scale", x, operand.scheme.name) if operand.scheme.global_scale else None


def _decoded(x: Tensor, operand: Operand) -> Tensor:
    """The decoded values of ``x``."""
    y: Tensor = call("fake_quantize", x, operand.scheme.name, *_scales(x, operand))
    return y


def _through(grad: Tensor, x: Tensor, operand: Operand, rows: int) -> _Gradients:
    """Pass the gradient of the decoded values of ``x`` through their rounding; ``rows`` of its rows share a scale."""
    scheme, learned = operand.scheme, operand.learned
    of_x, of_scale = call("fake_quantize_backward", grad, x, scheme.name, *_scales(x, operand))
    if learned is None:
        return _Gradients(of_x)
    return _Gradients(of_x, *learned.gradients(scheme, of_scale, gradient_scale(scheme, rows, x.shape[1])))
