"""Gradients of the ops that have one: straight-through for fake_quantize, through decoded operands for the products.

All can be differentiated again; what has no gradient raises.

A backward pass runs on the backend that served its forward, also where ``use_backend`` has ended meanwhile.
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
from lowbit.ops.spec import stored_global, stored_scale
from lowbit.torch_private import below_autograd, functorch_level, graph_task, single_level_function

__all__ = ["backend_now", "bias_gradient", "first_order", "in_backward", "on_backend", "transformed", "uncompiled"]


#: Marks a function that torch.compile calls as it is.
uncompiled: Callable[..., Any] = torch.compiler.disable


def in_backward() -> bool:
    """Whether a backward pass runs this: a layer that is called there is recomputed by a checkpoint."""
    return bool(graph_task() != -1)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum in fp32 of the gradient [..., N] of an output over all but its last dimension, as ``dtype`` [N]."""
    rows = grad.flatten(0, -2)
    if rows.dtype == torch.float32 or rows.device.type != "cpu":
        return rows.sum(0, dtype=torch.float32).to(dtype)
    # On a CPU torch's sum makes an fp32 copy of all that it adds; columns do not depend on each other.
    return torch.cat([part.sum(0, dtype=torch.float32) for part in rows.split(1024, 1)]).to(dtype)


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap) runs this; dynamo traces those of compiled code."""
    return not torch.compiler.is_compiling() and functorch_level() is not None


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function's backward that has no derivative: ``create_graph=True`` is refused.

    torch's ``once_differentiable`` refuses it where the incoming gradient requires grad, and lets a gradient of a
    gradient with respect to weights be lost where it is a constant.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed():
            raise RuntimeError(
                "a backward pass with create_graph=True came to a function of lowbit.train whose gradient has no "
                "derivative; take gradients of gradients of a plain model (lowbit.train.convert_, "
                "uncompress_activations_)"
            )
        return once(ctx, *grads)

    return refusing


def backend_now() -> str | None:
    """The backend that a forward pass was forced to, for its backward (compiled code leaves it to each call)."""
    return None if torch.compiler.is_compiling() else forced()


def on_backend(name: str | None) -> AbstractContextManager[None]:
    """Within, lowbit ops run on what ``backend_now`` answered in forward."""
    return nullcontext() if torch.compiler.is_compiling() or name == forced() else use_backend(name)


def _wanted(x: Tensor | None) -> bool:
    """Whether a gradient of ``x`` is asked for; ``ctx.needs_input_grad`` is short where trailing arguments are."""
    return x is not None and x.requires_grad


def _refuse(op: str, **constants: Tensor | None) -> None:
    """Raises for a scale or zero point that requires grad and would silently get none."""
    for name, value in constants.items():
        if _wanted(value):
            raise RuntimeError(
                f"lowbit.{op}: {name} requires grad, and there is no gradient with respect to it; give {name}.detach()"
            )


def _grads(op: str, **grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of an op's arguments, given by their names, in the order of the op; all others are None."""
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
    of_scale = grad_scale if zero_point is None else grad_scale[0]
    return _grads("fake_quantize", x=grad_x, scale=of_scale.to(scale.dtype) if ctx.learned else None)


def _mask_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = OPS["fake_quantize_backward"].args(*inputs)
    _refuse("fake_quantize_backward", global_scale=call.global_scale)
    ctx.set_materialize_grads(False)
    ctx.backend, ctx.scheme = forced(), call.scheme
    ctx.wanted = (_wanted(call.grad), _wanted(call.x), _wanted(call.scale))
    ctx.save_for_backward(call.x, call.scale, call.zero_point, call.global_scale)


def _mask_backward(ctx: Any, grad: Tensor | None, grad_of_scale: Tensor | None) -> tuple[Tensor | None, ...]:
    """The mask that selected ``grad`` selects its gradient; nearly everywhere it does not change with x and scale."""
    x, scale, zero_point, global_scale = ctx.saved_tensors
    if grad_of_scale is not None and scale is not None:
        raise RuntimeError(
            "lowbit.fake_quantize: the gradient of its scale has no derivative; take second derivatives of x's alone, "
            "or give scale.detach()"
        )
    wants_grad, wants_x, wants_scale = ctx.wanted
    masked = None
    if wants_grad and grad is not None:
        with on_backend(ctx.backend):
            masked = torch.ops.lowbit.fake_quantize_backward(grad, x, ctx.scheme, scale, zero_point, global_scale)[0]
    zero_x, zero_scale = (torch.zeros_like(t) if wants else None for t, wants in ((x, wants_x), (scale, wants_scale)))
    return _grads("fake_quantize_backward", grad=masked, x=zero_x, scale=zero_scale)


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Each operand is saved only for the gradient of the other: a frozen weight leaves the activation free."""
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
    """Saves no activation: the gradient of ``x`` needs the weight alone, and passes straight through x's rounding."""
    call = OPS[name].args(*inputs)
    _refuse(name, scale=call.scale, global_scale=call.global_scale, input_scale=call.input_scale)
    if call.out_scheme is not None:
        raise RuntimeError(
            f"lowbit.{name}: x or bias requires grad, and a result in codes carries none; leave out_scheme out, or run "
            "under torch.no_grad()"
        )
    ctx.backend, ctx.scheme, ctx.x_shape, ctx.x_dtype = forced(), call.scheme, call.x.shape, call.x.dtype
    ctx.bias_dtype = call.bias.dtype if _wanted(call.bias) else None
    ctx.window = window(call) if isinstance(call, Conv) else None
    weight = (call.weight, stored_scale(call.scale, call.scheme), call.zero_point, stored_global(call.global_scale))
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
        x = grad.new_empty(1).expand(ctx.x_shape)  # its shape alone is read
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


# -- registration ------------------------------------------------------------------------------------------------------
def _differentiable(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Registers the gradient of an op as a kernel of the autograd key, with which transforms of torch.func compose.

    A call with nothing to differentiate goes on at once. ``torch.library.register_autograd`` takes longer for that than
    a small product does.
    """
    overload, spec = getattr(torch.ops.lowbit, name).default, OPS[name]

    def forward(*args: Any) -> Any:
        with below_autograd():
            return overload(*args)

    methods = {"forward": forward, "setup_context": setup, "backward": backward}
    # One level of autograd: the dispatcher calls this kernel once for each level of torch.func.grad.
    function: Any = type(
        f"lowbit_{name}",
        (single_level_function(),),
        {key: staticmethod(method) for key, method in methods.items()},
    )

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled():
            for value in args:
                if isinstance(value, Tensor) and value.requires_grad:
                    return function.apply(*spec.args(*args))
        return forward(*args)

    _library.impl(name, kernel, "Autograd")


_library = torch.library.Library("lowbit", "IMPL")
_differentiable("fake_quantize", _fake_setup, _fake_backward)
_differentiable("fake_quantize_backward", _mask_setup, _mask_backward)
_differentiable("scaled_mm", _mm_setup, _mm_backward)
_differentiable("linear", partial(_weight_setup, "linear"), _linear_backward)
_differentiable("conv", partial(_weight_setup, "conv"), _conv_backward)
