"""The process group of a demo run under ``torchrun``, and errors for lost processes.

The demo runs on the CPU, so the group's backend is gloo.
"""

from __future__ import annotations

import gc
import os
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lowbit import distributed
from lowbit.dist_utils import launched, processes

__all__ = [
    "STRATEGIES",
    "TIMEOUT",
    "Lost",
    "Waits",
    "command",
    "first",
    "joined",
    "rank",
    "share",
    "waiting",
    "waits_of",
]

T = TypeVar("T")

#: Default seconds that a collective waits for the other processes.
TIMEOUT = 60.0

#: Parts of gloo's messages for lost processes; its errors have no class of their own.
_LOST = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


class Waits(NamedTuple):
    """The collective in each phase of a step, for messages; "" for none."""

    forward: str
    backward: str
    update: str


def waits_of(strategy: str) -> Waits:
    """The collectives of a row of ``lowbit.distributed.STRATEGIES``."""
    row = distributed.STRATEGIES[strategy]
    if not row.parameters:
        update = "the all-gather of parameters" if row.states else "the all-reduce of magnitudes"
        reduce = "the reduce-scatter of gradients" if row.gradients else "the all-reduce of gradients"
        return Waits("the broadcast of buffers", reduce, update)
    gather, reduce = "the all-gather of parameters", "the reduce-scatter of gradients"
    backward = f"{gather} or {reduce}" if row.gathered == "a block" else reduce
    return Waits(gather, backward, "the all-reduce of the norm of gradients")


#: The strategies of ``lowbit.distributed`` that a run supports. The demo has no groups of processes.
STRATEGIES = tuple(name for name, row in distributed.STRATEGIES.items() if not row.one_process and not row.grouped)


class Lost(RuntimeError):
    """A collective failed because another process ended or did not answer."""


def rank() -> int:
    """The rank of this process, 0 for a single process."""
    return dist.get_rank() if processes() > 1 else 0


@contextmanager
def joined(timeout: float) -> Iterator[Callable[[Exception], bool]]:
    """Join the process group, in which collectives wait at most ``timeout`` seconds.

    Yields:
        A function of an error: whether this process is the first one to report it.

    Raises:
        ValueError: ``timeout`` is not positive.
        RuntimeError: The processes do not meet.
    """
    if not 0 < timeout < 1e6:
        raise ValueError(f"--timeout expects seconds above 0, got {timeout:g}")
    wait = timedelta(seconds=timeout)
    store, number, count = next(rendezvous("env://", timeout=max(wait, timedelta(seconds=TIMEOUT))))
    store.set_timeout(wait)

    def is_news(error: Exception) -> bool:
        text = "" if isinstance(error, Lost) else str(error)  # messages of Lost differ in their seconds
        try:
            reports: int = store.add(f"lowbit/{type(error).__name__}/{zlib.crc32(text.encode()):08x}", 1)
        except RuntimeError:  # the process with the store has ended
            return True
        return reports == 1

    dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=wait)
    yield is_news
    gc.collect()  # free models first: DDP's reducer waits forever if it outlives its group
    dist.destroy_process_group()  # not after an error: it could wait for a lost process


def first(work: Callable[[], T], subject: str) -> T:
    """Run ``work`` in process 0, and return its result, or raise its error, in all processes.

    ``subject`` names the result in messages of ``Lost``.
    """
    if processes() == 1:
        return work()
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if rank() == 0:
        try:
            outcome = [(work(), None)]
        except Exception as error:  # the other processes wait for the outcome
            outcome = [(None, error)]
    with waiting(f"the broadcast of {subject}"):
        dist.broadcast_object_list(outcome)
    value, raised = outcome[0]
    if raised is not None:
        raise raised
    return value  # type: ignore[return-value]  # T may be None


def share(batch: int) -> slice:
    """This process's sequences of a batch.

    Raises:
        ValueError: The processes do not divide the batch.
    """
    count = processes()
    if batch % count:
        below = batch - batch % count
        near = " or ".join(str(size) for size in (below, below + count) if size)
        raise ValueError(
            f"a batch of {batch} sequences does not divide among {count} processes; give --batch {near}, or torchrun "
            f"--nproc-per-node a divisor of {batch}"
        )
    size = batch // count
    return slice(rank() * size, (rank() + 1) * size)


@contextmanager
def waiting(collective: str, state: str = "") -> Iterator[None]:
    """Context of a collective, for errors that name it and the saved ``state``.

    Raises:
        Lost: Another process has ended, or did not answer within the timeout.
    """
    start = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, Lost) or not any(mark in str(error) for mark in _LOST):
            raise
        timed_out = "Timed out" in str(error)
        event = "did not answer in time" if timed_out else "has ended"
        raise Lost(
            f"process {rank()} of {processes()} waited {time.perf_counter() - start:.1f} s for {collective}, and "
            f"another process {event}; {state}start the same command with --resume"
            + (", with a longer --timeout if that process was only slow" if timed_out else "")
        ) from error


def command(arguments: Sequence[str]) -> str:
    """The command line that starts ``lowbit`` with these arguments, with torchrun if this process was."""
    if not launched():
        return shlex.join(["lowbit", *arguments])
    local, count = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    machines = [] if int(local) == count else [f"--nnodes={count // int(local)}"]
    return shlex.join(["torchrun", *machines, f"--nproc-per-node={local}", "-m", "lowbit", *arguments])
