"""Registration of every ``OpSpec`` as the torch ops ``lowbit::NAME`` and ``NAME_out``, with fakes, on all devices.

On the CPU most calls run entirely in C++, which checks, allocates and computes (csrc/ops_entry.h). Other calls reach
the kernels here, which check, select an implementation, allocate and run it. C++ passes calls on to them as
``torch.ops.lowbit_table.NAME``, and also asks here for the parameters of formats and schemes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit import formats, scaling
from lowbit.backends import native, registry
from lowbit.backends.replay import Replay, watched
from lowbit.op_calls import OVERLOADS, failed
from lowbit.ops import OPS, OpSpec
from lowbit.ops.spec import Out

_DEVICES = ("cpu", "cuda")
_library = torch.library.Library("lowbit", "DEF")
_table = torch.library.Library("lowbit_table", "DEF")


def register_all() -> None:
    compiled = _entries()
    for spec in OPS.values():
        functional, out = spec.schemas
        _library.define(functional, tags=torch.Tag.needs_fixed_stride_order)
        _library.define(out)
        for name, kernel in ((spec.name, _new_kernel(spec)), (f"{spec.name}_out", _out_kernel(spec))):
            for device in _DEVICES:
                if device != "cpu" or name not in compiled:
                    _library.impl(name, kernel, device.upper())
            if name in compiled:
                _define_table(spec, name, kernel)
            OVERLOADS[name] = getattr(torch.ops.lowbit, name).default
        torch.library.register_fake(f"lowbit::{spec.name}", _fake(spec), lib=_library)
        torch.library.register_fake(f"lowbit::{spec.name}_out", _fake_out(spec), lib=_library)


def _entries() -> frozenset[str]:
    """The ops whose CPU kernel is in C++; none if the native library is not loaded."""
    unusable = native.loading_error()
    if not hasattr(torch.ops.lowbit_native, "entries"):
        return frozenset()
    registry.announce = torch.ops.lowbit_native.choose_elsewhere.default
    if unusable is not None:  # built from another table of formats: Python handles every call
        registry.announce(1)
    return frozenset(torch.ops.lowbit_native.entries())


# -- what C++ asks ----------------------------------------------------------------------------------------------------
def _params_of(name: str, find: Callable[[str], formats.Format | scaling.Scheme]) -> list[int]:
    """The integers of a format or scheme; empty for an unknown name, for which the op then raises."""
    try:
        return list(find(name).params())
    except ValueError:
        return []


for _name, _schema, _answer in (
    ("may_round_to_bf16", "() -> bool", lambda: registry.matmul_precision() == "medium"),
    ("format_params", "(str name) -> int[]", partial(_params_of, find=formats.find)),
    ("scheme_params", "(str name) -> int[]", partial(_params_of, find=scaling.scheme)),
):
    _table.define(_name + _schema)
    _table.impl(_name, _answer, "CompositeExplicitAutograd")


# -- calls that C++ passes on ------------------------------------------------------------------------------------------


def _define_table(spec: OpSpec, name: str, kernel: Callable[..., Any]) -> None:
    """Defines ``lowbit_table::NAME`` for C++. It returns the outputs, or for ``_out`` True.

    On failure it returns an empty list or False and stores the error, because an exception would lose its type in C++.
    """
    filled = name.endswith("_out")
    _table.define(f"{name}({spec.positional[filled]}) -> {'bool' if filled else 'Tensor[]'}")

    def answer(*args: Any) -> Any:
        try:
            if filled:
                cut = len(args) - len(spec.returns)
                kernel(*args[:cut], **dict(zip(spec.returns, args[cut:], strict=True)))
                return True
            outs = kernel(*args)
            return [outs] if isinstance(outs, Tensor) else list(outs)
        except BaseException as error:
            failed(error)
            torch.ops.lowbit_native.refuse(isinstance(error, (ValueError, TypeError)), str(error))
            return False if filled else []

    _table.impl(name, answer, "CompositeExplicitAutograd")


# -- kernels -----------------------------------------------------------------------------------------------------------
def _device_of(spec: OpSpec, call: Any) -> torch.device:
    device: torch.device = call[0].device
    for argument in call[1:]:
        if isinstance(argument, Tensor) and argument.device != device:
            names = ", ".join(
                f"{n} on {t.device}" for n, t in zip(call._fields, call, strict=True) if isinstance(t, Tensor)
            )
            raise ValueError(f"lowbit.{spec.name}: all tensors must be on one device, got {names}")
    return device


#: Capacity of the cache of calls.
_MOST = 4096


@dataclass
class _Prepared:
    """A checked call with its implementation. If cached, calls after the second use ``replay``."""

    impl: registry.Impl
    outs: list[Out]
    #: Whether no output has an element.
    empty: bool
    cached: bool = False
    runs: int = 0
    replay: Replay | None = None

    def run(self, outs: tuple[Tensor, ...], call: Any) -> None:
        if self.replay is not None:
            self.replay(outs, call)
            return
        self.runs += 1
        if self.runs != _WATCHED or not self.cached:
            self.impl.run(outs, call)
            return
        with watched(outs, call) as replays:
            self.impl.run(outs, call)
        self.replay = replays[0] if replays else None


#: The run that is recorded for replay. The first one differs, because it compiles kernels and builds tables.
_WATCHED = 2


def _prepare(spec: OpSpec, call: Any) -> _Prepared:
    """Checks the call and selects its implementation, or returns the cached result."""
    key = registry.call_key(spec.name, call)
    prepared: _Prepared | None = registry.prepared.get(key)
    if prepared is not None:
        return prepared
    device = _device_of(spec, call)
    spec.check(call)
    outs = spec.outputs(call)
    sizes = [torch.Size(shape).numel() for shape, _ in outs]
    impl = registry.select(spec.name, device.type, call, empty=call[0].numel() == 0 or sizes[0] == 0)
    prepared = _Prepared(impl, outs, not any(sizes))
    if key is not None and impl.name != "reference":  # the reference must warn in each call
        if len(registry.prepared) >= _MOST:
            registry.prepared.clear()
        prepared.cached = True
        registry.prepared[key] = prepared
    return prepared


def _empty(outs: list[Out], device: torch.device) -> tuple[Tensor, ...]:
    return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outs])


def _new_kernel(spec: OpSpec) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = spec.args(*args, **kwargs)
        prepared = _prepare(spec, call)
        outs = _empty(prepared.outs, call[0].device)
        if not prepared.empty:
            prepared.run(outs, call)
        return outs if len(outs) > 1 else outs[0]

    return kernel


def _out_kernel(spec: OpSpec) -> Callable[..., None]:
    def kernel(*args: Any, **kwargs: Any) -> None:
        outs = tuple([kwargs.pop(name) for name in spec.returns])
        call = spec.args(*args, **kwargs)
        prepared = _prepare(spec, call)
        _check_outs(spec, prepared.outs, call[0].device, outs)
        contiguous = tuple([out.contiguous() for out in outs])
        _check_overlap(spec, call, contiguous)
        if not prepared.empty:
            prepared.impl.run(contiguous, call)
        for out, filled in zip(outs, contiguous, strict=True):
            if out is not filled:
                out.copy_(filled)

    return kernel


def _fake(spec: OpSpec) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        _refuse_onnx(spec)
        call = spec.args(*args, **kwargs)
        device = _device_of(spec, call)
        spec.check(call)
        outs = _empty(spec.outputs(call), device)
        return outs if len(outs) > 1 else outs[0]

    return kernel


def _fake_out(spec: OpSpec) -> Callable[..., None]:
    def kernel(*args: Any, **kwargs: Any) -> None:
        _refuse_onnx(spec)
        outs = tuple([kwargs.pop(name) for name in spec.returns])
        call = spec.args(*args, **kwargs)
        device = _device_of(spec, call)
        spec.check(call)
        _check_outs(spec, spec.outputs(call), device, outs)

    return kernel


def _refuse_onnx(spec: OpSpec) -> None:
    """Raises if ``torch.onnx.export`` is tracing, which would fail later without naming a remedy."""
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        raise RuntimeError(no_onnx(spec.name))


def no_onnx(op: str) -> str:
    """The error for an op in ``torch.onnx.export``."""
    return (
        f"lowbit.{op}: expected a model of torch's own ops, since torch.onnx.export has no ONNX operator for this one, "
        f"got a model of lowbit layers; call lowbit.export(model, 'onnx', path, batch=batch). Or "
        f"export lowbit.dequantize_(model), whose layers are plain and hold the decoded weights (of a model in "
        f"training after lowbit.qat.convert_ or lowbit.train.convert_), or call "
        f"torch.export.export, which keeps the ops of lowbit"
    )


# -- outputs that are given --------------------------------------------------------------------------------------------
def _check_outs(spec: OpSpec, shapes: list[Out], device: torch.device, outs: tuple[Tensor, ...]) -> None:
    for name, out, (shape, dtype) in zip(spec.returns, outs, shapes, strict=True):
        if out.shape != shape or out.dtype != dtype or out.device != device:
            raise ValueError(
                f"lowbit.{spec.name}: {name} must be {dtype} {list(shape)} on {device}, "
                f"got {out.dtype} {list(out.shape)} on {out.device}"
            )


def _span(t: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last."""
    if t.is_contiguous():
        return t.nbytes
    return t.element_size() * (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)))


def _check_overlap(spec: OpSpec, call: Any, outs: tuple[Tensor, ...]) -> None:
    """Raises ValueError if an output shares memory with an input or another output."""
    arguments = zip(call._fields, call, strict=True)
    taken = [(name, t.data_ptr(), _span(t)) for name, t in arguments if isinstance(t, Tensor) and t.numel()]
    for name, out in zip(spec.returns, outs, strict=True):
        start, span = out.data_ptr(), out.nbytes
        for other, first, length in taken:
            if first < start + span and start < first + length and span and not _in_place(spec, call, name, out, other):
                raise ValueError(
                    f"lowbit.{spec.name}: {name} shares memory with {other}, which would be overwritten while it is "
                    f"read; give another tensor for {name}, or a copy of {other}"
                )
        taken.append((name, start, span))


def _in_place(spec: OpSpec, call: Any, name: str, out: Tensor, other: str) -> bool:
    """Whether an output is the argument that it may replace in place."""
    if spec.in_place.get(name) != other:
        return False
    argument: Tensor = getattr(call, other)
    return out.data_ptr() == argument.data_ptr() and out.stride() == argument.stride()
