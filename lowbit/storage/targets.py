"""Where bytes go that are needed later: host memory from CUDA, files from either. One protocol, ``Parked``.

A copy from CUDA runs on a stream of its own. What leaves stays in memory until its copy is done, and the number that
leaves at a time is bounded. What comes back is allocated on the caller's stream, so it may be freed at any time.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lowbit.sizes import amount, bytes_in, is_bytes
from lowbit.storage import directory
from lowbit.storage.directory import ScratchDirectory
from lowbit.storage.traffic import Traffic

__all__ = ["Disk", "Host", "Imagined", "Parked", "Target", "find_target"]

_T = TypeVar("_T")


class Parked(Protocol):
    """The bytes of one storage, elsewhere."""

    def start(self) -> None:
        """Begin to bring them back; nothing where that has begun."""

    def take(self) -> Tensor:
        """The bytes, uint8, on the device that they were on. They stay parked, too. Raises OSError."""
        raise NotImplementedError

    def discard(self) -> None:
        """Give up what they take; again is no error."""


class Target(Protocol):
    """Where bytes are parked. ``queued``: how many copies may be leaving at a time, whose bytes are in memory still."""

    traffic: Traffic
    queued: int

    def serves(self, device: torch.device) -> bool:
        """Whether bytes on ``device`` gain by being moved here."""
        raise NotImplementedError

    def park(self, raw: Tensor) -> Parked:
        """Begin to move ``raw``, uint8, whose memory may be freed after that. Raises OSError, and moves nothing."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises OSError where a copy has failed, whose bytes are in memory still."""


def find_target(target: str | os.PathLike[str], budget: int | str | None = None) -> Target:
    """The place of that name: ``"cpu"``, or a directory. Raises TypeError, ValueError and OSError."""
    try:
        most = bytes_in(budget) if isinstance(budget, str) else budget
    except ValueError as error:
        raise ValueError(f"offload: budget is a number of bytes or a size such as '100GB'; {error}") from None
    if most is not None and not is_bytes(most):
        raise ValueError(
            f"offload: budget is a number of bytes or a size such as '100GB', got {budget!r}; give None for no limit"
        )
    return Host(most) if target == "cpu" else Disk(target, most)


# -- host memory -------------------------------------------------------------------------------------------------------
@functools.cache
def side_stream(device: torch.device) -> Any:
    """The stream of a CUDA device on which copies run."""
    return torch.cuda.Stream(device)


def _to_host(raw: Tensor, traffic: Traffic) -> tuple[Tensor, Any]:
    """A pinned copy of CUDA bytes on the side stream, and the event after which it is there."""
    host = torch.empty(raw.numel(), dtype=torch.uint8, pin_memory=True)
    stream = side_stream(raw.device)
    stream.wait_stream(torch.cuda.current_stream(raw.device))
    with torch.cuda.stream(stream):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        host.copy_(raw, non_blocking=True)
        end.record()
    traffic.events("copying", start, end)
    return host, end


class Host:
    """Pinned memory of the host, for bytes on CUDA devices."""

    queued = 2

    def __init__(self, budget: int | None) -> None:
        self.traffic, self.budget, self.used = Traffic("cpu"), budget, 0
        self.leaving: deque[_OnHost] = deque()

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def park(self, raw: Tensor) -> Parked:
        if self.budget is not None and self.used + raw.numel() > self.budget:
            raise OSError(
                f"offload: {amount(raw.numel())} more than the {amount(self.used)} in use exceed the budget of "
                f"{amount(self.budget)} of host memory; raise budget=, or offload less (a larger min_bytes=, "
                f"checkpointing)"
            )
        parked = _OnHost(self, raw)
        self.leaving.append(parked)
        while len(self.leaving) > self.queued:
            self.leaving.popleft().leave()
        return parked

    def check(self) -> None:
        """Copies to the host do not fail."""


