"""quantize and fake_quantize. Source: docs/numerics.md sections 3, 5, 7 and 10."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from lowbit.functional.arguments import random_bits, refuse_tangents
from lowbit.functional.rotation import by_kernel
from lowbit.functional.scales import given_scales
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
    """``x`` in ``scheme``: packed codes with a scale for each block.

    ``scale`` (and ``zero_point``, ``global_scale``) given: used as they are, else made from the blocks' amax (affine:
    range). A block that holds Inf or NaN decodes to NaN, all of it and nothing else. ``rounding``: as for
    ``encode``. ``out`` is filled and returned.
    Codes carry no gradient, so neither does what they decode to; ``fake_quantize`` is the same rounding with one.

    ``return_amax`` also returns what scales are made from, whether they are given or not, fp32 ``[R, C]``: the amax of
    each block, or of affine schemes its minimum and maximum, 0 counted among them; NaN of a block that holds Inf or
    NaN. The result is then ``(Quantized, amax)`` or ``(Quantized, minimum, maximum)``.

    ``factors`` fp32 ``[rows, 1]`` or ``[1, cols]``: what is quantized is ``x.float() * factors``, which is not laid
    down in memory where a kernel can do without.

    Raises TypeError and ValueError for dtypes, shapes and schemes that do not fit.
    Source: docs/numerics.md sections 3, 5.
    """
    kind = find_scheme(scheme)
    matrix = x.detach() if x.dim() else x.detach().reshape(1)
    if factors is not None and (kind.global_scale or scale is not None or return_amax):
        matrix, factors = products(matrix, factors).reshape(matrix.shape), None
    plain = rounding == "nearest" and scale is None and global_scale is None and out is None and not return_amax
    if kind.global_scale and plain and not kind.affine and by_kernel(matrix):
        codes, made, above = call("quantize_global", matrix, kind.name)
        return Quantized(codes, made, None, above, kind, x.shape, x.dtype)
    word, *rng = random_bits(rounding, x)
    scales = tuple(
        [None if s is None else s.detach() for s in given_scales(kind, matrix, scale, zero_point, global_scale)]
    )
    parts = out.parts if out is not None else {}
    if out is not None and (out.scheme, out.shape, out.dtype) != (kind, x.shape, x.dtype):
        raise ValueError(
            f"quantize: out holds {out.scheme} {list(out.shape)} of {out.dtype}, "
            f"but the result is {kind} {list(x.shape)} of {x.dtype}"
        )
    if scales[0] is not None:
        codes = _quantize_static(matrix, kind, scales, word, rng, parts)
        made = (scales[0], scales[1])
        _copy_given(parts, scales)
    else:
        codes, *made = _quantize_dynamic(matrix, kind, scales[2], word, rng, parts, factors)
    q = out
    if q is None:
        q = Quantized(codes, made[0], made[1] if kind.affine else None, scales[2], kind, x.shape, x.dtype)
    if not return_amax:
        return q
    low, high = call("block_range", matrix, kind.name)
    if kind.affine:
        return q, low, high
    least = low.abs()
    return q, high.where(high >= least, least)  # of NaN the canonical one, which maximum() would not keep


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


def _copy_given(parts: dict[str, Tensor], scales: tuple[Tensor | None, ...]) -> None:
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
    """``quantize(x, scheme, ...).dequantize()`` in every bit, in the dtype of ``x``, with a gradient.

    The gradient passes where the element was in range (integers: ``qmin <= rint(x/s) + zp <= qmax``; floats:
    ``|x/s| <= max``) and is 0 elsewhere; scales made from ``x`` are constants. A floating-point ``scale`` that requires
    grad gets its LSQ gradient (arXiv 1902.08153, without the paper's scaling by 1/sqrt(n * qmax)).

    Raises RuntimeError where a ``global_scale``, or a scale that is stored as codes, requires grad: it would get none;
    NotImplementedError for forward-mode derivatives.
    Source: docs/numerics.md section 10.
    """
    refuse_tangents("fake_quantize", x, scale)
    kind = find_scheme(scheme)
    matrix = x if x.dim() else x.reshape(1)
    scales = given_scales(kind, matrix, scale, zero_point, global_scale)
    learned = isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled()
    if learned and scales[0] is not None and not scales[0].is_floating_point():
        raise RuntimeError(
            f"fake_quantize: scale requires grad, but {kind} stores scales as {kind.scale_format.name} codes, "
            "which have no gradient; give scale.detach(), or a scheme with fp32, bf16 or fp16 scales"
        )
    word, *rng = random_bits(rounding, x)
    y: Tensor = call("fake_quantize", matrix, kind.name, *scales, word, *rng)
    return y.reshape(x.shape)
