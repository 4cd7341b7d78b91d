"""Makes every ``OpSpec`` a torch op: ``torch.ops.lowbit.NAME`` and ``NAME_out``, with fakes, on every device.

One kernel per (op, device) checks the arguments, asks the registry, allocates the outputs and runs the choice. All but
the last two follow from shapes, dtypes, strides, devices and words, so they are worked out once for each (``Plan``).
``call`` goes straight to that kernel where nothing watches the call; torch's dispatcher costs more than a small op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lowbit.backends import registry
from lowbit.backends.registry import Held, Moves, Run, forced, told_precision
from lowbit.ops import OPS, OpSpec
from lowbit.ops.spec import Out

_DEVICES = ("cpu", "cuda")
_library = torch.library.Library("lowbit", "DEF")


def register_all() -> None:
    for spec in OPS.values():
        functional, out = spec.schemas
        _library.define(functional, tags=torch.Tag.needs_fixed_stride_order)
        _library.define(out)
        for device in _DEVICES:
            _library.impl(spec.name, _functional(spec), device.upper())
            _library.impl(f"{spec.name}_out", _out(spec), device.upper())
        torch.library.register_fake(f"lowbit::{spec.name}", _fake(spec), lib=_library)
        torch.library.register_fake(f"lowbit::{spec.name}_out", _fake_out(spec), lib=_library)


# -- plans -------------------------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    """What follows from a call's metadata: where it runs, what it returns, the kernel (None: nothing to compute), which
    arguments are tensors, with how many bytes from the first to the last element of each, and the kernel that keeps
    arguments, where there is one."""

    device: torch.device
    outs: list[Out]
    kernel: Run | None
    spans: list[tuple[int, int]]
    hold: Callable[[Any, Moves], Held | None] | None


#: Plans by op, circumstances and metadata. Forgotten all at once, lest shapes that never come back pile up.
_plans: dict[tuple[Any, ...], Plan] = {}
_MOST_PLANS = 8192

#: The first of the arguments that say which random bits are drawn: they come last, and no plan depends on them.
_RANDOM = "seed"

#: How many of an op's arguments its plan depends on.
_decisive: dict[str, int] = {
    name: spec.args._fields.index(_RANDOM) if _RANDOM in spec.args._fields else len(spec.args._fields)
    for name, spec in OPS.items()
}


def _plan_of(spec: OpSpec, call: Any) -> Plan:
    key: list[Any] = [spec.name, registry.circumstances()]
    for value in call[: _decisive[spec.name]]:
        key.append(_metadata(value) if isinstance(value, Tensor) else value)
    plan = None if registry.asking() else _plans.get(tuple(key))
    return _add_plan(spec, call, tuple(key)) if plan is None else plan


def _metadata(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.stride(), t.device


def _add_plan(spec: OpSpec, call: Any, key: tuple[Any, ...]) -> Plan:
    plan = _make_plan(spec, call)
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _make_plan(spec: OpSpec, call: Any) -> Plan:
    device = _device_of(spec, call)
    spec.check(call)
    outs = spec.outputs(call)
    sizes = [torch.Size(shape).numel() for shape, _ in outs]
    impl = registry.select(spec.name, device.type, call, empty=call[0].numel() == 0 or sizes[0] == 0)
    spans = [
        (index, _span(value)) for index, value in enumerate(call[: _decisive[spec.name]]) if isinstance(value, Tensor)
    ]
    return Plan(device, outs, impl.bind(call) if any(sizes) else None, spans, impl.hold)


def _span(t: Tensor) -> int:
    """How many bytes lie between where the first element of a tensor begins and where the last ends."""
    if t.numel() == 0:
        return 0
    return t.element_size() * (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)))


def _device_of(spec: OpSpec, call: Any) -> torch.device:
    device: torch.device = call[0].device
    for argument in call[1:]:
        if isinstance(argument, Tensor) and argument.device != device:
            names = ", ".join(
                f"{n} on {t.device}" for n, t in zip(call._fields, call, strict=True) if isinstance(t, Tensor)
            )
            raise ValueError(f"lowbit.{spec.name}: all tensors must be on one device, got {names}")
    return device


# -- a call without torch's dispatcher ---------------------------------------------------------------------------------
#: What stands between a call and its kernel: modes, the transforms of torch.func, tracers and profilers.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_traced = torch._C._is_tracing
_profiled = torch._C._autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled


def watched() -> bool:
    """Whether a compiler, a mode, a transform, forward-mode derivatives or a tracer see every op, so that none may be
    passed by."""
    return bool(
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or _traced()
    )


def call(name: str, *args: Any, outs: tuple[Tensor, ...] | None = None) -> Any:
    """``torch.ops.lowbit.NAME(*args)``; straight to its kernel where no autograd, mode or transform watches it.

    ``outs``: tensors to fill, as ``NAME_out`` does.
    """
    if watched() or _profiled() or (outs is not None and not all(map(_plain, outs))):
        return _dispatched(name, args, outs)
    grad = _grad_enabled()
    key: list[Any] = [name, registry.circumstances()]
    for value in args[: _decisive[name]]:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:  # subclasses have their own ideas of an op
            if value.dtype is not torch.uint8 and (value.is_neg() or (grad and value.requires_grad)):
                return _dispatched(name, args, outs)
            key.append(_metadata(value))
        elif isinstance(value, Tensor):
            return _dispatched(name, args, outs)
        else:
            key.append(value)
    spec = OPS[name]
    call = spec.args(*args)
    plan = None if registry.asking() else _plans.get(tuple(key))
    if plan is None:
        if args[0].device.type not in _DEVICES:
            return _dispatched(name, args, outs)
        plan = _add_plan(spec, call, tuple(key))
    return _run(plan, call) if outs is None else _fill(spec, plan, call, outs)


def _plain(t: Tensor) -> bool:
    """Whether a tensor's memory holds its values, and no subclass has its own ideas of an op."""
    return type(t) in (Tensor, nn.Parameter) and not t.is_neg()