class _OnHost:
    def __init__(self, target: Host, raw: Tensor) -> None:
        self.target, self.device, self.size = target, raw.device, raw.numel()
        self.raw: Tensor | None = raw
        self.host, self.done = _to_host(raw, target.traffic)
        target.used += self.size
        target.traffic.moved(out=self.size)

    def leave(self) -> None:
        """Free the bytes on the device, which computations from now on may use again."""
        if self.raw is not None:
            self._wait()
            self.raw = None

    def start(self) -> None:
        if self.raw is not None:
            return
        self.raw = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        stream = side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # which may use that memory until then
        with torch.cuda.stream(stream):
            start, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.raw.copy_(self.host, non_blocking=True)
            self.done.record()
        self.target.traffic.events("copying", start, self.done)
        self.target.traffic.moved(back=self.size)

    def take(self) -> Tensor:
        self.start()
        self._wait()
        raw, self.raw = self.raw, None
        assert raw is not None
        return raw

    def _wait(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        stream.wait_event(self.done)
        end.record(stream)
        self.target.traffic.events("waited", start, end)

    def discard(self) -> None:
        self.leave()  # the copy on the side stream reads or writes that memory
        if self in self.target.leaving:
            self.target.leaving.remove(self)
        size, self.size = self.size, 0
        self.target.used -= size


# -- files -------------------------------------------------------------------------------------------------------------
class _Worker:
    """A thread that does one thing after another. A process that ends, after Ctrl-C say, does not wait for it."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, task: Callable[..., _T], *args: Any) -> Future[_T]:
        """Have ``task`` done with ``args``."""
        future: Future[_T] = Future()
        self._tasks.put((future, task, args))
        return future

    def _run(self) -> None:
        while True:
            self._do(*self._tasks.get())

    def _do(self, future: Future[Any], task: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """A task; what it was given is let go with this call."""
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task(*args))
            except BaseException as error:  # the caller raises it
                future.set_exception(error)


@functools.cache
def _worker(what: str) -> _Worker:
    """The one thread of the process that writes, and the one that reads."""
    return _Worker(f"lowbit-offload-{what}")


os.register_at_fork(after_in_child=_worker.cache_clear)  # a fork has no threads


class Disk:
    """Files in a directory, for bytes on the CPU and on CUDA devices."""

    queued = 1

    def __init__(self, target: str | os.PathLike[str], budget: int | None) -> None:
        self.traffic, self.files = Traffic(str(target)), ScratchDirectory(target, budget)
        self.leaving: deque[_OnDisk] = deque()
        self.failed: BaseException | None = None

    def serves(self, device: torch.device) -> bool:
        return device.type in ("cpu", "cuda")

    def park(self, raw: Tensor) -> Parked:
        self.check()
        parked = _OnDisk(self, raw)
        self.leaving.append(parked)
        while len(self.leaving) > self.queued:
            self.leaving.popleft().leave()
        return parked

    def check(self) -> None:
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise OSError(f"offload: a file could not be written, its tensor is in memory still: {failed}") from failed


class _OnDisk:
    """Bytes in a file, and in memory until the caller's thread drops them: what another thread frees, profilers of the
    caller's do not see.
    """

    def __init__(self, target: Disk, raw: Tensor) -> None:
        self.target, self.device, self.size = target, raw.device, raw.numel()
        self.path = target.files.reserve(self.size)
        self.raw: Tensor | None = raw
        self.pinned = _to_host(raw, target.traffic) if raw.is_cuda else None
        self.read: Future[Tensor] | None = None
        self.written = False
        self.write = _worker("write").submit(self._write)
        target.traffic.moved(out=self.size)

    def _write(self) -> None:
        raw = self.raw
        if raw is None:
            return
        try:
            if self.pinned is not None:
                raw, copied = self.pinned
                copied.synchronize()
            with self.target.traffic.timed("copying"):
                directory.write(self.path, directory.bytes_of(raw))
            self.written = True
        except OSError as error:
            self.target.failed = error

    def leave(self) -> None:
        """Free the bytes in memory, once they are in the file."""
        with self.target.traffic.timed("waited"):
            wait([self.write])
        self._drop()

    def _drop(self) -> None:
        if self.written:
            self.raw = self.pinned = None

    def _read(self, raw: Tensor) -> Tensor:
        with self.target.traffic.timed("copying"):
            directory.read(self.path, directory.bytes_of(raw))
        return raw

    def start(self) -> None:
        if self.read is None and self.written and self.raw is None:
            # Allocated here, since profilers see what their own thread allocates.
            raw = torch.empty(self.size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self.read = _worker("read").submit(self._read, raw)
            self.target.traffic.moved(back=self.size)

    def take(self) -> Tensor:
        with self.target.traffic.timed("waited"):
            if not self.write.cancel():  # what is not written yet need not be
                self.write.result()
            if self.raw is not None:
                raw = self.raw
                self._drop()
                return raw
            self.start()
            assert self.read is not None
            raw, self.read = self.read.result(), None
            return raw.to(self.device, non_blocking=True)

    def discard(self) -> None:
        self.raw = None
        if self in self.target.leaving:
            self.target.leaving.remove(self)
        self.write.cancel()
        self.write.add_done_callback(functools.partial(_release, self.target.files, self.path, self.size))


def _release(files: ScratchDirectory, path: Any, size: int, _: object) -> None:
    files.release(path, size)


# -- estimates ---------------------------------------------------------------------------------------------------------
class Imagined:
    """Stands in for a place while memory is estimated: nothing is copied, and bytes are in memory as long as copies to
    and from that place may keep them there.
    """

    def __init__(self, target: Target) -> None:
        self.traffic, self.queued = Traffic("estimate"), target.queued
        self.leaving: deque[_OnPaper] = deque()

    def serves(self, device: torch.device) -> bool:
        return True

    def park(self, raw: Tensor) -> Parked:
        parked = _OnPaper(raw)
        self.leaving.append(parked)
        while len(self.leaving) > self.queued:
            self.leaving.popleft().raw = None
        return parked

    def check(self) -> None:
        """Nothing fails."""


class _OnPaper:
    def __init__(self, raw: Tensor) -> None:
        self.size, self.device = raw.numel(), raw.device
        self.raw: Tensor | None = raw

    def start(self) -> None:
        if self.raw is None:
            self.raw = torch.empty(self.size, dtype=torch.uint8, device=self.device)

    def take(self) -> Tensor:
        self.start()
        raw, self.raw = self.raw, None
        assert raw is not None
        return raw

    def discard(self) -> None:
        self.raw = None
