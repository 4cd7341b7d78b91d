"""Ops that a backend has no kernel of its own for, made of its other kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.registry import Impl
from lowbit.ops import OPS, rotation
from lowbit.ops import both as twice
from lowbit.ops import conv as convolution
from lowbit.ops import grouped as grouping
from lowbit.ops import packed as packing
from lowbit.ops import quantize as q
from lowbit.ops.linear import Linear, given_scales, product
from lowbit.ops.spec import as_rows
from lowbit.tensor import packing as tensors
from lowbit.tensor.quantized import Scales, zero_dtype

__all__ = ["conv", "every", "grouped", "linear", "packed", "quantize_both", "quantize_global"]

#: Elements of the patches that ``conv`` lays out at a time; more on GPUs, which wait for the start of kernels.
_PATCHES, _PATCHES_ON_GPUS = 1 << 21, 1 << 24


def every(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``rows`` of one backend, and all that is made of them."""
    makers = (linear, conv, grouped, quantize_global, quantize_both)
    return (*rows, *(made for make in makers for made in make(rows)))


def _parts(rows: tuple[Impl, ...], row: Impl) -> dict[str, Impl]:
    """Kernels of ``rows`` for the devices of ``row``, by op."""
    return {one.op: one for one in rows if one.devices == row.devices}


