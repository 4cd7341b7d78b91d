"""RMSNorm, gated activations and rotary embeddings, each in one pass with its gradient. docs/numerics.md section 15."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lowbit.functional.arguments import refuse_tangents
from lowbit.op_calls import call

__all__ = ["rms_norm", "rotary", "swiglu"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: int = 0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last axis.

    All steps are fp32, and only the result is rounded to the dtype of ``x``. Backward needs ``x`` and one fp32 number
    per row, which are all that is saved. Results and gradients are bit-identical on every backend.

    Args:
        x: float32, bfloat16 or float16 ``[..., n]``.
        weight: float ``[n]``, in any of these dtypes.
        eps: 0 or more; it is rounded to fp32.
        offset: 0, or 1 for models that store ``weight - 1``, such as Gemma.

    Returns:
        A tensor with the shape and dtype of ``x``.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: The shape of ``weight``, ``eps`` or ``offset`` does not fit.

    Source: Zhang, Sennrich, arXiv 1910.07467.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(rms_norm, (x, weight), x, weight, eps=eps, offset=offset)
    refuse_tangents("rms_norm", x, weight)
    return cast(Tensor, call("rms_norm", x, weight, eps, offset)[0])


def swiglu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up``, as in the MLP of Llama (``"silu"``) and of Gemma (``"gelu_tanh"``).

    All steps are fp32, and only the result is rounded. Backward computes the activation again, so only ``gate`` and
    ``up`` are saved. Results and gradients are bit-identical on every backend.

    Args:
        gate: float32, bfloat16 or float16 tensor of any shape.
        up: Tensor of the same shape and dtype.
        activation: ``"silu"``, or ``"gelu_tanh"``, the tanh form of gelu.

    Returns:
        A tensor with this shape and dtype.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: Shapes or dtypes differ, or the activation is another one.

    Source: Shazeer, arXiv 2002.05202.
    """
    if has_torch_function((gate, up)):
        return handle_torch_function(swiglu, (gate, up), gate, up, activation=activation)
    refuse_tangents("swiglu", gate, up)
    return cast(Tensor, call("swiglu", gate, up, activation))


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates pairs ``(a, b)`` of elements of each row to ``(a cos - b sin, b cos + a sin)``.

    Products and sums are fp32, and only the result is rounded. The gradient is the rotation back, for which only
    ``cos`` and ``sin`` are saved.

    Args:
        x: float32, bfloat16 or float16 ``[..., n]`` with 2 to 4 axes: queries or keys of heads with n columns.
        cos: float ``[..., p]`` with ``p <= n / 2`` pairs; its other axes broadcast to those of ``x``. For ``x``
            ``[batch, heads, tokens, n]`` this is ``[tokens, p]`` or ``[batch, 1, tokens, p]``. A table with n columns,
            as transformers makes it, has every number twice: give ``cos[..., : n // 2]``.
        sin: Like ``cos``.
        interleaved: False, pair i is the elements i and i + p (Llama, GPT-NeoX). True, 2i and 2i + 1 (GPT-J).

    Returns:
        A contiguous tensor with the shape and dtype of ``x``. Elements from 2p on are those of ``x``.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: The shapes do not fit.
        RuntimeError: ``cos`` or ``sin`` requires grad.

    Source: Su et al., arXiv 2104.09864.
    """
    refuse_tangents("rotary", x, cos, sin)
    return cast(Tensor, call("rotary", x, cos, sin, interleaved))
