"""``quantize`` and ``fake_quantize``. Source: docs/numerics.md sections 3, 5, 7 and 10."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from lowbit.functional.arguments import random_bits, refuse_tangents
from lowbit.functional.rotation import by_kernel
from lowbit.functional.scales import stored_scales
from lowbit.op_calls import call, fill
from lowbit.ops.quantize import products
from lowbit.rounding import Rounding
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.quantized import Quantized, zero_dtype


@overload
def quantize(
    x: Tensor,
    scheme: str | Scheme,
    scale: Tensor | float | None = ...,
    zero_point: Tensor | int | None = ...,
    global_scale: Tensor | float | None = ...,
    rounding: str | Rounding = ...,
    out: Quantized | None = ...,
    return_amax: Literal[False] = ...,
    factors: Tensor | None = ...,
) -> Quantized: ...
@overload
def quantize(
    x: Tensor,
    scheme: str | Scheme,
    scale: Tensor | float | None = ...,
    zero_point: Tensor | int | None = ...,
    global_scale: Tensor | float | None = ...,
    rounding: str | Rounding = ...,
    out: Quantized | None = ...,
    *,
    return_amax: Literal[True],
    factors: Tensor | None = ...,
) -> tuple[Quantized, Tensor] | tuple[Quantized, Tensor, Tensor]: ...
def quantize(
    x: Tensor,
    scheme: str | Scheme,
    scale: Tensor | float | None = None,
    zero_point: Tensor | int | None = None,
    global_scale: Tensor | float | None = None,
    rounding: str | Rounding = "nearest",
    out: Quantized | None = None,
    return_amax: bool = False,
    factors: Tensor | None = None,
) -> Quantized | tuple[Quantized, Tensor] | tuple[Quantized, Tensor, Tensor]:
    """Quantizes ``x`` in ``scheme``: packed codes with one scale per block.

    A block that contains Inf or NaN decodes to NaN; other blocks are not affected. The result has no gradient;
    ``fake_quantize`` rounds identically and has one.

    Args:
        x: float32, bfloat16 or float16 tensor.
        scheme: A Scheme or its name, such as ``"mxfp8"`` or ``"int8:row"``.
        scale: Static scale, shape ``[R, C]`` or one number for all blocks. By default scales are computed from the amax
            of each block (affine: from its range).
        zero_point: Zero point that belongs to ``scale``, for affine schemes.
        global_scale: Global scale, for schemes that have one; ``scale`` needs it.
        rounding: As for ``encode``.
        out: Quantized of the same scheme, shape and dtype that receives the result.
        return_amax: Also return the fp32 ``[R, C]`` values from which scales are computed, even with a static scale:
            the amax of each block, or for affine schemes its minimum and maximum, with 0 included. They are NaN for a
            block that contains Inf or NaN.
        factors: fp32 ``[rows, 1]`` or ``[1, cols]``. ``x.float() * factors`` is quantized, without allocating this
            product if the kernel supports it.

    Returns:
        The Quantized. With ``return_amax``, ``(Quantized, amax)`` or ``(Quantized, minimum, maximum)``.

    Raises:
        TypeError: A dtype is unsupported.
        ValueError: Shapes, scales or schemes do not fit together.

    Source: docs/numerics.md sections 3, 5.
    """
    scheme = find_scheme(scheme)
    matrix = x.detach() if x.dim() else x.detach().reshape(1)
    if factors is not None and (scheme.global_scale or scale is not None or return_amax):
        matrix, factors = products(matrix, factors).reshape(matrix.shape), None
    plain = rounding == "nearest" and scale is None and global_scale is None and out is None and not return_amax
    if scheme.global_scale and plain and not scheme.affine and by_kernel(matrix):
        codes, block_scale, tensor_scale = call("quantize_global", matrix, scheme.name)
        return Quantized(codes, block_scale, None, tensor_scale, scheme, x.shape, x.dtype)
    mode, *rng = random_bits(rounding, x)
    scales = tuple(
        [None if s is None else s.detach() for s in stored_scales(scheme, matrix, scale, zero_point, global_scale)]
    )
    parts = out.parts if out is not None else {}
    if out is not None and (out.scheme, out.shape, out.dtype) != (scheme, x.shape, x.dtype):
        raise ValueError(
            f"quantize: out holds {out.scheme} {list(out.shape)} of {out.dtype}, "
            f"but the result is {scheme} {list(x.shape)} of {x.dtype}"
        )
    if scales[0] is not None:
        codes = _quantize_static(matrix, scheme, scales, mode, rng, parts)
        block_scale, zero = scales[0], scales[1]
        _copy_scales(parts, scales)
    else:
        codes, block_scale, zero = _quantize_dynamic(matrix, scheme, scales[2], mode, rng, parts, factors)
    q = out
    if q is None:
        q = Quantized(codes, block_scale, zero if scheme.affine else None, scales[2], scheme, x.shape, x.dtype)
    if not return_amax:
        return q
    low, high = call("block_range", matrix, scheme.name)
    if scheme.affine:
        return q, low, high
    least = low.abs()
    return q, high.where(high >= least, least)  # maximum() would not keep the canonical NaN


def _quantize_dynamic(
    x: Tensor,
    scheme: Scheme,
    global_scale: Tensor | None,
    rounding: str,
    rng: list[Any],
    parts: dict[str, Tensor],
    factors: Tensor | None,
) -> Any:
    args = (x, scheme.name, global_scale, rounding, *rng, *(() if factors is None else (factors,)))
    if not parts:
        return call("quantize", *args)
    zero = parts.get("zero_point")
    if zero is None:
        zero = torch.empty(0, dtype=zero_dtype(scheme), device=x.device)
    fill("quantize", *args, codes=parts["codes"], scale=parts["scale"], zero_point=zero)
    if global_scale is not None:
        parts["global_scale"].copy_(global_scale)
    return parts["codes"], parts["scale"], zero


def _quantize_static(
    x: Tensor, scheme: Scheme, scales: tuple[Any, ...], rounding: str, rng: list[Any], parts: dict[str, Tensor]
) -> Any:
    args = (x, scheme.name, *scales, rounding, *rng)
    if not parts:
        return call("quantize_static", *args)
    fill("quantize_static", *args, out=parts["codes"])
    return parts["codes"]


def _copy_scales(parts: dict[str, Tensor], scales: tuple[Tensor | None, ...]) -> None:
    for name, value in zip(("scale", "zero_point", "global_scale"), scales, strict=True):
        if value is not None and name in parts and parts[name] is not value:
            parts[name].copy_(value)


def fake_quantize(
    x: Tensor,
    scheme: str | Scheme,
    scale: Tensor | float | None = None,
    zero_point: Tensor | int | None = None,
    global_scale: Tensor | float | None = None,
    rounding: str | Rounding = "nearest",
) -> Tensor:
    """Quantize and dequantize ``x``, with a straight-through gradient.

    The result is bit-identical to ``quantize(x, scheme, ...).dequantize()``. The gradient passes unchanged to elements
    of ``x`` in the range of the format, and is 0 for others. With scale ``s`` and zero point ``zp``, in range means
    ``qmin <= rint(x/s) + zp <= qmax`` for integers and ``|x/s| <= max`` for floats. Scales computed from ``x`` count as
    constants. A floating-point ``scale`` that requires grad gets its LSQ gradient (arXiv 1902.08153, without the
    paper's factor 1/sqrt(n * qmax)).

    Args:
        x: float32, bfloat16 or float16 tensor.
        scheme: A Scheme or its name.
        scale: As for ``quantize``.
        zero_point: As for ``quantize``.
        global_scale: As for ``quantize``.
        rounding: As for ``encode``.

    Returns:
        A tensor with the shape and dtype of ``x``.

    Raises:
        RuntimeError: A ``global_scale``, or a scale that is stored as codes, requires grad.
        NotImplementedError: An argument has a forward-mode tangent.

    Source: docs/numerics.md section 10.
    """
    refuse_tangents("fake_quantize", x, scale)
    scheme = find_scheme(scheme)
    matrix = x if x.dim() else x.reshape(1)
    scales = stored_scales(scheme, matrix, scale, zero_point, global_scale)
    learned = isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled()
    if learned and scales[0] is not None and not scales[0].is_floating_point():
        raise RuntimeError(
            f"fake_quantize: scale requires grad, but {scheme} stores scales as {scheme.scale_format.name} codes, "
            "which have no gradient; pass scale.detach(), or a scheme with fp32, bf16 or fp16 scales"
        )
    mode, *rng = random_bits(rounding, x)
    y: Tensor = call("fake_quantize", matrix, scheme.name, *scales, mode, *rng)
    return y.reshape(x.shape)
