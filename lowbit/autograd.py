"""Gradients of ops: straight-through for fake_quantize, with dequantized operands for matmuls and convolutions, of
rms_norm, swiglu and rotary by their own ops.

All gradients can be differentiated again; arguments without a gradient raise RuntimeError if they require one.

A backward pass runs on the backend of its forward, even after the end of ``use_backend``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowbit.backends.registry import forced, use_backend
from lowbit.ops import OPS
from lowbit.ops.conv import Conv, window
from lowbit.ops.linear import weight_scales
from lowbit.reference.fused import GELU
from lowbit.torch_private import (
    below_autograd,
    functorch_level,
    graph_task,
    single_level_function,
    single_level_functions,
)

__all__ = ["backend_now", "bias_gradient", "first_order", "in_backward", "on_backend", "transformed", "uncompiled"]


#: Decorator for functions that torch.compile must not trace.
uncompiled: Callable[..., Any] = torch.compiler.disable


def in_backward() -> bool:
    """Whether a backward pass is running; a layer that is called then is recomputed by a checkpoint."""
    return bool(graph_task() != -1)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias gradient ``[N]`` in ``dtype``: the output gradient ``[..., N]`` summed in fp32."""
    rows = grad.flatten(0, -2)
    if rows.dtype == torch.float32 or rows.device.type != "cpu":
        return rows.sum(0, dtype=torch.float32).to(dtype)
    # On a CPU torch's sum allocates an fp32 copy of its input, so sum some columns at a time.
    return torch.cat([cols.sum(0, dtype=torch.float32) for cols in rows.split(1024, 1)]).to(dtype)


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap) is running, outside of compiled code."""
    return not torch.compiler.is_compiling() and functorch_level() is not None


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a backward without a derivative: it raises RuntimeError under ``create_graph=True``.

    torch's ``once_differentiable`` only raises if the incoming gradient requires grad. If that is a constant, it
    silently drops second derivatives with respect to weights.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed():
            raise RuntimeError(
                "create_graph=True: this gradient of lowbit.train has no derivative; compute second derivatives on a "
                "plain model (lowbit.train.convert_, uncompress_activations_)"
            )
        return once(ctx, *grads)

    return refusing


def backend_now() -> str | None:
    """The backend that ``use_backend`` sets, to be saved for backward; None in compiled code."""
    return None if torch.compiler.is_compiling() else forced()


def on_backend(name: str | None) -> AbstractContextManager[None]:
    """A context in which ops use the backend that ``backend_now`` returned in forward."""
    return nullcontext() if torch.compiler.is_compiling() or name == forced() else use_backend(name)


def _wanted(x: Tensor | None) -> bool:
    """Whether ``x`` requires grad; ``ctx.needs_input_grad`` is too short if trailing arguments are omitted."""
    return x is not None and x.requires_grad


def _refuse(op: str, **constants: Tensor | None) -> None:
    """Raises for a scale or zero point that requires grad and would silently get none."""
    for name, value in constants.items():
        if _wanted(value):
            raise RuntimeError(
                f"lowbit.{op}: {name} requires grad, and there is no gradient with respect to it; pass {name}.detach()"
            )


def _grads(op: str, **grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients by argument name, in the order of the op's arguments; None for other arguments."""
    fields = OPS[op].args._fields
    if not grads.keys() <= set(fields):
        raise TypeError(f"lowbit.{op} has no argument {', '.join(grads.keys() - set(fields))}")
    return tuple([grads.get(name) for name in fields])


def _fake_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = OPS["fake_quantize"].args(*inputs)
    _refuse("fake_quantize", global_scale=call.global_scale)
    ctx.backend, ctx.scheme = forced(), call.scheme
    ctx.learned = _wanted(call.scale)
    ctx.save_for_backward(call.x, call.scale, call.zero_point, call.global_scale)


