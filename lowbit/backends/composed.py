"""Composite ops: ops without a kernel of their own in a backend, built from its other kernels.

A composite is a generator of kernel calls. ``_execute`` runs the calls. ``_refusal`` asks each kernel whether it
supports its call, with meta tensors in place of intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.registry import Impl
from lowbit.ops import OPS, dual, rotation
from lowbit.ops import conv as convolution
from lowbit.ops import grouped as grouping
from lowbit.ops import packed as packing
from lowbit.ops import quantize as q
from lowbit.ops.linear import Linear, input_scales, product
from lowbit.ops.spec import as_rows
from lowbit.tensor import packing as tensors
from lowbit.tensor.quantized import Scales, zero_dtype

__all__ = ["conv", "every", "grouped", "linear", "packed", "quantize_both", "quantize_global"]

#: Elements of the patches that ``conv`` stores at a time; more on GPUs, to launch fewer kernels.
_PATCHES, _PATCHES_ON_GPUS = 1 << 21, 1 << 24


def every(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``rows`` of one backend, and all composites of them."""
    makers = (linear, conv, grouped, quantize_global, quantize_both)
    return (*rows, *(row for make in makers for row in make(rows)))


# -- calls of kernels --------------------------------------------------------------------------------------------------
class _Step(NamedTuple):
    """A call of another op. ``outs``: the tensors to fill, or None for new tensors."""

    op: str
    call: Any
    outs: tuple[Tensor, ...] | None = None


_Result = TypeVar("_Result")
#: Kernels of one backend for one device, by op.
_Parts = dict[str, Impl]
#: Yields steps, receives the outputs of each, and returns a result.
_Steps = Generator[_Step, tuple[Tensor, ...], _Result]
#: Makes the steps of an op from the available kernels, the outputs to fill, and the call.
_Composite = Callable[[_Parts, tuple[Tensor, ...], Any], _Steps[None]]


def _execute(parts: _Parts, steps: _Steps[_Result]) -> _Result:
    """Run the steps with the kernels ``parts``."""
    try:
        step = next(steps)
        while True:
            outs = step.outs
            if outs is None:
                outs = _empty(step.op, step.call, step.call[0].device)
            parts[step.op].run(outs, step.call)
            step = steps.send(outs)
    except StopIteration as end:
        result: _Result = end.value
        return result


def _refusal(parts: _Parts, steps: _Steps[Any]) -> str | None:
    """Why one of ``parts`` does not support its step, or None."""
    try:
        step = next(steps)
        while True:
            if step.op not in parts:
                return f"it has no kernel of {step.op}"
            reason = parts[step.op].supports(step.call)
            if reason is not None:
                return reason
            step = steps.send(_empty(step.op, step.call, "meta"))
    except StopIteration:
        return None


def _empty(op: str, call: Any, device: torch.device | str) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in OPS[op].outputs(call))


def _parts(rows: tuple[Impl, ...], row: Impl) -> _Parts:
    """Kernels of ``rows`` for the devices of ``row``, by op."""
    return {part.op: part for part in rows if part.devices == row.devices}


def _made_of(rows: tuple[Impl, ...], of: str, op: str, composite: _Composite) -> tuple[Impl, ...]:
    """``op`` as a composite, on each device for which ``rows`` of one backend have a kernel of ``of``."""

    def supports(parts: _Parts, call: Any) -> str | None:
        return _refusal(parts, composite(parts, _empty(op, call, "meta"), call))

    def run(parts: _Parts, outs: tuple[Tensor, ...], call: Any) -> None:
        _execute(parts, composite(parts, outs, call))

    pairs = [(row, _parts(rows, row)) for row in rows if row.op == of]
    return tuple(
        replace(row, op=op, run=partial(run, parts), supports=partial(supports, parts)) for row, parts in pairs
    )


