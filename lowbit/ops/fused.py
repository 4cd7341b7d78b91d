"""rms_norm, swiglu, rotary: what a decoder block computes between its matmuls, in one pass each, with gradients.

Source: docs/numerics.md section 15; Zhang, Sennrich, arXiv 1910.07467; Shazeer, arXiv 2002.05202; Su et al., arXiv
2104.09864.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.ops.spec import Cost, OpSpec, Out, require, require_float

#: Activations of ``swiglu``.
ACTIVATIONS = ("silu", "gelu_tanh")
#: Rows whose terms of a gradient of a weight are added one after the other.
ROWS = 64


# -- rms_norm ----------------------------------------------------------------------------------------------------------
class RMSNorm(NamedTuple):
    """``x``: float ``[..., n]``; ``weight``: float ``[n]``; factors are ``weight + offset``, ``offset`` 0 or 1.

    The results are ``out`` like ``x``, and ``rstd`` fp32 ``[...]``, the reciprocals of the root mean squares.
    """

    x: Tensor
    weight: Tensor
    eps: float
    offset: int = 0


class RMSNormBackward(NamedTuple):
    """Gradients of ``x`` and ``weight``, in their dtypes; ``grad``: float, with the shape of ``x``.

    ``weight_grad``: whether the gradient of the weight is computed; without it, that result is empty.
    """

    grad: Tensor
    x: Tensor
    weight: Tensor
    rstd: Tensor
    offset: int = 0
    weight_grad: bool = True


def _check_norm(call: RMSNorm) -> None:
    _require_norm("rms_norm", call)
    require(call.eps >= 0, f"lowbit.rms_norm: eps must be 0 or more, got {call.eps}")


def _check_norm_backward(call: RMSNormBackward) -> None:
    op = "rms_norm_backward"
    _require_norm(op, call)
    _require_like(op, "grad", call.grad, "x", call.x)
    rows = tuple(call.x.shape[:-1])
    require(
        call.rstd.dtype == torch.float32 and tuple(call.rstd.shape) == rows,
        f"lowbit.{op}: rstd must be float32 {list(rows)}, got {call.rstd.dtype} {list(call.rstd.shape)}",
    )


def _require_norm(op: str, call: RMSNorm | RMSNormBackward) -> None:
    require_float(op, "x", call.x)
    require_float(op, "weight", call.weight)
    require(call.x.dim() >= 1, f"lowbit.{op}: x needs at least one axis, got a scalar; give x.reshape(1)")
    require(
        tuple(call.weight.shape) == tuple(call.x.shape[-1:]),
        f"lowbit.{op}: weight must be {list(call.x.shape[-1:])}, one factor per column of x, "
        f"got {list(call.weight.shape)}",
    )
    require(call.offset in (0, 1), f"lowbit.{op}: offset must be 0, or 1 for factors 1 + weight, got {call.offset}")


def _require_like(op: str, name: str, x: Tensor, other: str, like: Tensor) -> None:
    require_float(op, name, x)
    require(
        tuple(x.shape) == tuple(like.shape),
        f"lowbit.{op}: {name} must have the shape of {other}, {list(like.shape)}, got {list(x.shape)}",
    )


def _norm_backward_outputs(call: RMSNormBackward) -> list[Out]:
    weight = tuple(call.weight.shape) if call.weight_grad else (0,)
    return [(tuple(call.x.shape), call.x.dtype), (weight, call.weight.dtype)]


# -- swiglu ------------------------------------------------------------------------------------------------------------
class Swiglu(NamedTuple):
    """``activation(gate) * up``: floats of one shape and dtype. ``activation``: a name of ``ACTIVATIONS``."""

    gate: Tensor
    up: Tensor
    activation: str = "silu"


class SwigluBackward(NamedTuple):
    """Gradients of ``gate`` and ``up`` from them and ``grad``, a float of their shape."""

    grad: Tensor
    gate: Tensor
    up: Tensor
    activation: str = "silu"


def _check_swiglu(call: Swiglu) -> None:
    _require_gates("swiglu", call)


def _check_swiglu_backward(call: SwigluBackward) -> None:
    _require_gates("swiglu_backward", call)
    _require_like("swiglu_backward", "grad", call.grad, "gate", call.gate)


def _require_gates(op: str, call: Swiglu | SwigluBackward) -> None:
    require_float(op, "gate", call.gate)
    _require_like(op, "up", call.up, "gate", call.gate)
    require(
        call.up.dtype == call.gate.dtype,
        f"lowbit.{op}: gate and up must have one dtype, got {call.gate.dtype} and {call.up.dtype}; convert one of them",
    )
    names = " or ".join(map(repr, ACTIVATIONS))
    require(call.activation in ACTIVATIONS, f"lowbit.{op}: activation must be {names}, got {call.activation!r}")


# -- rotary ------------------------------------------------------------------------------------------------------------
class Rotary(NamedTuple):
    """Rotates pairs of elements of each row of ``x``, float ``[..., n]`` with 2 to 4 axes.

    ``cos`` and ``sin``: float ``[..., p]`` with ``p <= n / 2``; their other axes broadcast to those of ``x``. Pair
    ``i`` is the elements ``i`` and ``i + p``; ``interleaved``: ``2 i`` and ``2 i + 1``. Elements from ``2 p`` on stay.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def _check_rotary(call: Rotary) -> None:
    require_float("rotary", "x", call.x)
    require_float("rotary", "cos", call.cos)
    shape = list(call.x.shape)
    require(2 <= call.x.dim() <= 4, f"lowbit.rotary: x must have 2 to 4 axes, [..., tokens, n], got {shape}")
    _require_like("rotary", "sin", call.sin, "cos", call.cos)
    require(call.sin.dtype == call.cos.dtype, "lowbit.rotary: cos and sin must have one dtype; convert one of them")
    pairs = call.cos.shape[-1] if call.cos.dim() else 0
    require(
        0 < 2 * pairs <= shape[-1],
        f"lowbit.rotary: cos must have a number for each pair, 1 to {shape[-1] // 2} of them, "
        f"got {list(call.cos.shape)}; of a table with a number for each element, give the half of the first elements",
    )
    table = list(call.cos.shape[:-1])
    ends = zip(reversed(table), reversed(shape[:-1]), strict=False)
    require(
        len(table) < len(shape) and all(size in (1, wanted) for size, wanted in ends),
        f"lowbit.rotary: the axes of cos before its last, {table}, must broadcast to those of x, {shape[:-1]}",
    )


