"""Calls that start what an earlier one of their kind started, at other addresses.

Which kernels a call starts, with which tiles and numbers, depends on its kind alone (``registry.call_key``). Working
that out takes the host longer than most kernels take the device. So one call of a kind is watched. Each address that
its kernels are given lies in an argument, in an output, in a tensor that is allocated for it, or in one that is kept,
such as a table. Later calls replace these addresses and work out nothing. A call that computes with an op of torch is
not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Bound", "Replay", "does", "note", "on", "watched"]

#: What the allocator aligns tensors by, in bytes.
_ALIGNED = 512


class Bound(NamedTuple):
    """A kernel that is compiled, with all that it is started with but its grid; ``pointers``: places of tensors."""

    run: Callable[..., Any]
    arguments: list[Any]
    pointers: tuple[int, ...]


_noted: ContextVar[list[Bound] | None] = ContextVar("lowbit_noted", default=None)


def note(make: Callable[[], list[Bound]]) -> None:
    """Tells who watches what was started."""
    noted = _noted.get()
    if noted is not None:
        noted += make()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Within, a CUDA device is the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def does(func: Any) -> str | None:
    """What an op of torch does that a replay must know: it "allocates", makes "zeros" or "computes"; None of a view."""
    name = func._schema.name
    if name.startswith(("aten::empty", "aten::new_empty")):
        return "allocates"
    if name in ("aten::zeros", "aten::new_zeros"):
        return "zeros"
    return None if func.is_view or name == "aten::detach" else "computes"


class _Watch(TorchDispatchMode):
    """Keeps tensors that are allocated, and whether they are zeros, and sees whether anything is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[tuple[Tensor, bool]] = []
        self.computed: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, what = func(*args, **(kwargs or {})), does(func)
        if what == "computes":
            self.computed = func._schema.name
        elif what is not None:
            self.allocated.append((out, what == "zeros"))
        return out


class _Place(NamedTuple):
    """An address: so many bytes behind the first of a tensor. ``at``: the place among a kernel's arguments."""

    at: int
    tensor: int
    offset: int


class _Start(NamedTuple):
    run: Callable[..., Any]
    arguments: list[Any]
    places: tuple[_Place, ...]


class Replay(NamedTuple):
    """What a kind of call starts. ``tensors``: which arguments are tensors; their addresses come first, then those of
    outputs, of ``scratch`` bytes, and of ``zeros`` bytes that are 0.
    """

    tensors: tuple[int, ...]
    scratch: int
    zeros: int
    starts: tuple[_Start, ...]
    kept: tuple[Tensor, ...]

    def __call__(self, outs: tuple[Tensor, ...], call: Any) -> None:
        """Start it for another call of the kind, on the device of ``outs`` and its current stream."""
        device = outs[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._start(outs, call)
        else:
            self._start(outs, call)

    def _start(self, outs: tuple[Tensor, ...], call: Any) -> None:
        first = [call[index].data_ptr() for index in self.tensors]
        first += [out.data_ptr() for out in outs]
        device = outs[0].device
        scratch, zeros = _bytes(torch.empty, self.scratch, device), _bytes(torch.zeros, self.zeros, device)
        first += [0 if scratch is None else scratch.data_ptr(), 0 if zeros is None else zeros.data_ptr()]
        for run, arguments, places in self.starts:
            given = arguments.copy()
            for at, tensor, offset in places:
                given[at] = first[tensor] + offset
            run(*given)


@contextmanager
def watched(outs: tuple[Tensor, ...], call: Any) -> Iterator[list[Replay]]:
    """Within, ``call`` is run for ``outs``. Leaves its replay in the list, or nothing where there can be none."""
    started: list[Bound] = []
    token, found = _noted.set(started), list[Replay]()
    try:
        with _Watch() as watch:
            yield found
    finally:
        _noted.reset(token)
    if watch.computed is None and started:
        found += filter(None, [_replay(started, outs, call, watch.allocated)])


def _replay(
    started: list[Bound], outs: tuple[Tensor, ...], call: Any, allocated: list[tuple[Tensor, bool]]
) -> Replay | None:
    tensors = [index for index, value in enumerate(call) if isinstance(value, Tensor)]
    known = [*(call[index] for index in tensors), *outs]
    spans = [(t.data_ptr(), t.data_ptr() + _span(t), index, 0) for index, t in enumerate(known) if t.numel()]
    sizes = [0, 0]
    for tensor, zero in allocated:
        spans.append((tensor.data_ptr(), tensor.data_ptr() + _span(tensor), len(known) + zero, sizes[zero]))
        sizes[zero] += -(-_span(tensor) // _ALIGNED) * _ALIGNED
    spans = sorted(span for span in spans if span[0] < span[1])
    if any(after[0] < before[1] for before, after in pairwise(spans)):
        return None  # tensors that share memory: another call's may not
    starts, kept = [], []
    for run, arguments, pointers in started:
        places, fixed = [], list(arguments)
        for at in pointers:
            given: Tensor = arguments[at]
            address = fixed[at] = given.data_ptr()
            span = next((span for span in spans if span[0] <= address < span[1]), None)
            if span is not None:
                places.append(_Place(at, span[2], span[3] + address - span[0]))
            elif given.numel():
                kept.append(given)
        starts.append(_Start(run, fixed, tuple(places)))
    return Replay(tuple(tensors), sizes[0], sizes[1], tuple(starts), tuple(kept))


def _bytes(make: Callable[..., Tensor], size: int, device: torch.device) -> Tensor | None:
    return make(size, dtype=torch.uint8, device=device) if size else None


def _span(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to behind the last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