# -- linear ------------------------------------------------------------------------------------------------------------
def linear(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``linear`` from ``quantize`` and ``scaled_mm`` of one backend."""
    return _made_of(rows, "scaled_mm", "linear", _linear)


def _linear(parts: _Parts, outs: tuple[Tensor, ...], call: Linear) -> _Steps[None]:
    x, scales, out = as_rows(call.x), input_scales(call), as_rows(outs[0])
    if call.input_scheme is not None and x.dtype != torch.uint8:
        x, scales = yield from _codes(parts, x, scaling.scheme(call.input_scheme), scales)
    (y,) = yield _Step("scaled_mm", product(call, x, scales), (out,) if call.out_scheme is None else None)
    yield from _stored(y, out, call)


def _stored(y: Tensor, out: Tensor, call: Linear | convolution.Conv) -> _Steps[None]:
    """Quantize a result ``y`` in ``out_scheme``, if there is one."""
    if call.out_scheme is not None:
        assert call.out_scale is not None
        yield _Step(
            "quantize_static", q.QuantizeStatic(y, call.out_scheme, call.out_scale, call.out_zero_point), (out,)
        )


def _codes(parts: _Parts, x: Tensor, scheme: scaling.Scheme, scales: Scales | None) -> _Steps[tuple[Tensor, Scales]]:
    """Quantize ``x``, with ``scales`` or with scales computed from it."""
    if scales is None:
        return (yield from _quantized(parts, x, scheme))
    (codes,) = yield _Step("quantize_static", q.QuantizeStatic(x, scheme.name, *scales))
    return codes, scales


def _quantized(
    parts: _Parts, x: Tensor, scheme: scaling.Scheme, global_scale: Tensor | None = None
) -> _Steps[tuple[Tensor, Scales]]:
    """Quantize ``x`` with scales computed from it. ``global_scale`` replaces the computed one."""
    if scheme.global_scale and global_scale is None:
        fused = q.QuantizeGlobal(x, scheme.name)
        if "quantize_global" in parts and parts["quantize_global"].supports(fused) is None:
            codes, scale, global_scale = yield _Step("quantize_global", fused)
            return codes, Scales(scale, None, global_scale)
        (global_scale,) = yield _Step("global_scale", q.GlobalScale(x, scheme.name))
    codes, scale, zero = yield _Step("quantize", q.Quantize(x, scheme.name, global_scale))
    return codes, Scales(scale, zero if scheme.affine else None, global_scale)


def packed(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``rows`` of one backend, and ``linear_packed`` from its ``linear``, which unpacks the weight at each call."""
    composites = [
        replace(row, op="linear_packed", run=partial(_run_packed, row), supports=lambda call: None)
        for row in rows
        if row.op == "linear"
    ]
    return (*rows, *composites)


def _run_packed(linear: Impl, outs: tuple[Tensor, ...], call: packing.LinearPacked) -> None:
    linear.run(outs, packing.plain(call))


# -- quantize_global ---------------------------------------------------------------------------------------------------
def quantize_global(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``quantize_global`` from ``global_scale`` and ``quantize`` of one backend."""
    return _made_of(rows, "quantize", "quantize_global", _quantize_global)


def _quantize_global(parts: _Parts, outs: tuple[Tensor, ...], call: q.QuantizeGlobal) -> _Steps[None]:
    yield from _filled(outs, q.Quantize(call.x, call.scheme))


def _filled(outs: tuple[Tensor, ...], call: q.Quantize) -> _Steps[None]:
    """Fill codes, scales and, if the scheme has one, the global scale."""
    codes, scale, global_scale = outs
    scheme = scaling.scheme(call.scheme)
    if scheme.global_scale:
        yield _Step("global_scale", q.GlobalScale(call.x, call.scheme), (global_scale,))
        call = call._replace(global_scale=global_scale)
    zero = torch.empty(0, dtype=zero_dtype(scheme), device=codes.device)
    yield _Step("quantize", call, (codes, scale, zero))


# -- quantize_both -----------------------------------------------------------------------------------------------------
def quantize_both(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``quantize_both`` from two ``quantize`` calls of one backend."""
    return _made_of(rows, "quantize", "quantize_both", _quantize_both)


def _quantize_both(parts: _Parts, outs: tuple[Tensor, ...], call: dual.QuantizeBoth) -> _Steps[None]:
    first, second = dual.quantize_calls(call)
    yield from _filled(outs[:3], first)
    if call.block > 1:
        (turned,) = yield _Step("hadamard", rotation.Hadamard(call.x, call.block, 0, True))
        second = second._replace(x=turned)
    yield from _filled(outs[3:], second)


# -- scaled_grouped_mm -------------------------------------------------------------------------------------------------
def grouped(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``scaled_grouped_mm`` from ``scaled_mm``: one matmul per expert. The host reads the offsets."""
    return tuple(
        replace(
            mm, op="scaled_grouped_mm", run=partial(_run_grouped, mm), supports=partial(_supports_grouped, mm),
        )
        for mm in rows
        if mm.op == "scaled_mm"
    )  # fmt: skip


def _supports_grouped(mm: Impl, call: grouping.ScaledGroupedMM) -> str | None:
    return mm.supports(grouping.product(call, 0, slice(None)))


def _run_grouped(mm: Impl, outs: tuple[Tensor, ...], call: grouping.ScaledGroupedMM) -> None:
    spans = grouping.spans(call)
    for expert, rows in enumerate(spans):
        if rows.start < rows.stop:
            mm.run((outs[0][rows],), grouping.product(call, expert, rows))
    outs[0][spans[-1].stop :].zero_()


# -- conv --------------------------------------------------------------------------------------------------------------
def conv(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``conv`` from ``quantize`` and ``scaled_mm`` of one backend, which stores some patches at a time."""
    return tuple(
        replace(
            mm, op="conv", run=partial(_run_conv, parts), supports=partial(_supports_conv, parts), fewest_rows=1,
        )
        for mm, parts in ((row, _parts(rows, row)) for row in rows if row.op == "scaled_mm")
    )  # fmt: skip


class _Source(NamedTuple):
    """The pixels that patches are read from."""

    pixels: Tensor
    """``[pixels, C]``: floats, or one-byte codes if the tensor has one scale."""
    scales: Scales | None = None
    """Scales of the codes."""
    global_scale: Tensor | None = None
    """The global scale of all pixels, if each patch has its own block scales."""


def _run_conv(parts: _Parts, outs: tuple[Tensor, ...], call: convolution.Conv) -> None:
    out = as_rows(outs[0])
    y = out if call.out_scheme is None else torch.empty(out.shape[0], call.weight.shape[0], device=call.x.device)
    source = _execute(parts, _source(parts, call))
    step, cols = _rows_at_a_time(call), call.weight.shape[0] // call.groups
    for begin in range(0, y.shape[0], step):
        end = min(begin + step, y.shape[0])
        for group in range(call.groups):
            product = _execute(parts, _product(parts, call, source, (group, begin, end)))
            y[begin:end, group * cols : (group + 1) * cols] = product
    _execute(parts, _stored(y, out, call))


def _supports_conv(parts: _Parts, call: convolution.Conv) -> str | None:
    """The refusal for the first patches, or None."""
    rows = call.x.shape[0] * prod(convolution.out_sizes(call))
    call = call._replace(x=call.x.to("meta"))

    def steps() -> _Steps[None]:
        source = yield from _source(parts, call)
        yield from _product(parts, call, source, (0, 0, min(_rows_at_a_time(call), rows)))
        y = torch.empty((rows, call.weight.shape[0]), device="meta")
        yield from _stored(y, as_rows(*_empty("conv", call, "meta")), call)

    return _refusal(parts, steps())


def _source(parts: _Parts, call: convolution.Conv) -> _Steps[_Source]:
    scales = input_scales(call)
    if scales is not None and call.x.dtype == torch.uint8:
        return _Source(convolution.coded_pixels(call, scales), scales)
    pixels = convolution.pixels(call.x)
    if call.input_scheme is None:
        return _Source(pixels)
    scheme = scaling.scheme(call.input_scheme)
    if convolution.spans_tensor(scheme):
        codes, scales = yield from _codes(parts, pixels, scheme, scales)
        return _Source(tensors.unpack(codes, scheme.format.bits, pixels.shape[1]), scales)
    if scheme.global_scale != "tensor":
        return _Source(pixels)
    (global_scale,) = yield _Step("global_scale", q.GlobalScale(pixels, scheme.name))
    return _Source(pixels, None, global_scale)


def _product(parts: _Parts, call: convolution.Conv, source: _Source, span: tuple[int, int, int]) -> _Steps[Tensor]:
    """The matmul of patches and the weight. ``span``: group, first row, end row."""
    part, scales = convolution.patches(source.pixels, call, *span), source.scales
    if call.input_scheme is not None:
        scheme = scaling.scheme(call.input_scheme)
        if convolution.spans_tensor(scheme):
            part = tensors.pack(part, scheme.format.bits)
        else:
            part, scales = yield from _quantized(parts, part, scheme, source.global_scale)
    dtype = torch.float32 if call.out_scheme is not None else call.out_dtype
    (y,) = yield _Step("scaled_mm", convolution.product(call, span[0], part, scales, dtype))
    return y


def _rows_at_a_time(call: convolution.Conv) -> int:
    """As many rows as fit the limit, in whole blocks of scales; all rows if a block spans them."""
    rows = call.x.shape[0] * prod(convolution.out_sizes(call))
    tall = 1 if call.input_scheme is None else scaling.scheme(call.input_scheme).block_of(rows, 1)[0]
    if call.input_scheme is not None and convolution.spans_tensor(scaling.scheme(call.input_scheme)):
        tall = 1
    most = _PATCHES if call.x.device.type == "cpu" else _PATCHES_ON_GPUS
    return max(most // (convolution.columns(call) * tall), 1) * tall
