"""``linear``: a matmul with a quantized weight that can also quantize its input. Source: docs/numerics.md section 9."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowbit.functional.arguments import refuse_grad_of_out, refuse_tangents
from lowbit.functional.quantizers import quantize
from lowbit.functional.scales import stored_scales
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
    """Computes ``x @ weight.T + bias`` for float ``x`` and a quantized weight, in one op.

    The result is bit-identical to ``scaled_mm(quantize(x, input_scheme), weight, bias, out_dtype)``. The gradient of
    ``x`` passes straight through its rounding: ``grad @ weight.dequantize()``.

    Args:
        x: Float ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]``.
        input_scheme: Scheme in which ``x`` is quantized; None multiplies ``x`` as it is.
        out_dtype: dtype of the result; by default the dtype of ``x``.
        out: Tensor that receives the result; not with ``out_scheme``.
        input_scale: Static scale of ``x``; by default scales are computed from ``x``.
        input_zero_point: Zero point that belongs to ``input_scale``.
        input_global_scale: Global scale that belongs to ``input_scale``.
        out_scheme: Scheme in which the fp32 result is quantized.
        out_scale: Static scale of the result, applied in the same op a few rows at a time. By default scales are
            computed from the result.
        out_zero_point: Zero point that belongs to ``out_scale``.

    Returns:
        ``[..., N]``; a Quantized with ``out_scheme``.

    Raises:
        TypeError: An argument has an unsupported dtype.
        ValueError: Shapes or schemes do not fit together.
        RuntimeError: A quantized result or ``out`` would need a gradient.
        NotImplementedError: An argument has a forward-mode tangent.

    Source: docs/numerics.md sections 3, 5 and 9.
    """
    refuse_tangents("linear", x, bias)
    if x.shape[-1:] != weight.shape[1:]:
        # The op cannot check this: rows of codes are padded to whole bytes.
        raise ValueError(
            f"linear: x {list(x.shape)} and the weight {list(weight.shape)} must end in the same K; "
            "the weight is [N, K]"
        )
    shape, dtype = (*x.shape[:-1], weight.shape[0]), x.dtype if out_dtype is None else out_dtype
    input_scheme = None if input_scheme is None else find_scheme(input_scheme)
    out_scheme = None if out_scheme is None else find_scheme(out_scheme)
    args = (
        x, weight.codes, weight.scheme.name, weight.scale, weight.zero_point, weight.global_scale, bias,
        None if input_scheme is None else input_scheme.name, dtype if out_scheme is None else torch.float32,
        *_static_scales("input", input_scheme, x, input_scale, input_zero_point, input_global_scale),
    )  # fmt: skip
    if out_scheme is not None:
        if out is not None:
            raise ValueError("linear: out= cannot be combined with out_scheme=; pass one of them")
        y = torch.empty((), device=x.device).expand(shape)  # stands for the result: only its shape is read
        scale, zero, _ = _static_scales("out", out_scheme, y, out_scale, out_zero_point, None)
        if scale is None:
            return quantize(call("linear", *args), out_scheme)
        codes = call("linear", *args, out_scheme.name, scale, zero)
        return Quantized(codes, scale, zero, None, out_scheme, torch.Size(shape), dtype)
    if out_scale is not None or out_zero_point is not None:
        raise ValueError("linear: out_scale and out_zero_point need an out_scheme; pass it too")
    if out is None:
        return cast(Tensor, call("linear", *args))
    if tuple(out.shape) != shape:
        raise ValueError(f"linear: out must be of shape {list(shape)}, got {list(out.shape)}")
    refuse_grad_of_out("linear", args)
    fill("linear", *args, out=out)
    return out


def _static_scales(name: str, scheme: Scheme | None, x: Tensor, *scales: Any) -> tuple[Any, ...]:
    """Static scale, zero point and global scale as arguments of ops; all None if the caller passed none."""
    if all(value is None for value in scales):
        return None, None, None
    if scheme is None:
        raise ValueError(f"linear: {name}_scale needs a scheme; pass {name}_scheme too, or drop {name}_scale")
    return stored_scales(scheme, x, *scales)
