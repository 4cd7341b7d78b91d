"""Records the kernel launches of a call and replays them for similar calls with other addresses.

The launches of a call (kernels, tiles, constants) depend only on its key (``registry.call_key``). Computing them takes
the host longer than most kernels run. So one call per key is recorded. Each pointer argument of its kernels is inside
an argument, an output, a tensor allocated by the call, or a permanent tensor such as a table. Later calls only replace
these addresses. A call that computes with a torch op is not replayed.
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

#: Alignment of the CUDA allocator, in bytes.
_ALIGNED = 512


class Bound(NamedTuple):
    """A compiled kernel bound to its launch arguments. ``pointers``: indices of the tensors among them."""

    run: Callable[..., Any]
    arguments: list[Any]
    pointers: tuple[int, ...]


_recording: ContextVar[list[Bound] | None] = ContextVar("lowbit_recording", default=None)


def note(make: Callable[[], list[Bound]]) -> None:
    """Add launches to the recording, if one is active."""
    recording = _recording.get()
    if recording is not None:
        recording += make()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a CUDA device is the current device."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def does(func: Any) -> str | None:
    """Whether a torch op "allocates", makes "zeros" or "computes"; None for a view."""
    name = func._schema.name
    if name.startswith(("aten::empty", "aten::new_empty")):
        return "allocates"
    if name in ("aten::zeros", "aten::new_zeros"):
        return "zeros"
    return None if func.is_view or name == "aten::detach" else "computes"


class _Recorder(TorchDispatchMode):
    """Records the tensors that are allocated, whether they are zeros, and whether an op computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[tuple[Tensor, bool]] = []
        self.computed: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, effect = func(*args, **(kwargs or {})), does(func)
        if effect == "computes":
            self.computed = func._schema.name
        elif effect is not None:
            self.allocated.append((out, effect == "zeros"))
        return out


class _Place(NamedTuple):
    """A pointer argument: its index ``at`` among a kernel's arguments, and a byte offset into a tensor."""

    at: int
    tensor: int
    offset: int


class _Start(NamedTuple):
    run: Callable[..., Any]
    arguments: list[Any]
    places: tuple[_Place, ...]


class Replay(NamedTuple):
    """The launches of calls with one key.

    Attributes:
        tensors: Indices of the arguments that are tensors.
        scratch: Bytes of uninitialized memory that a call allocates.
        zeros: Bytes of zeroed memory that a call allocates.
        starts: The launches. ``_Place.tensor`` counts arguments, then outputs, then scratch, then zeros.
        permanent: Tensors that later calls use too, such as tables.
    """

    tensors: tuple[int, ...]
    scratch: int
    zeros: int
    starts: tuple[_Start, ...]
    permanent: tuple[Tensor, ...]

    def __call__(self, outs: tuple[Tensor, ...], call: Any) -> None:
        """Launch the kernels for another call with the key, on the device of ``outs`` and its current stream."""
        device = outs[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._start(outs, call)
        else:
            self._start(outs, call)

    def _start(self, outs: tuple[Tensor, ...], call: Any) -> None:
        addresses = [call[index].data_ptr() for index in self.tensors]
        addresses += [out.data_ptr() for out in outs]
        device = outs[0].device
        scratch, zeros = _bytes(torch.empty, self.scratch, device), _bytes(torch.zeros, self.zeros, device)
        addresses += [0 if scratch is None else scratch.data_ptr(), 0 if zeros is None else zeros.data_ptr()]
        for run, arguments, places in self.starts:
            bound = arguments.copy()
            for at, tensor, offset in places:
                bound[at] = addresses[tensor] + offset
            run(*bound)


@contextmanager
def watched(outs: tuple[Tensor, ...], call: Any) -> Iterator[list[Replay]]:
    """A context in which ``call`` runs for ``outs``. Afterwards the list has the replay, if one is possible."""
    started: list[Bound] = []
    token, replays = _recording.set(started), list[Replay]()
    try:
        with _Recorder() as recorder:
            yield replays
    finally:
        _recording.reset(token)
    if recorder.computed is None and started:
        replays += filter(None, [_replay(started, outs, call, recorder.allocated)])


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
        return None  # tensors share memory here, but may not in another call
    starts, permanent = [], []
    for run, arguments, pointers in started:
        places, fixed = [], list(arguments)
        for at in pointers:
            pointer: Tensor = arguments[at]
            address = fixed[at] = pointer.data_ptr()
            span = next((span for span in spans if span[0] <= address < span[1]), None)
            if span is not None:
                places.append(_Place(at, span[2], span[3] + address - span[0]))
            elif pointer.numel():
                permanent.append(pointer)
        starts.append(_Start(run, fixed, tuple(places)))
    return Replay(tuple(tensors), sizes[0], sizes[1], tuple(starts), tuple(permanent))


def _bytes(make: Callable[..., Tensor], size: int, device: torch.device) -> Tensor | None:
    return make(size, dtype=torch.uint8, device=device) if size else None


def _span(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