def _fake_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale, zero_point, global_scale = ctx.saved_tensors
    with on_backend(ctx.backend):
        grad_x, grad_scale = torch.ops.lowbit.fake_quantize_backward(
            grad, x, ctx.scheme, scale, zero_point, global_scale
        )
    grad_scale = grad_scale if zero_point is None else grad_scale[0]
    return _grads("fake_quantize", x=grad_x, scale=grad_scale.to(scale.dtype) if ctx.learned else None)


def _mask_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = OPS["fake_quantize_backward"].args(*inputs)
    _refuse("fake_quantize_backward", global_scale=call.global_scale)
    ctx.set_materialize_grads(False)
    ctx.backend, ctx.scheme = forced(), call.scheme
    ctx.wanted = (_wanted(call.grad), _wanted(call.x), _wanted(call.scale))
    ctx.save_for_backward(call.x, call.scale, call.zero_point, call.global_scale)


def _mask_backward(ctx: Any, grad: Tensor | None, grad_of_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """Applies the mask of forward; almost everywhere the mask is constant in x and scale."""
    x, scale, zero_point, global_scale = ctx.saved_tensors
    if grad_of_scale is not None and scale is not None:
        raise RuntimeError(
            "lowbit.fake_quantize: the gradient of its scale has no derivative; compute second derivatives only "
            "through x, or pass scale.detach()"
        )
    wants_grad, wants_x, wants_scale = ctx.wanted
    masked = None
    if wants_grad and grad is not None:
        with on_backend(ctx.backend):
            masked = torch.ops.lowbit.fake_quantize_backward(grad, x, ctx.scheme, scale, zero_point, global_scale)[0]
    zero_x, zero_scale = (torch.zeros_like(t) if wants else None for t, wants in ((x, wants_x), (scale, wants_scale)))
    return _grads("fake_quantize_backward", grad=masked, x=zero_x, scale=zero_scale)


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves each operand only for the gradient of the other: with a frozen weight no activation is saved."""
    call = OPS["scaled_mm"].args(*inputs)
    _refuse(
        "scaled_mm", a_scale=call.a_scale, a_global_scale=call.a_global_scale,
        b_scale=call.b_scale, b_global_scale=call.b_global_scale,
    )  # fmt: skip
    ctx.backend, ctx.cols = forced(), call.cols
    ctx.schemes = (call.a_scheme, call.b_scheme)
    ctx.dtypes = (call.a.dtype, call.b.dtype)
    ctx.bias_dtype = call.bias.dtype if _wanted(call.bias) else None
    a = (call.a, call.a_scale, call.a_zero_point, call.a_global_scale)
    b = (call.b, call.b_scale, call.b_zero_point, call.b_global_scale)
    ctx.save_for_backward(*(a if _wanted(call.b) else [None] * 4), *(b if _wanted(call.a) else [None] * 4))


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    grad_a = grad_b = grad_bias = None
    with on_backend(ctx.backend):
        if b[0] is not None:
            grad_a = (grad @ _decoded(b, ctx.schemes[1], ctx.cols, grad.dtype)).to(ctx.dtypes[0])
        if a[0] is not None:
            grad_b = (grad.T @ _decoded(a, ctx.schemes[0], ctx.cols, grad.dtype)).to(ctx.dtypes[1])
        if ctx.bias_dtype is not None:
            grad_bias = bias_gradient(grad, ctx.bias_dtype)
    return _grads("scaled_mm", a=grad_a, b=grad_b, bias=grad_bias)


def _weight_setup(name: str, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves only the weight: the gradient of ``x`` passes straight through its rounding."""
    call = OPS[name].args(*inputs)
    _refuse(name, scale=call.scale, global_scale=call.global_scale, input_scale=call.input_scale)
    if call.out_scheme is not None:
        raise RuntimeError(
            f"lowbit.{name}: x or bias requires grad, and a quantized result has no gradient; drop out_scheme, or run "
            "under torch.no_grad()"
        )
    ctx.backend, ctx.scheme, ctx.x_shape, ctx.x_dtype = forced(), call.scheme, call.x.shape, call.x.dtype
    ctx.bias_dtype = call.bias.dtype if _wanted(call.bias) else None
    ctx.window = window(call) if isinstance(call, Conv) else None
    weight = (call.weight, *weight_scales(call))
    ctx.save_for_backward(*(weight if _wanted(call.x) else [None] * 4))


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, *scales = ctx.saved_tensors
    rows, grad_x, grad_bias = grad.reshape(-1, grad.shape[-1]), None, None
    if weight is not None:
        with on_backend(ctx.backend):
            decoded = _decoded((weight, *scales), ctx.scheme, ctx.x_shape[-1], grad.dtype)
        grad_x = (rows @ decoded).to(ctx.x_dtype).reshape(ctx.x_shape)
    if ctx.bias_dtype is not None:
        grad_bias = bias_gradient(rows, ctx.bias_dtype)
    return _grads("linear", x=grad_x, bias=grad_bias)


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, *scales = ctx.saved_tensors
    grad_x = grad_bias = None
    if weight is not None:
        cols = ctx.x_shape[-1] // ctx.window.groups * prod(ctx.window.kernel_size)
        with on_backend(ctx.backend):
            decoded = _decoded((weight, *scales), ctx.scheme, cols, grad.dtype)
        x = grad.new_empty(1).expand(ctx.x_shape)  # only its shape is read
        grad_x = ctx.window.gradients(grad, x, decoded, (True, False))[0].to(ctx.x_dtype)
    if ctx.bias_dtype is not None:
        grad_bias = bias_gradient(grad, ctx.bias_dtype)
    return _grads("conv", x=grad_x, bias=grad_bias)


def _decoded(saved: Sequence[Tensor], scheme: str | None, cols: int, dtype: torch.dtype) -> Tensor:
    data, *scales = saved
    if scheme is None:
        return data.to(dtype)
    y: Tensor = torch.ops.lowbit.dequantize(data, scheme, cols, *scales, dtype)
    return y


# -- rms_norm, swiglu, rotary ------------------------------------------------------------------------------------------
def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = OPS["rms_norm"].args(*inputs)
    ctx.set_materialize_grads(False)
    ctx.backend, ctx.offset, ctx.wants_weight = forced(), call.offset, _wanted(call.weight)
    ctx.save_for_backward(call.x, call.weight, output[1])


def _norm_backward(ctx: Any, grad: Tensor | None, grad_rstd: Tensor | None) -> tuple[Tensor | None, ...]:
    """``rstd`` has a gradient for second derivatives, in which it is an argument of ``rms_norm_backward``."""
    x, weight, rstd = ctx.saved_tensors
    grad_x = grad_weight = None
    if grad is not None:
        with on_backend(ctx.backend):
            grad_x, grad_weight = torch.ops.lowbit.rms_norm_backward(
                grad, x, weight, rstd, ctx.offset, ctx.wants_weight
            )
    if grad_rstd is not None:
        more = ((-grad_rstd * rstd**3 / x.shape[-1])[..., None] * x.float()).to(x.dtype)
        grad_x = more if grad_x is None else grad_x + more
    return _grads("rms_norm", x=grad_x, weight=grad_weight if ctx.wants_weight else None)


def _gradients_of_norm(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: int) -> tuple[Tensor, ...]:
    """``rms_norm_backward`` in torch's ops."""
    normed, factors = x.float() * rstd[..., None], weight.float() + offset
    scaled = grad.float() * factors
    grad_x = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd[..., None]
    return grad_x.to(x.dtype), (grad.float() * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)


def _swiglu_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = OPS["swiglu"].args(*inputs)
    ctx.backend, ctx.activation = forced(), call.activation
    ctx.save_for_backward(call.gate, call.up)


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    with on_backend(ctx.backend):
        grad_gate, grad_up = torch.ops.lowbit.swiglu_backward(grad, gate, up, ctx.activation)
    return _grads("swiglu", gate=grad_gate, up=grad_up)


def _gradients_of_swiglu(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, ...]:
    """``swiglu_backward`` in torch's ops."""
    d, g = grad.float(), gate.float()
    a, b = (1.0, 0.0) if activation == "silu" else GELU[:2]
    s = torch.sigmoid(g * (a + b * g * g))
    slope = s + g * s * (1 - s) * (a + 3 * b * g * g)
    return (d * up.float() * slope).to(gate.dtype), (d * g * s).to(up.dtype)


def _second_setup(name: str, tensors: int, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves the leading arguments, which are tensors."""
    call = OPS[name].args(*inputs)
    ctx.option = call[tensors]  # the offset, or the activation
    ctx.count = 1 if name == "rms_norm_backward" and not call.weight_grad else 2
    ctx.save_for_backward(*call[:tensors])


def _second_backward(name: str, formula: Callable[..., tuple[Tensor, ...]], ctx: Any, *grads: Tensor) -> Any:
    """Second derivatives: of ``formula``, which is the op in torch's ops."""
    tensors = ctx.saved_tensors
    pull: Any = torch.func.vjp(lambda *given: formula(*given, ctx.option)[: ctx.count], *tensors)[1]
    names = OPS[name].args._fields[: len(tensors)]
    return _grads(name, **dict(zip(names, pull(grads[: ctx.count]), strict=True)))


def _rotary_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = OPS["rotary"].args(*inputs)
    _refuse("rotary", cos=call.cos, sin=call.sin)
    ctx.backend, ctx.interleaved = forced(), call.interleaved
    ctx.save_for_backward(call.cos, call.sin)


def _rotary_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    with on_backend(ctx.backend):
        return _grads("rotary", x=torch.ops.lowbit.rotary(grad, cos, -sin, ctx.interleaved))


# -- registration ------------------------------------------------------------------------------------------------------
def _differentiable(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Registers the gradient of an op as a kernel of the Autograd key, which supports transforms of torch.func.

    A call without a gradient skips autograd. ``torch.library.register_autograd`` would add more time to such a call
    than a small matmul takes.
    """
    overload, spec = getattr(torch.ops.lowbit, name).default, OPS[name]

    def forward(*args: Any) -> Any:
        with below_autograd():
            return overload(*args)

    methods = {"forward": forward, "setup_context": setup, "backward": backward}
    # A single level of autograd: the dispatcher calls this kernel once per level of torch.func.grad.
    function: Any = type(
        f"lowbit_{name}",
        (single_level_function(),),
        {key: staticmethod(method) for key, method in methods.items()},
    )

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled():
            for value in args:
                if isinstance(value, Tensor) and value.requires_grad:
                    with single_level_functions() if transformed() else nullcontext():
                        return function.apply(*spec.args(*args))
        return forward(*args)

    _library.impl(name, kernel, "Autograd")


_library = torch.library.Library("lowbit", "IMPL")
_differentiable("fake_quantize", _fake_setup, _fake_backward)
_differentiable("fake_quantize_backward", _mask_setup, _mask_backward)
_differentiable("scaled_mm", _mm_setup, _mm_backward)
_differentiable("linear", partial(_weight_setup, "linear"), _linear_backward)
_differentiable("conv", partial(_weight_setup, "conv"), _conv_backward)
_differentiable("rms_norm", _norm_setup, _norm_backward)
_differentiable("swiglu", _swiglu_setup, _swiglu_backward)
_differentiable("rotary", _rotary_setup, _rotary_backward)
for _name, _tensors, _formula in (
    ("rms_norm_backward", 4, _gradients_of_norm),
    ("swiglu_backward", 3, _gradients_of_swiglu),
):
    _differentiable(_name, partial(_second_setup, _name, _tensors), partial(_second_backward, _name, _formula))
