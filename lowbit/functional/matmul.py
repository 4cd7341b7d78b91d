"""scaled_mm: the product of two quantized matrices. Source: docs/numerics.md section 9."""

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
    """``a @ b.T`` accumulated in int32 or fp32: ``a [..., M, K]``, ``b [N, K]`` (the layout of nn.Linear's weight).

    Each operand is Quantized or a float tensor. ``bias [N]`` is added in fp32, then one cast to ``out_dtype``; with
    ``out_scheme`` the fp32 result is quantized instead (with ``out_scale``, or a new scale), and Quantized is returned.

    Raises ValueError where shapes or devices do not fit, NotImplementedError for forward-mode derivatives.
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
        raise ValueError("scaled_mm: out_scale is the scale of an out_scheme; give that too, or leave out_scale out")
    if out is not None:
        _check_out(out, shape, out_scheme, args)
    if isinstance(out, Tensor):
        viewed = out.dim() == 2 or out.is_contiguous()
        matrix = as_rows(out) if viewed else out.new_empty((out.shape[:-1].numel(), out.shape[-1]))
        fill("scaled_mm", *args, out=matrix)
        return out if viewed else out.copy_(matrix.reshape(shape))
    y: Tensor = call("scaled_mm", *args).reshape(shape)
    return y if out_scheme is None else quantize(y, out_scheme, scale=out_scale, out=out)


def _check_out(out: Tensor | Quantized, shape: tuple[int, ...], out_scheme: Any, inputs: tuple[Any, ...]) -> None:
    kind = Tensor if out_scheme is None else Quantized
    if not isinstance(out, kind):
        raise TypeError(
            f"scaled_mm: with out_scheme={str(out_scheme) if out_scheme is not None else None}, out must be a "
            f"{kind.__name__}, got {type(out).__name__}"
        )
    if tuple(out.shape) != shape:
        raise ValueError(f"scaled_mm: out must be of shape {list(shape)}, got {list(out.shape)}")
    refuse_grad_of_out("scaled_mm", inputs)


def _operand(x: Quantized | Tensor) -> tuple[Any, ...]:
    """The matrix, its scheme, scale, zero point and global scale."""
    if isinstance(x, Tensor):
        return as_rows(x), None, None, None, None
    return as_rows(x.codes), x.scheme.name, x.scale, x.zero_point, x.global_scale
