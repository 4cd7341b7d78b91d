"""``scaled_mm``: the matmul of two quantized or float matrices. Source: docs/numerics.md section 9."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.arguments import refuse_grad_of_out, refuse_tangents
from lowbit.functional.quantizers import quantize
from lowbit.op_calls import call, fill
from lowbit.ops.spec import as_rows
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scheme: str | Scheme | None = None,
    out_scale: Tensor | float | None = None,
    out: Tensor | Quantized | None = None,
) -> Tensor | Quantized:
    """Compute ``a @ b.T + bias`` of quantized or float matrices, accumulated in int32 or fp32.

    Args:
        a: ``[..., M, K]``, Quantized or float.
        b: ``[N, K]`` (the layout of nn.Linear's weight), Quantized or float.
        bias: ``[N]``, added in fp32.
        out_dtype: dtype to which the fp32 result is rounded once.
        out_scheme: Scheme in which the fp32 result is quantized instead.
        out_scale: Static scale for ``out_scheme``; by default scales are computed from the result.
        out: Receives the result: a Tensor, or a Quantized with ``out_scheme``.

    Returns:
        ``[..., M, N]``; a Quantized with ``out_scheme``.

    Raises:
        TypeError: ``out`` is not of the type that ``out_scheme`` needs.
        ValueError: Shapes or devices do not fit together.
        RuntimeError: An argument requires grad, and ``out`` is passed.
        NotImplementedError: An argument has a forward-mode tangent.

    Source: docs/numerics.md section 9.
    """
    if len(b.shape) != 2:
        raise ValueError(f"scaled_mm: b must be a matrix [N, K], got shape {list(b.shape)}")
    if len(a.shape) < 1 or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"scaled_mm: a {list(a.shape)} and b {list(b.shape)} must end in the same K; b is [N, K]")
    refuse_tangents("scaled_mm", a, b, bias)
    (a_data, a_scheme, *a_scales), (b_data, b_scheme, *b_scales) = _operand(a), _operand(b)
    dtype = torch.float32 if out_scheme is not None else out_dtype
    args = (a_data, b_data, a.shape[-1], a_scheme, b_scheme, *a_scales, *b_scales, bias, dtype)
    shape = (*a.shape[:-1], b.shape[0])
    if out_scale is not None and out_scheme is None:
        raise ValueError("scaled_mm: out_scale needs an out_scheme; pass it too, or drop out_scale")
    if out is not None:
        _check_out(out, shape, out_scheme, args)
    if isinstance(out, Tensor):
        is_view = out.dim() == 2 or out.is_contiguous()
        matrix = as_rows(out) if is_view else out.new_empty((out.shape[:-1].numel(), out.shape[-1]))
        fill("scaled_mm", *args, out=matrix)
        return out if is_view else out.copy_(matrix.reshape(shape))
    y: Tensor = call("scaled_mm", *args).reshape(shape)
    return y if out_scheme is None else quantize(y, out_scheme, scale=out_scale, out=out)


def _check_out(out: Tensor | Quantized, shape: tuple[int, ...], out_scheme: Any, inputs: tuple[Any, ...]) -> None:
    expected = Tensor if out_scheme is None else Quantized
    if not isinstance(out, expected):
        raise TypeError(
            f"scaled_mm: with out_scheme={str(out_scheme) if out_scheme is not None else None}, out must be a "
            f"{expected.__name__}, got {type(out).__name__}"
        )
    if tuple(out.shape) != shape:
        raise ValueError(f"scaled_mm: out must be of shape {list(shape)}, got {list(out.shape)}")
    refuse_grad_of_out("scaled_mm", inputs)


def _operand(x: Quantized | Tensor) -> tuple[Any, ...]:
    """The matrix, its scheme, scale, zero point and global scale."""
    if isinstance(x, Tensor):
        return as_rows(x), None, None, None, None
    return as_rows(x.codes), x.scheme.name, x.scale, x.zero_point, x.global_scale
