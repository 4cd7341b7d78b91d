"""Makes every ``OpSpec`` a torch op: ``torch.ops.lowbit.NAME`` and ``NAME_out``, with fakes, on every device.

One kernel per (op, device) checks the arguments once, asks the registry, allocates the outputs and runs the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.backends import registry
from lowbit.ops import OPS, OpSpec

#: Fills the outputs of a checked call.
Runner = Callable[[OpSpec, Any, torch.device, tuple[Tensor, ...]], None]

_DEVICES = ("cpu", "cuda")
_library = torch.library.Library("lowbit", "DEF")


def register_all() -> None:
    for spec in OPS.values():
        functional, out = spec.schemas
        _library.define(functional, tags=torch.Tag.needs_fixed_stride_order)
        _library.define(out)
        for device in _DEVICES:
            _library.impl(spec.name, _functional(spec, _run), device.upper())
            _library.impl(f"{spec.name}_out", _out(spec, _run), device.upper())
        torch.library.register_fake(f"lowbit::{spec.name}", _functional(spec, _pretend), lib=_library)
        torch.library.register_fake(f"lowbit::{spec.name}_out", _out(spec, _pretend), lib=_library)


def _device_of(spec: OpSpec, call: Any) -> torch.device:
    device: torch.device = call[0].device
    for argument in call[1:]:
        if isinstance(argument, Tensor) and argument.device != device:
            names = ", ".join(
                f"{n} on {t.device}" for n, t in zip(call._fields, call, strict=True) if isinstance(t, Tensor)
            )
            raise ValueError(f"lowbit.{spec.name}: all tensors must be on one device, got {names}")
    return device


def _run(spec: OpSpec, call: Any, device: torch.device, outs: tuple[Tensor, ...]) -> None:
    impl = registry.select(spec.name, device.type, call, empty=call[0].numel() == 0 or outs[0].numel() == 0)
    if any(out.numel() for out in outs):
        impl.run(outs, call)


def _pretend(spec: OpSpec, call: Any, device: torch.device, outs: tuple[Tensor, ...]) -> None:
    """Fakes: checks and outputs are all there is."""


def _functional(spec: OpSpec, run: Runner) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = spec.args(*args, **kwargs)
        device = _device_of(spec, call)
        spec.check(call)
        outs = tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in spec.outputs(call)])
        run(spec, call, device, outs)
        return outs if len(outs) > 1 else outs[0]

    return kernel


def _out(spec: OpSpec, run: Runner) -> Callable[..., None]:
    def kernel(*args: Any, **kwargs: Any) -> None:
        outs = tuple([kwargs.pop(name) for name in spec.returns])
        call = spec.args(*args, **kwargs)
        device = _device_of(spec, call)
        spec.check(call)
        _check_outs(spec, call, device, outs)
        straight = tuple([out.contiguous() for out in outs])  # the very tensor where it is contiguous already
        if run is _run:
            _check_overlap(spec, call, straight)
        run(spec, call, device, straight)
        for out, filled in zip(outs, straight, strict=True):
            if out is not filled:
                out.copy_(filled)

    return kernel


def _check_overlap(spec: OpSpec, call: Any, outs: tuple[Tensor, ...]) -> None:
    """Raises where an output that is filled in place shares bytes with an input or another output."""
    filled: list[tuple[str, int, int]] = []
    for name, out in zip(spec.returns, outs, strict=True):
        start, end = _bytes_of(out)
        others = [(field, *_bytes_of(t)) for field, t in zip(call._fields, call, strict=True) if isinstance(t, Tensor)]
        for other, first, last in (*others, *filled):
            if first < end and start < last:
                raise ValueError(
                    f"lowbit.{spec.name}: {name} shares memory with {other}, which would be overwritten while it is "
                    f"read; give another tensor for {name}, or a copy of {other}"
                )
        filled.append((name, start, end))


def _bytes_of(t: Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin and end in memory; nothing for an empty one."""
    if t.numel() == 0:
        return 0, 0
    start = t.data_ptr()
    last = sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)])
    return start, start + (last + 1) * t.element_size()


def _check_outs(spec: OpSpec, call: Any, device: torch.device, outs: tuple[Tensor, ...]) -> None:
    for name, out, (shape, dtype) in zip(spec.returns, outs, spec.outputs(call), strict=True):
        if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != device:
            raise ValueError(
                f"lowbit.{spec.name}: {name} must be {dtype} {list(shape)} on {device}, "
                f"got {out.dtype} {list(out.shape)} on {out.device}"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"lowbit.{spec.name}: {name} requires grad, and autograd would miss that it is overwritten; "
                "give a detached tensor, or work under torch.no_grad()"
            )
