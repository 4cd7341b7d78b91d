"""The forward pass of a quantized layer from a float weight, with gradients for the weight, the input and their scales.

Forward is the deployed layer's: the weight is quantized and the op ``linear`` multiplies its codes. Backward takes the
products with the decoded operands, and passes each gradient straight through its operand's rounding, where the operand
was in range. What was in range is computed again, and not stored.

Source: docs/numerics.md sections 10 and 12.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowbit.autograd import backend_now, on_backend
from lowbit.calls import call
from lowbit.functional import quantize
from lowbit.qat.learned import Learned, gradient_scale
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["Operand", "fake_quant_linear", "multiply", "quantized"]


class Operand(NamedTuple):
    """How one operand is quantized: ``learned`` numbers stand for its scales; None: they are made of the tensor."""

    scheme: Scheme
    learned: Learned | None = None

    @property
    def scales(self) -> Scales | None:
        """The scales that it is quantized by."""
        return None if self.learned is None else self.learned.scales(self.scheme)


def quantized(weight: Tensor, operand: Operand) -> Quantized:
    """The codes of a weight, as the deployed layer has them."""
    return quantize(weight.detach(), operand.scheme, *(operand.scales or ()))


def multiply(x: Tensor, weight: Quantized, bias: Tensor | None, input: Operand | None, dtype: torch.dtype) -> Tensor:
    """The deployed layer's result."""
    y: Tensor = call(
        "linear", x, weight.codes, weight.scheme.name, weight.scale, weight.zero_point, weight.global_scale, bias,
        None if input is None else input.scheme.name, dtype, *((input.scales if input else None) or ()),
    )  # fmt: skip
    return y


def fake_quant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, of_weight: Operand, of_input: Operand | None, dtype: torch.dtype
) -> Tensor:
    """``multiply`` of the quantized ``weight``, with gradients."""
    numbers = [
        number
        for operand in (of_weight, of_input)
        for number in ((None, None) if operand is None or operand.learned is None else operand.learned[:2])
    ]
    y: Tensor = _FakeQuantLinear.apply(x, weight, bias, *numbers, of_weight, of_input, dtype)  # type: ignore[no-untyped-call]
    return y


class _FakeQuantLinear(torch.autograd.Function):
    """``fake_quant_linear``; its tensors are also arguments of their own, which autograd needs."""

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
                before = g @ ctx.weight.dequantize(g.dtype)
                # The scale of inputs is that of each position: N is what a row of the input has of its elements.
                of_x = _Gradients(before) if ctx.of_input is None else _through(before, rows, ctx.of_input, rows=1)
            if ctx.needs_input_grad[1] or ctx.of_weight.learned is not None:
                decoded = rows if ctx.of_input is None else _decoded(rows, ctx.of_input)
                of_weight = _through(g.t() @ decoded.to(g.dtype), weight, ctx.of_weight, rows=weight.shape[0])
            if ctx.needs_input_grad[2]:
                of_bias = g.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (
            None if of_x.x is None else of_x.x.to(x.dtype).reshape(x.shape),
            None if of_weight.x is None else of_weight.x.to(weight.dtype),
            of_bias, *of_weight[1:], *of_x[1:], None, None, None,
        )  # fmt: skip


class _Gradients(NamedTuple):
    """Of an operand, and of the learned numbers that stand for its scales and zero points."""

    x: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None


_NONE = _Gradients()


def _given(x: Tensor, operand: Operand) -> tuple[Tensor | None, ...]:
    """Scale, zero point and global scale as ops take them."""
    if operand.scales is not None:
        return tuple(operand.scales)
    return None, None, call("global_scale", x, operand.scheme.name) if operand.scheme.outer else None


def _decoded(x: Tensor, operand: Operand) -> Tensor:
    """The numbers that the codes of ``x`` stand for."""
    y: Tensor = call("fake_quantize", x, operand.scheme.name, *_given(x, operand))
    return y


def _through(grad: Tensor, x: Tensor, operand: Operand, rows: int) -> _Gradients:
    """``grad``, of the decoded numbers of ``x``, through their rounding; a scale is shared by ``rows`` of its rows."""
    scheme, learned = operand.scheme, operand.learned
    of_x, of_scale = call("fake_quantize_backward", grad, x, scheme.name, *_given(x, operand))
    if learned is None:
        return _Gradients(of_x)
    return _Gradients(of_x, *learned.gradients(scheme, of_scale, gradient_scale(scheme, rows, x.shape[1])))