def _dispatched(name: str, args: tuple[Any, ...], outs: tuple[Tensor, ...] | None) -> Any:
    if outs is None:
        return getattr(torch.ops.lowbit, name)(*args)
    return getattr(torch.ops.lowbit, f"{name}_out")(*args, **dict(zip(OPS[name].returns, outs, strict=True)))


class Bound:
    """``call(name, x, *rest)`` for an ``x`` that changes and a ``rest`` that stays; its part is settled.

    ``moves``: pairs of a tensor that may be given other memory, and a view of it among ``rest``. Not for code that is
    being compiled.
    """

    #: Kinds of ``x`` that one keeps; forgotten all at once.
    _MOST = 64

    def __init__(self, name: str, *rest: Any, moves: Moves = ()) -> None:
        self._spec, self._rest, self._moves = OPS[name], rest, moves
        self._tensors = tuple(value for value in rest if isinstance(value, Tensor))
        self._found: dict[tuple[Any, ...], tuple[Plan, Held | None]] = {}
        self._under = _plans  # whose metadata these were found under; tests set others
        self._last: tuple[str | None, str, Held] | None = None  # the circumstances, and the kernel for another such x

    def again(self, x: Tensor) -> Any:
        """What a call like the last one answers, by a kernel that keeps ``rest``; None where this one is not like it,
        a tensor has moved, or something watches the call."""
        # In one function, without calls that are not needed: between other work each costs half a microsecond. Of what
        # watched() asks, the native op itself answers None under dispatch modes, transforms and tracers.
        last = self._last
        if (
            last is None
            or type(x) is not Tensor
            or _grad_enabled()
            or forward_ad._current_level >= 0
            or _function_modes()
            or _profiled()
            or last[0] != forced()
            or self._under is not _plans
        ):
            return None
        try:
            precision = told_precision()
        except RuntimeError:
            return None
        return last[2](x) if precision == last[1] else None

    def __call__(self, x: Tensor) -> Any:
        y = self.again(x)
        return self._anew(x) if y is None else y

    def _anew(self, x: Tensor) -> Any:
        plain = type(x) is Tensor and not x.is_neg() and all(map(_plain, self._tensors))
        if not plain or watched() or _profiled() or self._differentiated(x) or x.device.type not in _DEVICES:
            return call(self._spec.name, x, *self._rest)
        circumstances = registry.circumstances()
        key: tuple[Any, ...] = (circumstances, *map(_metadata, (x, *self._tensors)))
        found = self._found.get(key)
        if found is None or self._under is not _plans:
            found = self._find(x, key)
        plan, held = found
        if held is not None:
            self._last = (*circumstances, held)
            y = held(x)
            if y is not None:
                return y
        return _run(plan, self._spec.args(x, *self._rest))

    def _differentiated(self, x: Tensor) -> bool:
        return _grad_enabled() and (x.requires_grad or any(t.requires_grad for t in self._tensors))

    def _find(self, x: Tensor, key: tuple[Any, ...]) -> tuple[Plan, Held | None]:
        call = self._spec.args(x, *self._rest)
        plan = _plan_of(self._spec, call)
        if self._under is not _plans or len(self._found) >= self._MOST:
            self._found, self._under = {}, _plans
        found = self._found[key] = (
            plan,
            None if plan.hold is None or plan.kernel is None else plan.hold(call, self._moves),
        )
        return found