def leading_strides(table: Tensor) -> list[int]:
    """The strides of three axes before the last of ``x``, ``cos`` or ``sin``: 0 of axes along which it is broadcast."""
    strides = [0 if size == 1 else stride for size, stride in zip(table.shape, table.stride(), strict=True)][:-1]
    return [0] * (3 - len(strides)) + strides


# -- the table ---------------------------------------------------------------------------------------------------------
def _bytes(*tensors: Any) -> Cost:
    return Cost(0, sum(t.nbytes for t in tensors))


SPECS = (
    OpSpec(
        "rms_norm", RMSNorm, ("out", "rstd"),
        lambda call: [(tuple(call.x.shape), call.x.dtype), (tuple(call.x.shape[:-1]), torch.float32)],
        _check_norm, lambda call: _bytes(call.x, call.x),
    ),
    OpSpec(
        "rms_norm_backward", RMSNormBackward, ("grad_x", "grad_weight"), _norm_backward_outputs,
        _check_norm_backward, lambda call: _bytes(call.grad, call.x, call.x),
    ),
    OpSpec(
        "swiglu", Swiglu, ("out",), lambda call: [(tuple(call.gate.shape), call.gate.dtype)],
        _check_swiglu, lambda call: _bytes(call.gate, call.up, call.gate),
    ),
    OpSpec(
        "swiglu_backward", SwigluBackward, ("grad_gate", "grad_up"),
        lambda call: [(tuple(t.shape), t.dtype) for t in (call.gate, call.up)],
        _check_swiglu_backward, lambda call: _bytes(call.grad, call.gate, call.up, call.gate, call.up),
    ),
    OpSpec(
        "rotary", Rotary, ("out",), lambda call: [(tuple(call.x.shape), call.x.dtype)],
        _check_rotary, lambda call: _bytes(call.x, call.x),
    ),
)  # fmt: skip
