"""Ops that quantize and dequantize with block scales, and fake quantization with its gradient.

Stored codes are packed rows: ``x.shape[:-1] + [packed cols]``, uint8. Scales are ``[R, C]``, one per block of the
matrix ``[rows, cols]``. Source: docs/numerics.md sections 3, 5 to 8, 10.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops.spec import (
    FLOATS,
    Cost,
    OpSpec,
    Out,
    as_rows,
    matrix_shape,
    require,
    require_codes,
    require_float,
    require_global_scale,
    require_rounding,
    require_scales,
)
from lowbit.tensor.quantized import scale_dtype, zero_dtype


class GlobalScale(NamedTuple):
    x: Tensor
    scheme: str


class QuantizeGlobal(NamedTuple):
    """``quantize`` to nearest, with the global scale that ``global_scale`` computes from ``x``."""

    x: Tensor
    scheme: str


class BlockRange(NamedTuple):
    x: Tensor
    scheme: str


class Quantize(NamedTuple):
    """``factors``: fp32 ``[rows, 1]`` or ``[1, cols]``. ``x`` times the factors, in fp32, is quantized."""

    x: Tensor
    scheme: str
    global_scale: Tensor | None = None
    rounding: str = "nearest"
    rng: Tensor | None = None
    stream: int = 0
    offset: int = 0
    pitch: int | None = None
    factors: Tensor | None = None


class QuantizeStatic(NamedTuple):
    x: Tensor
    scheme: str
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    rounding: str = "nearest"
    rng: Tensor | None = None
    stream: int = 0
    offset: int = 0
    pitch: int | None = None


class Dequantize(NamedTuple):
    codes: Tensor
    scheme: str
    cols: int
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    dtype: torch.dtype = torch.float32


class FakeQuantize(NamedTuple):
    x: Tensor
    scheme: str
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    rounding: str = "nearest"
    rng: Tensor | None = None
    stream: int = 0
    offset: int = 0
    pitch: int | None = None


class FakeQuantizeBackward(NamedTuple):
    """The gradient of given scales is ``[R, C]``, or with zero points ``[2, R, C]``: first scales, then zero points."""

    grad: Tensor
    x: Tensor
    scheme: str
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None


def with_factors(call: Quantize) -> Tensor:
    """The matrix to quantize: ``x``, or ``x`` times the factors in fp32."""
    return as_rows(call.x) if call.factors is None else products(call.x, call.factors)


def products(x: Tensor, factors: Tensor) -> Tensor:
    """``x`` as a matrix, times ``factors`` in fp32. Raises ValueError unless there is one factor per row or column."""
    require_factors(factors, *matrix_shape(x))
    return as_rows(x).float() * factors


def require_factors(factors: Tensor, rows: int, cols: int) -> None:
    """Raise ValueError unless ``factors`` has one number per row or column."""
    require(
        factors.dtype == torch.float32 and tuple(factors.shape) in ((rows, 1), (1, cols)),
        f"lowbit.quantize: factors must be float32 [{rows}, 1] or [1, {cols}], one for each row or column of x; got "
        f"{str(factors.dtype).removeprefix('torch.')} {list(factors.shape)}",
    )


# -- outputs (also the fake rules) -----------------------------------------------------------------------------------
def _codes_out(x: Tensor, scheme: scaling.Scheme) -> Out:
    return (*x.shape[:-1], scheme.packed_cols(x.shape[-1])), torch.uint8


def _scale_outs(x: Tensor, scheme: scaling.Scheme) -> list[Out]:
    shape = scheme.scale_shape(*matrix_shape(x))
    return [(shape, scale_dtype(scheme)), (shape if scheme.affine else (0,), zero_dtype(scheme))]


def _global_scale_outputs(call: GlobalScale) -> list[Out]:
    return [(scaling.scheme(call.scheme).global_scale_shape(*matrix_shape(call.x)), torch.float32)]


def _quantize_global_outputs(call: QuantizeGlobal) -> list[Out]:
    scheme = scaling.scheme(call.scheme)
    scale, _ = _scale_outs(call.x, scheme)
    shape = scheme.global_scale_shape(*matrix_shape(call.x))
    return [_codes_out(call.x, scheme), scale, (shape, torch.float32)]


def _range_outputs(call: BlockRange) -> list[Out]:
    return [(scaling.scheme(call.scheme).scale_shape(*matrix_shape(call.x)), torch.float32)] * 2


def _quantize_outputs(call: Quantize) -> list[Out]:
    scheme = scaling.scheme(call.scheme)
    return [_codes_out(call.x, scheme), *_scale_outs(call.x, scheme)]


def _backward_outputs(call: FakeQuantizeBackward) -> list[Out]:
    scheme = scaling.scheme(call.scheme)
    scale_shape = scheme.scale_shape(*matrix_shape(call.x))
    grad_shape = (0,) if call.scale is None else (2, *scale_shape) if scheme.affine else scale_shape
    return [(tuple(call.x.shape), call.grad.dtype), (grad_shape, torch.float32)]


# -- checks ----------------------------------------------------------------------------------------------------------
def _check_x(op: str, call: Any, scheme: scaling.Scheme) -> None:
    require_float(op, "x", call.x)
    require(call.x.dim() >= 1, f"lowbit.{op}: x needs at least one axis (lowbit.functional takes scalars too)")
    if hasattr(call, "rounding"):
        require_rounding(op, call)


def _check_global_scale(call: GlobalScale) -> None:
    scheme = scaling.scheme(call.scheme)
    _check_x("global_scale", call, scheme)
    require(bool(scheme.global_scale), f"lowbit.global_scale: {scheme} has no global scale; add ':e4m3', or use nvfp4")


def _check_quantize_global(call: QuantizeGlobal) -> None:
    scheme = scaling.scheme(call.scheme)
    _check_x("quantize_global", call, scheme)
    require(
        bool(scheme.global_scale) and not scheme.affine,
        f"lowbit.quantize_global: expected a scheme with a global scale and without zero points, got {scheme}; use "
        f"lowbit.quantize, or nvfp4",
    )


def _check_quantize(call: Quantize) -> None:
    scheme = scaling.scheme(call.scheme)
    _check_x("quantize", call, scheme)
    rows, cols = matrix_shape(call.x)
    require_global_scale("quantize", scheme, rows, cols, call.global_scale)
    if call.factors is not None:
        require_factors(call.factors, rows, cols)


def _check_static(call: QuantizeStatic) -> None:
    scheme = scaling.scheme(call.scheme)
    _check_x("quantize_static", call, scheme)
    require_scales("quantize_static", scheme, *matrix_shape(call.x), call.scale, call.zero_point, call.global_scale)


def _check_dequantize(call: Dequantize) -> None:
    scheme = scaling.scheme(call.scheme)
    require_codes("dequantize", "codes", call.codes)
    require(call.codes.dim() >= 1, "lowbit.dequantize: codes need at least one axis")
    require(call.dtype in FLOATS, f"lowbit.dequantize: dtype must be float32, bfloat16 or float16, got {call.dtype}")
    rows, stored = matrix_shape(call.codes)
    require(
        stored == scheme.packed_cols(call.cols),
        f"lowbit.dequantize: {call.cols} columns of {scheme} take {scheme.packed_cols(call.cols)} bytes a row, "
        f"got {stored}",
    )
    require_scales("dequantize", scheme, rows, call.cols, call.scale, call.zero_point, call.global_scale)


def _check_fake(call: FakeQuantize | FakeQuantizeBackward) -> None:
    scheme = scaling.scheme(call.scheme)
    _check_x("fake_quantize", call, scheme)
    if call.scale is not None:
        require_scales("fake_quantize", scheme, *matrix_shape(call.x), call.scale, call.zero_point, call.global_scale)
    else:
        require(call.zero_point is None, "lowbit.fake_quantize: a zero_point needs its scale; give both or neither")
        require_global_scale("fake_quantize", scheme, *matrix_shape(call.x), call.global_scale)
    if isinstance(call, FakeQuantizeBackward):
        require(
            call.grad.shape == call.x.shape,
            f"lowbit.fake_quantize_backward: grad is {list(call.grad.shape)}, x is {list(call.x.shape)}",
        )


# -- cost ------------------------------------------------------------------------------------------------------------
def _stored(x: Tensor, scheme: scaling.Scheme) -> int:
    return scheme.nbytes(tuple(x.shape))


def _quantize_cost(call: Quantize | QuantizeStatic) -> Cost:
    return Cost(0, call.x.numel() * call.x.element_size() + _stored(call.x, scaling.scheme(call.scheme)))


def _dequantize_cost(call: Dequantize) -> Cost:
    elements = matrix_shape(call.codes)[0] * call.cols
    return Cost(0, call.codes.numel() + call.scale.numel() * call.scale.element_size() + elements * call.dtype.itemsize)


def _backward_tolerance(call: FakeQuantizeBackward, numerics: object) -> Tensor:
    """Bound on |grad_scale - exact|, fp64 with the shape of grad_scale; 0 without scales. The gradient of x is exact.

    Let u = 2^-24. The difference and the product in a term cost 2 u. The sum of a block's n terms in any order costs
    n - 1 more. The bound is gamma_{n+1} times the sum of |terms|, gamma_n = n u / (1 - n u) (Higham 2002, section 3.1).
    A subnormal term loses 2^-150. The bound is infinite if a partial sum could overflow. It is 0 if a term is Inf or
    NaN, because every order then gives the same Inf or NaN.
    """
    if call.scale is None:
        return torch.zeros((), dtype=torch.float64)
    scheme, x = scaling.scheme(call.scheme), as_rows(call.x)
    block, each = scheme.block_of(*x.shape), replace(scheme, block=(1, 1))
    scale = reference.spread(call.scale, block, *x.shape)
    zero = None if call.zero_point is None else reference.spread(call.zero_point, block, *x.shape)
    _, terms = reference.fake_quantize_backward(as_rows(call.grad), x, each, scale, zero, call.global_scale)
    count = reference.in_blocks(torch.ones_like(x, dtype=torch.float64), scheme).sum((1, 3))
    size = torch.stack([reference.in_blocks(t.double().abs(), scheme).sum((1, 3)) for t in terms.reshape(-1, *x.shape)])
    size = size if scheme.affine else size[0]
    roundings = (count + 1) * 2.0**-24
    bound = size * roundings / (1 - roundings) + count * 2.0**-150
    bound = bound.where(size + bound < torch.finfo(torch.float32).max, torch.inf)
    return bound.where(size.isfinite(), 0.0)


SPECS = (
    OpSpec(
        "global_scale", GlobalScale, ("out",), _global_scale_outputs, _check_global_scale,
        lambda call: Cost(0, call.x.numel() * call.x.element_size()),
    ),
    OpSpec(
        "quantize_global", QuantizeGlobal, ("codes", "scale", "global_scale"), _quantize_global_outputs,
        _check_quantize_global, lambda call: _quantize_cost(Quantize(*call)),
    ),
    OpSpec(
        "block_range", BlockRange, ("low", "high"), _range_outputs,
        lambda call: _check_x("block_range", call, scaling.scheme(call.scheme)),
        lambda call: Cost(0, call.x.numel() * call.x.element_size()),
    ),
    OpSpec(
        "quantize", Quantize, ("codes", "scale", "zero_point"), _quantize_outputs, _check_quantize,
        _quantize_cost,
    ),
    OpSpec(
        "quantize_static", QuantizeStatic, ("out",), lambda call: [_codes_out(call.x, scaling.scheme(call.scheme))],
        _check_static, _quantize_cost,
    ),
    OpSpec(
        "dequantize", Dequantize, ("out",), lambda call: [((*call.codes.shape[:-1], call.cols), call.dtype)],
        _check_dequantize, _dequantize_cost,
    ),
    OpSpec(
        "fake_quantize", FakeQuantize, ("out",), lambda call: [(tuple(call.x.shape), call.x.dtype)], _check_fake,
        lambda call: Cost(0, 2 * call.x.numel() * call.x.element_size()),
    ),
    OpSpec(
        "fake_quantize_backward", FakeQuantizeBackward, ("grad_x", "grad_scale"), _backward_outputs, _check_fake,
        lambda call: Cost(0, 3 * call.x.numel() * call.x.element_size()),
        _backward_tolerance,
    ),
)  # fmt: skip
