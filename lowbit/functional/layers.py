"""linear: a matrix product whose input is quantized on the way. Source: docs/numerics.md section 9."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowbit.functional.arguments import refuse_grad_of_out, refuse_tangents
from lowbit.functional.quantizers import quantize
from lowbit.functional.scales import given_scales
from lowbit.op_calls import call, fill
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.quantized import Quantized


def linear(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None = None,
    input_scheme: str | Scheme | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    *,
    input_scale: Tensor | float | None = None,
    input_zero_point: Tensor | int | None = None,
    input_global_scale: Tensor | float | None = None,
    out_scheme: str | Scheme | None = None,
    out_scale: Tensor | float | None = None,
    out_zero_point: Tensor | int | None = None,
) -> Tensor | Quantized:
    """``x [..., K] @ weight [N, K].T + bias [N]`` for float ``x``, which ``input_scheme`` quantizes on the way: one op.

    The bits are those of ``scaled_mm(quantize(x, input_scheme), weight, bias, out_dtype)``; ``out_dtype`` is x's where
    not given. With ``input_scale`` (and its zero point and global scale) x is quantized by these, else by its own.
    With ``out_scheme`` the fp32 result is quantized, and Quantized is returned: by ``out_scale`` and
    ``out_zero_point`` in the same op, some rows at a time, or else by scales made of the result.
    The gradient of ``x`` passes straight through its rounding: ``grad @ weight.dequantize()``.

    Raises TypeError and ValueError for dtypes, shapes and schemes that do not fit, RuntimeError where a result in codes
    would need a gradient, NotImplementedError for forward-mode derivatives.
    Source: docs/numerics.md sections 3, 5 and 9.
    """
    refuse_tangents("linear", x, bias)
    if x.shape[-1:] != weight.shape[1:]:
        raise _other_cols(x, weight)
    shape, dtype = (*x.shape[:-1], weight.shape[0]), x.dtype if out_dtype is None else out_dtype
    of_input = None if input_scheme is None else find_scheme(input_scheme)
    of_output = None if out_scheme is None else find_scheme(out_scheme)
    args = (
        x, weight.codes, weight.scheme.name, weight.scale, weight.zero_point, weight.global_scale, bias,
        None if of_input is None else of_input.name, dtype if of_output is None else torch.float32,
        *_static("input", of_input, x, input_scale, input_zero_point, input_global_scale),
    )  # fmt: skip
    if of_output is not None:
        if out is not None:
            raise ValueError("linear: out= cannot be combined with out_scheme=; pass one of them")
        y = torch.empty((), device=x.device).expand(shape)  # of which the shape alone is looked at
        scale, zero, _ = _static("out", of_output, y, out_scale, out_zero_point, None)
        if scale is None:
            return quantize(call("linear", *args), of_output)
        codes = call("linear", *args, of_output.name, scale, zero)
        return Quantized(codes, scale, zero, None, of_output, torch.Size(shape), dtype)
    if out_scale is not None or out_zero_point is not None:
        raise ValueError("linear: out_scale and out_zero_point are those of an out_scheme; give that too")
    if out is None:
        return cast(Tensor, call("linear", *args))
    if tuple(out.shape) != shape:
        raise ValueError(f"linear: out must be of shape {list(shape)}, got {list(out.shape)}")
    refuse_grad_of_out("linear", args)
    fill("linear", *args, out=out)
    return out


def _static(name: str, kind: Scheme | None, x: Tensor, *given: Any) -> tuple[Any, ...]:
    """Scale, zero point and global scale of a scheme as ops take them, where they are given."""
    if all(value is None for value in given):
        return None, None, None
    if kind is None:
        raise ValueError(
            f"linear: {name}_scale is the scale of a scheme; give {name}_scheme too, or leave {name}_scale out"
        )
    return given_scales(kind, x, *given)


def _other_cols(x: Tensor, weight: Quantized) -> ValueError:
    """Codes alone do not tell: their rows are padded to whole bytes."""
    return ValueError(
        f"linear: x {list(x.shape)} and the weight {list(weight.shape)} must end in the same K; the weight is [N, K]"
    )
