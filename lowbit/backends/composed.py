"""Ops that a backend has no kernel of its own for, made of its other kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.backends.registry import Impl
from lowbit.ops import OPS
from lowbit.ops import packed as packing
from lowbit.ops import quantize as q
from lowbit.ops.linear import Linear, Scales, given_scales, product
from lowbit.ops.spec import as_rows

__all__ = ["linear", "packed"]


def linear(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``linear`` on every device where ``rows`` of one backend quantize and multiply."""
    made = []
    for mm in rows:
        if mm.op == "scaled_mm":
            parts = {row.op: row for row in rows if row.devices == mm.devices}
            run, supports = partial(_run, parts), partial(_supports, parts)
            made.append(Impl("linear", mm.name, mm.devices, mm.priority, run, supports, mm.numerics))
    return tuple(made)


def _run(parts: dict[str, Impl], outs: tuple[Tensor, ...], call: Linear) -> None:
    x = as_rows(call.x)
    left = product(call, x) if call.input is None else product(call, *_codes(parts, x, call))
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
    assert call.input is not None
    given = given_scales(call)
    if given is None:
        return _quantize(parts, x, scaling.scheme(call.input))
    assert given.scale is not None
    static = q.QuantizeStatic(x, call.input, given.scale, given.zero_point, given.global_scale)
    (codes,) = outs = _empty("quantize_static", static, x.device)
    parts["quantize_static"].run(outs, static)
    return codes, given


def _quantize(parts: dict[str, Impl], x: Tensor, scheme: scaling.Scheme) -> tuple[Tensor, Scales]:
    outer = None
    if scheme.outer:
        asked = q.OuterScale(x, scheme.name)
        (outer,) = _empty("global_scale", asked, x.device)
        parts["global_scale"].run((outer,), asked)
    call = q.Quantize(x, scheme.name, outer)
    codes, scale, zero = outs = _empty("quantize", call, x.device)
    parts["quantize"].run(outs, call)
    return codes, Scales(scale, zero if scheme.affine else None, outer)


def _empty(op: str, call: object, device: torch.device | str) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in OPS[op].outputs(call))


def _supports(parts: dict[str, Impl], call: Linear) -> str | None:
    """Asks the kernels in turn, of codes that are not made yet."""
    x = as_rows(call.x)
    if call.input is None:
        return parts["scaled_mm"].supports(product(call, x))
    reason = _no_codes(parts, call)
    if reason is not None:
        return reason
    scheme = scaling.scheme(call.input)
    outer = x.new_empty(scheme.outer_shape(x.shape[0]), dtype=torch.float32) if scheme.outer else None
    asked = q.Quantize(x, scheme.name, outer)
    codes, scale, zero = _empty("quantize", asked, "meta")
    scales = Scales(scale, zero if scheme.affine else None, outer)
    return parts["quantize"].supports(asked) or parts["scaled_mm"].supports(product(call, codes, scales))


def _no_codes(parts: dict[str, Impl], call: Linear) -> str | None:
    """Why the given scales of input or output cannot be used."""
    x = as_rows(call.x)
    asked = []
    if call.input is not None and call.input_scale is not None:
        asked.append(q.QuantizeStatic(x, call.input, call.input_scale, call.input_zero_point, call.input_global_scale))
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
