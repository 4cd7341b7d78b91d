"""The reference backend: every op by ``lowbit.reference``, on CPU and CUDA, for every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit import formats, reference, scaling
from lowbit.backends import composed
from lowbit.backends.registry import Impl
from lowbit.ops import codec, fused, matmul, optim, rotation
from lowbit.ops import quantize as q
from lowbit.ops.spec import Numerics, as_rows, matrix_shape
from lowbit.tensor import packing


def _rng(call: Any) -> reference.Rng | None:
    if call.rounding == "nearest":
        return None
    seed, step = call.rng.tolist()
    return reference.Rng(seed, step, call.stream, call.offset, call.pitch)


def _encode(outs: tuple[Tensor, ...], call: codec.Encode) -> None:
    codes = reference.encode(as_rows(call.x), formats.find(call.format), _rng(call), call.saturate)
    outs[0].copy_(codes.reshape(outs[0].shape))


def _decode(outs: tuple[Tensor, ...], call: codec.Decode) -> None:
    outs[0].copy_(reference.decode(call.codes, formats.find(call.format), call.dtype))


def _pack(outs: tuple[Tensor, ...], call: codec.Pack) -> None:
    outs[0].copy_(packing.pack(call.codes, call.bits))


def _unpack(outs: tuple[Tensor, ...], call: codec.Unpack) -> None:
    outs[0].copy_(packing.unpack(call.packed, call.bits, call.cols))


def _transpose(outs: tuple[Tensor, ...], call: codec.Transpose) -> None:
    outs[0].copy_(packing.pack(packing.unpack(call.packed, call.bits, call.cols).t().contiguous(), call.bits))


def _global_scale(outs: tuple[Tensor, ...], call: q.GlobalScale) -> None:
    outs[0].copy_(reference.global_scale(call.x, scaling.scheme(call.scheme)))


def _block_range(outs: tuple[Tensor, ...], call: q.BlockRange) -> None:
    scheme, x = scaling.scheme(call.scheme), as_rows(call.x)
    invalid = reference.block_amax(~x.isfinite(), scheme)
    for out, end in zip(outs, reference.block_range(x, scheme), strict=True):
        out.copy_(end.masked_fill(invalid, torch.nan))


def _store(out: Tensor, codes: Tensor, scheme: scaling.Scheme) -> None:
    out.copy_(packing.pack(codes, scheme.format.bits).reshape(out.shape))


def _quantize(outs: tuple[Tensor, ...], call: q.Quantize) -> None:
    scheme = scaling.scheme(call.scheme)
    codes, scale, zero_point = reference.quantize(q.with_factors(call), scheme, call.global_scale, _rng(call))
    _store(outs[0], codes, scheme)
    outs[1].copy_(scale)
    if zero_point is not None:
        outs[2].copy_(zero_point)


def _quantize_static(outs: tuple[Tensor, ...], call: q.QuantizeStatic) -> None:
    scheme = scaling.scheme(call.scheme)
    codes = reference.quantize_static(
        as_rows(call.x), scheme, call.scale, call.zero_point, call.global_scale, _rng(call)
    )
    _store(outs[0], codes, scheme)


def _dequantize(outs: tuple[Tensor, ...], call: q.Dequantize) -> None:
    scheme = scaling.scheme(call.scheme)
    codes = reference.unpack(as_rows(call.codes), scheme, call.cols)
    y = reference.dequantize(codes, scheme, call.scale, call.zero_point, call.global_scale, call.dtype)
    outs[0].copy_(y.reshape(outs[0].shape))


def _fake_quantize(outs: tuple[Tensor, ...], call: q.FakeQuantize) -> None:
    scheme, x = scaling.scheme(call.scheme), as_rows(call.x)
    if call.scale is None:
        codes, scale, zero_point = reference.quantize(x, scheme, call.global_scale, _rng(call))
    else:
        scale, zero_point = call.scale, call.zero_point
        codes = reference.quantize_static(x, scheme, scale, zero_point, call.global_scale, _rng(call))
    y = reference.dequantize(codes, scheme, scale, zero_point, call.global_scale, call.x.dtype)
    outs[0].copy_(y.reshape(outs[0].shape))


def _fake_quantize_backward(outs: tuple[Tensor, ...], call: q.FakeQuantizeBackward) -> None:
    scheme, x = scaling.scheme(call.scheme), as_rows(call.x)
    scale, zero_point = call.scale, call.zero_point
    if scale is None:
        scale, zero_point = reference.block_scales(x, scheme, call.global_scale)
    grad_x, grad_scale = reference.fake_quantize_backward(
        call.grad.reshape(matrix_shape(call.x)), x, scheme, scale, zero_point, call.global_scale
    )
    outs[0].copy_(grad_x.reshape(outs[0].shape))
    if call.scale is not None:
        outs[1].copy_(grad_scale)


def _scaled_mm(outs: tuple[Tensor, ...], call: matmul.ScaledMM) -> None:
    a, b = (matmul.operand(side, call.cols) for side in matmul.sides(call))
    outs[0].copy_(reference.scaled_mm(a, b, call.bias, call.out_dtype))


def _optimizer_step(outs: tuple[Tensor, ...], call: optim.OptimizerStep) -> None:
    param = as_rows(call.param)
    stored = []
    for moment in optim.moments(call):
        scheme = None if moment.scheme in optim.FLOAT_STATES else scaling.scheme(moment.scheme)
        codes = as_rows(moment.codes)
        codes = codes if scheme is None else reference.unpack(codes, scheme, param.shape[1])
        stored.append(reference.Moment(codes, moment.scale, scheme))
    rng = None if call.rng is None else _rng(call._replace(rounding="stochastic"))
    new_param, new_master, moments = reference.optimizer_step(
        param,
        as_rows(call.grad),
        None if call.master is None else as_rows(call.master),
        stored,
        call.rule,
        optim.fp32_factors(call),
        rng if call.rounding == "stochastic" else None,
        rng._replace(stream=rng.stream + 1) if rng and call.param_rounding == "stochastic" else None,
    )
    outs[0].copy_(new_param.reshape(outs[0].shape))
    if new_master is not None:
        outs[1].copy_(new_master.reshape(outs[1].shape))
    for new, codes, scale in zip(moments, outs[2::2], outs[3::2], strict=False):
        if new.scheme is None:
            codes.copy_(new.codes.reshape(codes.shape))
            continue
        _store(codes, new.codes, new.scheme)
        assert new.scale is not None
        scale.copy_(new.scale)


def _square_sums(outs: tuple[Tensor, ...], call: optim.SquareSums) -> None:
    outs[0].copy_(reference.square_sums(call.x, call.exponents, call.axis, optim.SQUARE_BITS))


def _hadamard(outs: tuple[Tensor, ...], call: rotation.Hadamard) -> None:
    x = call.x if call.axis == 1 else call.x.t()
    if call.signed:
        x = x * reference.signs(x, x.shape[1], call.block)
    y = reference.hadamard(x, call.block)
    y = y.masked_fill(y.isnan(), torch.nan)
    outs[0].copy_(y if call.axis == 1 else y.t())


def _rms_norm(outs: tuple[Tensor, ...], call: fused.RMSNorm) -> None:
    _fill(outs, reference.rms_norm(call.x, call.weight, call.eps, call.offset))


def _rms_norm_backward(outs: tuple[Tensor, ...], call: fused.RMSNormBackward) -> None:
    grads = reference.rms_norm_backward(call.grad, call.x, call.weight, call.rstd, call.offset, fused.ROWS)
    _fill(outs, grads if call.weight_grad else grads[:1])


def _swiglu(outs: tuple[Tensor, ...], call: fused.Swiglu) -> None:
    outs[0].copy_(reference.swiglu(*call))


def _swiglu_backward(outs: tuple[Tensor, ...], call: fused.SwigluBackward) -> None:
    _fill(outs, reference.swiglu_backward(*call))


def _rotary(outs: tuple[Tensor, ...], call: fused.Rotary) -> None:
    outs[0].copy_(reference.rotary(*call))


def _fill(outs: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    for out, result in zip(outs, results, strict=False):
        out.copy_(result)


_RUN: dict[str, Callable[[tuple[Tensor, ...], Any], None]] = {
    "encode": _encode,
    "decode": _decode,
    "pack": _pack,
    "unpack": _unpack,
    "transpose": _transpose,
    "global_scale": _global_scale,
    "block_range": _block_range,
    "quantize": _quantize,
    "quantize_static": _quantize_static,
    "dequantize": _dequantize,
    "fake_quantize": _fake_quantize,
    "fake_quantize_backward": _fake_quantize_backward,
    "scaled_mm": _scaled_mm,
    "optimizer_step": _optimizer_step,
    "square_sums": _square_sums,
    "hadamard": _hadamard,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "rotary": _rotary,
}

_ROWS = tuple(
    Impl(op, "reference", ("cpu", "cuda"), run=run, numerics=Numerics("fp32", "fp32")) for op, run in _RUN.items()
)
IMPLS = composed.packed(composed.every(_ROWS))


def unavailable() -> str | None:
    """None: this backend is always present."""
    return None