def _run(plan: Plan, call: Any) -> Any:
    device, shapes, run, _, _ = plan
    if len(shapes) == 1:
        shape, dtype = shapes[0]
        out = torch.empty(shape, dtype=dtype, device=device)
        if run is not None:
            run((out,), call)
        return out
    outs = tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes])
    if run is not None:
        run(outs, call)
    return outs


# -- kernels -----------------------------------------------------------------------------------------------------------
def _functional(spec: OpSpec) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = spec.args(*args, **kwargs)
        return _run(_plan_of(spec, call), call)

    return kernel


def _fake(spec: OpSpec) -> Callable[..., Any]:
    """Checks and outputs are all there is."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = spec.args(*args, **kwargs)
        device = _device_of(spec, call)
        spec.check(call)
        outs = tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in spec.outputs(call)])
        return outs if len(outs) > 1 else outs[0]

    return kernel


def _out(spec: OpSpec) -> Callable[..., None]:
    def kernel(*args: Any, **kwargs: Any) -> None:
        outs = tuple([kwargs.pop(name) for name in spec.returns])
        call = spec.args(*args, **kwargs)
        _fill(spec, _plan_of(spec, call), call, outs)

    return kernel


def _fill(spec: OpSpec, plan: Plan, call: Any, outs: tuple[Tensor, ...]) -> None:
    device, shapes, run, spans, _ = plan
    _check_outs(spec, shapes, device, outs)
    straight = tuple([out.contiguous() for out in outs])  # the very tensor where it is contiguous already
    _check_overlap(spec, call, spans, straight)
    if run is not None:
        run(straight, call)
    torch.autograd.graph.increment_version(outs)  # backward must not take them for what it saved
    for out, filled in zip(outs, straight, strict=True):
        if out is not filled:
            out.copy_(filled)


def _fake_out(spec: OpSpec) -> Callable[..., None]:
    def kernel(*args: Any, **kwargs: Any) -> None:
        outs = tuple([kwargs.pop(name) for name in spec.returns])
        call = spec.args(*args, **kwargs)
        device = _device_of(spec, call)
        spec.check(call)
        _check_outs(spec, spec.outputs(call), device, outs)

    return kernel


def _check_overlap(spec: OpSpec, call: Any, spans: list[tuple[int, int]], outs: tuple[Tensor, ...]) -> None:
    """Raises where an output that is filled in place shares bytes with an input or another output."""
    taken = [(call._fields[index], call[index].data_ptr(), span) for index, span in spans if span]
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
    """Whether an output is the argument that it may stand in place of."""
    if spec.in_place.get(name) != other:
        return False
    given: Tensor = getattr(call, other)
    return out.data_ptr() == given.data_ptr() and out.stride() == given.stride()


def _check_outs(spec: OpSpec, shapes: list[Out], device: torch.device, outs: tuple[Tensor, ...]) -> None:
    for name, out, (shape, dtype) in zip(spec.returns, outs, shapes, strict=True):
        if out.shape != shape or out.dtype != dtype or out.device != device:
            raise ValueError(
                f"lowbit.{spec.name}: {name} must be {dtype} {list(shape)} on {device}, "
                f"got {out.dtype} {list(out.shape)} on {out.device}"
            )
        if out.requires_grad and _grad_enabled():
            raise RuntimeError(
                f"lowbit.{spec.name}: {name} requires grad, and autograd would miss that it is overwritten; "
                "give a detached tensor, or work under torch.no_grad()"
            )