def linear(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``linear`` on every device where ``rows`` of one backend quantize and multiply."""
    made = []
    for mm in rows:
        if mm.op == "scaled_mm":
            parts = _parts(rows, mm)
            made.append(replace(mm, op="linear", run=partial(_run, parts), supports=partial(_supports, parts)))
    return tuple(made)


def _run(parts: dict[str, Impl], outs: tuple[Tensor, ...], call: Linear) -> None:
    x = as_rows(call.x)
    left = product(call, x) if call.input_scheme is None else product(call, *_codes(parts, x, call))
    if call.out_scheme is None:
        parts["scaled_mm"].run((as_rows(outs[0]),), left)
        return
    y = torch.empty((x.shape[0], call.weight.shape[0]), device=x.device)
    parts["scaled_mm"].run((y,), left)
    assert call.out_scale is not None
    static = q.QuantizeStatic(y, call.out_scheme, call.out_scale, call.out_zero_point)
    parts["quantize_static"].run((as_rows(outs[0]),), static)


def _codes(parts: dict[str, Impl], x: Tensor, call: Linear) -> tuple[Tensor, Scales]:
    """The codes of ``x`` with their scales."""
    assert call.input_scheme is not None
    given = given_scales(call)
    if given is None:
        return _quantize(parts, x, scaling.scheme(call.input_scheme))
    if x.dtype == torch.uint8:
        return x, given
    static = q.QuantizeStatic(x, call.input_scheme, *given)
    (codes,) = outs = _empty("quantize_static", static, x.device)
    parts["quantize_static"].run(outs, static)
    return codes, given


def _quantize(
    parts: dict[str, Impl], x: Tensor, scheme: scaling.Scheme, global_scale: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """The same by scales made of ``x``, under the global scale ``global_scale`` if it is given."""
    if scheme.global_scale and global_scale is None:
        at_once = q.QuantizeGlobal(x, scheme.name)
        if "quantize_global" in parts and parts["quantize_global"].supports(at_once) is None:
            codes, scale, global_scale = made = _empty("quantize_global", at_once, x.device)
            parts["quantize_global"].run(made, at_once)
            return codes, Scales(scale, None, global_scale)
        asked = q.GlobalScale(x, scheme.name)
        (global_scale,) = _empty("global_scale", asked, x.device)
        parts["global_scale"].run((global_scale,), asked)
    call = q.Quantize(x, scheme.name, global_scale)
    codes, scale, zero = outs = _empty("quantize", call, x.device)
    parts["quantize"].run(outs, call)
    return codes, Scales(scale, zero if scheme.affine else None, global_scale)


def _empty(op: str, call: object, device: torch.device | str) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in OPS[op].outputs(call))


def _supports(parts: dict[str, Impl], call: Linear) -> str | None:
    """Asks the kernels in turn, of codes that are not made yet."""
    x = as_rows(call.x)
    if call.input_scheme is None:
        return parts["scaled_mm"].supports(product(call, x))
    if x.dtype == torch.uint8:
        reason = _no_codes(parts, call)
        return reason or parts["scaled_mm"].supports(product(call, x, given_scales(call)))
    reason = _no_codes(parts, call)
    if reason is not None:
        return reason
    scheme = scaling.scheme(call.input_scheme)
    global_scale = (
        x.new_empty(scheme.global_scale_shape(x.shape[0]), dtype=torch.float32) if scheme.global_scale else None
    )
    asked = q.Quantize(x, scheme.name, global_scale)
    codes, scale, zero = _empty("quantize", asked, "meta")
    scales = Scales(scale, zero if scheme.affine else None, global_scale)
    return parts["quantize"].supports(asked) or parts["scaled_mm"].supports(product(call, codes, scales))


def _no_codes(parts: dict[str, Impl], call: Linear) -> str | None:
    """Why the given scales of input or output cannot be used."""
    x = as_rows(call.x)
    asked = []
    if call.input_scheme is not None and call.input_scale is not None and x.dtype != torch.uint8:
        asked.append(
            q.QuantizeStatic(x, call.input_scheme, call.input_scale, call.input_zero_point, call.input_global_scale)
        )
    if call.out_scheme is not None and call.out_scale is not None:
        y = torch.empty((x.shape[0], call.weight.shape[0]), device="meta")
        asked.append(q.QuantizeStatic(y, call.out_scheme, call.out_scale, call.out_zero_point))
    return next((reason for one in asked if (reason := parts["quantize_static"].supports(one)) is not None), None)


def packed(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``rows`` of one backend, and ``linear_packed`` by its ``linear`` on weights that are unpacked at each call."""
    made = [
        replace(row, op="linear_packed", run=partial(_run_packed, row), supports=lambda call: None)
        for row in rows
        if row.op == "linear"
    ]
    return (*rows, *made)


def _run_packed(linear: Impl, outs: tuple[Tensor, ...], call: packing.LinearPacked) -> None:
    linear.run(outs, packing.plain(call))


# -- quantize_global ---------------------------------------------------------------------------------------------------
def quantize_global(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``quantize_global`` wherever ``rows`` of one backend quantize: the global scale first."""
    return _of_codecs(rows, "quantize_global", _run_global, _supports_global)


def _of_codecs(
    rows: tuple[Impl, ...], op: str, run: Callable[..., None], supports: Callable[..., str | None]
) -> tuple[Impl, ...]:
    """``op`` wherever ``rows`` of one backend quantize, by functions that are given the backend's kernels first."""
    found = [(row, _parts(rows, row)) for row in rows if row.op == "quantize"]
    return tuple(replace(row, op=op, run=partial(run, p), supports=partial(supports, p)) for row, p in found)


def _supports_global(parts: dict[str, Impl], call: q.QuantizeGlobal) -> str | None:
    return parts["quantize"].supports(q.Quantize(call.x, call.scheme))


def _run_global(parts: dict[str, Impl], outs: tuple[Tensor, ...], call: q.QuantizeGlobal) -> None:
    codes, scale, above = outs
    parts["global_scale"].run((above,), q.GlobalScale(*call))
    zero = torch.empty(0, dtype=zero_dtype(scaling.scheme(call.scheme)), device=call.x.device)
    parts["quantize"].run((codes, scale, zero), q.Quantize(call.x, call.scheme, above))


# -- quantize_both -----------------------------------------------------------------------------------------------------
def quantize_both(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``quantize_both`` wherever ``rows`` of one backend quantize: one after the other."""
    return _of_codecs(rows, "quantize_both", _run_both, _supports_both)


def _transform(call: twice.QuantizeBoth) -> rotation.Hadamard:
    return rotation.Hadamard(call.x, call.block, 0, True)


def _supports_both(parts: dict[str, Impl], call: twice.QuantizeBoth) -> str | None:
    reasons = [parts["quantize"].supports(half) for half in twice.halves(call)]
    if call.block > 1:
        missing = "it has no kernel of the Hadamard transform"
        reasons.append(parts["hadamard"].supports(_transform(call)) if "hadamard" in parts else missing)
    return next((reason for reason in reasons if reason is not None), None)


def _run_both(parts: dict[str, Impl], outs: tuple[Tensor, ...], call: twice.QuantizeBoth) -> None:
    x = call.x
    for number, half in enumerate(twice.halves(call)):
        codes, scale, above = outs[3 * number : 3 * number + 3]
        if number == 1 and call.block > 1:
            (turned,) = _empty("hadamard", _transform(call), x.device)
            parts["hadamard"].run((turned,), _transform(call))
            x = turned
        scheme = scaling.scheme(half.scheme)
        if scheme.global_scale:
            parts["global_scale"].run((above,), q.GlobalScale(x, half.scheme))
        asked = half._replace(x=x, global_scale=above if scheme.global_scale else None)
        zero = torch.empty(0, dtype=zero_dtype(scheme), device=x.device)
        parts["quantize"].run((codes, scale, zero), asked)


# -- scaled_grouped_mm -------------------------------------------------------------------------------------------------
def grouped(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``scaled_grouped_mm`` wherever ``rows`` multiply: one product after the other, of rows that the host counts."""
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
    """``conv`` wherever ``rows`` of one backend quantize and multiply; some patches are laid out at a time."""
    made = []
    for mm in rows:
        if mm.op == "scaled_mm":
            parts = _parts(rows, mm)
            made.append(
                replace(
                    mm, op="conv", run=partial(_run_conv, parts), supports=partial(_supports_conv, parts),
                    fewest_rows=1,
                )
            )  # fmt: skip
    return tuple(made)


def _run_conv(parts: dict[str, Impl], outs: tuple[Tensor, ...], call: convolution.Conv) -> None:
    if call.out_scheme is None:
        return _multiply_patches(parts, outs[0].view(-1, outs[0].shape[-1]), call)
    assert call.out_scale is not None
    y = torch.empty((outs[0].shape[:-1].numel(), call.weight.shape[0]), device=call.x.device)
    _multiply_patches(parts, y, call)
    static = q.QuantizeStatic(y, call.out_scheme, call.out_scale, call.out_zero_point)
    parts["quantize_static"].run((as_rows(outs[0]),), static)


def _multiply_patches(parts: dict[str, Impl], out: Tensor, call: convolution.Conv) -> None:
    source, scales, above = _source(parts, call)
    step, cols = _rows_at_a_time(call), call.weight.shape[0] // call.groups
    for begin in range(0, out.shape[0], step):
        end = min(begin + step, out.shape[0])
        for group in range(call.groups):
            a, of_a = _some(parts, call, source, scales, above, (group, begin, end))
            y = torch.empty((end - begin, cols), dtype=out.dtype, device=out.device)
            parts["scaled_mm"].run((y,), convolution.product(call, group, a, of_a, out.dtype))
            out[begin:end, group * cols : (group + 1) * cols] = y


def _source(parts: dict[str, Impl], call: convolution.Conv) -> tuple[Tensor, Scales | None, Tensor | None]:
    """The source of patches: floats, or codes of a byte each with their scales if one scale spans it; and the global
    scale that spans it, if patches get scales below it.
    """
    given = given_scales(call)
    if given is not None and call.x.dtype == torch.uint8:
        return convolution.coded_pixels(call, given), given, None
    source = convolution.pixels(call.x)
    if call.input_scheme is None:
        return source, None, None
    scheme = scaling.scheme(call.input_scheme)
    if not convolution.spans_tensor(scheme):
        if scheme.global_scale != "tensor":
            return source, None, None
        asked = q.GlobalScale(source, scheme.name)
        (global_scale,) = _empty("global_scale", asked, source.device)
        parts["global_scale"].run((global_scale,), asked)
        return source, None, global_scale
    if given is None:
        codes, scales = _quantize(parts, source, scheme)
    else:
        static = q.QuantizeStatic(source, scheme.name, *given)
        (codes,), scales = _empty("quantize_static", static, source.device), given
        parts["quantize_static"].run((codes,), static)
    return tensors.unpack(codes, scheme.format.bits, source.shape[1]), scales, None


def _some(
    parts: dict[str, Impl],
    call: convolution.Conv,
    source: Tensor,
    scales: Scales | None,
    above: Tensor | None,
    where: tuple[int, int, int],
) -> tuple[Tensor, Scales | None]:
    """Patches of a group from one row to another, as floats or as stored codes, with their scales."""
    part = convolution.patches(source, call, *where)
    if call.input_scheme is None:
        return part, scales
    scheme = scaling.scheme(call.input_scheme)
    if convolution.spans_tensor(scheme):
        return tensors.pack(part, scheme.format.bits), scales
    return _quantize(parts, part, scheme, above)


def _rows_at_a_time(call: convolution.Conv) -> int:
    """As many as fit, whole blocks of scales; all where blocks span them."""
    rows = call.x.shape[0] * prod(convolution.out_sizes(call))
    tall = 1 if call.input_scheme is None else scaling.scheme(call.input_scheme).block_of(rows, 1)[0]
    if call.input_scheme is not None and convolution.spans_tensor(scaling.scheme(call.input_scheme)):
        tall = 1
    most = _PATCHES if call.x.device.type == "cpu" else _PATCHES_ON_GPUS
    return max(most // (convolution.columns(call) * tall), 1) * tall


def _supports_conv(parts: dict[str, Impl], call: convolution.Conv) -> str | None:
    """Asks the kernels in turn, of patches that are not made yet."""
    rows, cols = min(_rows_at_a_time(call), call.x.shape[0] * prod(convolution.out_sizes(call))), call.weight.shape[0]
    dtype = torch.float32 if call.x.dtype == torch.uint8 else call.x.dtype
    x = torch.empty((rows, convolution.columns(call)), dtype=dtype, device="meta")
    asked: list[tuple[str, object]] = []
    data, scales = x, None
    if call.input_scheme is not None:
        scheme = scaling.scheme(call.input_scheme)
        global_scale = torch.empty(scheme.global_scale_shape(rows), device="meta") if scheme.global_scale else None
        made = q.Quantize(x, scheme.name, global_scale)
        data, scale, zero = _empty("quantize", made, "meta")
        scales = Scales(scale, zero if scheme.affine else None, global_scale)
        asked.append(("quantize", made))
        if call.input_scale is not None:
            given = (call.input_scale, call.input_zero_point, call.input_global_scale)
            asked.append(("quantize_static", q.QuantizeStatic(x, scheme.name, *given)))
    if call.out_scheme is not None and call.out_scale is not None:
        y = torch.empty((call.x.shape[0] * prod(convolution.out_sizes(call)), cols), device="meta")
        asked.append(("quantize_static", q.QuantizeStatic(y, call.out_scheme, call.out_scale, call.out_zero_point)))
    asked.append(("scaled_mm", convolution.product(call, 0, data, scales, call.out_dtype)))
    return next((reason for op, one in asked if (reason := parts[op].supports(one)) is not None), None)
