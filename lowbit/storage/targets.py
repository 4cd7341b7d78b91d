"""Offload targets, host memory for CUDA tensors and files for CPU and CUDA tensors, with one protocol, ``Parked``.

Copies from and to CUDA devices run on a side stream. Bytes stay in memory until they are copied, and the number of
pending copies is bounded. Loaded bytes are allocated on the caller's stream, so they may be freed at any time.
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
    """The offloaded bytes of one storage."""

    def start(self) -> None:
        """Start loading them, unless that has been started."""

    def take(self) -> Tensor:
        """The bytes, uint8, on their device. They stay parked, too. Raises OSError."""
        raise NotImplementedError

    def discard(self) -> None:
        """Free their memory or file. Repeated calls are no error."""


class Target(Protocol):
    """A target of offloaded bytes.

    Attributes:
        traffic: Statistics.
        queued: Maximum number of pending copies to the target; their bytes are still in memory.
    """

    traffic: Traffic
    queued: int

    def serves(self, device: torch.device) -> bool:
        """Whether offloading from ``device`` to this target frees memory there."""
        raise NotImplementedError

    def park(self, raw: Tensor) -> Parked:
        """Start to offload ``raw``, uint8. The caller may then drop it. If it raises OSError, nothing is offloaded."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise OSError if a copy has failed; its bytes are still in memory."""


def find_target(target: str | os.PathLike[str], budget: int | str | None = None) -> Target:
    """The target for ``"cpu"`` or a directory.

    Raises:
        TypeError: ``target`` is not a path.
        ValueError: ``target`` or ``budget`` is invalid.
        OSError: The directory cannot be created or written to.
    """
    try:
        limit = bytes_in(budget) if isinstance(budget, str) else budget
    except ValueError as error:
        raise ValueError(f"offload: budget is a number of bytes or a size such as '100GB'; {error}") from None
    if limit is not None and not is_bytes(limit):
        raise ValueError(
            f"offload: budget is a number of bytes or a size such as '100GB', got {budget!r}; give None for no limit"
        )
    return Host(limit) if target == "cpu" else Disk(target, limit)


# -- host memory -------------------------------------------------------------------------------------------------------
@functools.cache
def side_stream(device: torch.device) -> Any:
    """The stream of a CUDA device for copies."""
    return torch.cuda.Stream(device)


def _to_host(raw: Tensor, traffic: Traffic) -> tuple[Tensor, Any]:
    """A pinned copy of CUDA bytes by the side stream, and the event of its completion."""
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
    """Pinned host memory, for bytes on CUDA devices."""

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
        """Free the bytes on the device for computations from now on."""
        if self.raw is not None:
            self._wait()
            self.raw = None

    def start(self) -> None:
        if self.raw is not None:
            return
        self.raw = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        stream = side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # it may still use that memory
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
    """A thread that runs tasks in order. A process that ends, for example after Ctrl-C, does not wait for it."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, task: Callable[..., _T], *args: Any) -> Future[_T]:
        """Queue ``task(*args)``."""
        future: Future[_T] = Future()
        self._tasks.put((future, task, args))
        return future

    def _run(self) -> None:
        while True:
            self._run_task(*self._tasks.get())

    def _run_task(self, future: Future[Any], task: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Run one task; a method of its own, so that the arguments are freed when it returns."""
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task(*args))
            except BaseException as error:  # the caller raises it
                future.set_exception(error)


@functools.cache
def _worker(task: str) -> _Worker:
    """The thread of this process that writes or reads."""
    return _Worker(f"lowbit-offload-{task}")


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
            raise OSError(f"offload: a file could not be written; its tensor is in memory still: {failed}") from failed


class _OnDisk:
    """Bytes in a file. The caller's thread drops them from memory, because its profilers do not see other threads."""

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
            # Allocated in this thread, so that its profilers see it.
            raw = torch.empty(self.size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self.read = _worker("read").submit(self._read, raw)
            self.target.traffic.moved(back=self.size)

    def take(self) -> Tensor:
        with self.target.traffic.timed("waited"):
            if not self.write.cancel():  # bytes that are not written yet need not be
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
        files, path, size = self.target.files, self.path, self.size  # the callback must not hold this object
        self.write.add_done_callback(lambda _: files.release(path, size))


# -- estimates ---------------------------------------------------------------------------------------------------------
class Imagined:
    """Stands in for a target while memory is estimated.

    Nothing is copied, but bytes stay in memory as long as copies to and from the target would hold them.
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
