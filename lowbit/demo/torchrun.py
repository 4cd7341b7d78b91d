"""The processes that ``torchrun`` starts for one run of the demo: their group, and how one that is lost is told.

Everything is on the CPU, as it is in one process, so the group's backend is gloo.
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

from lowbit.dist_utils import processes

__all__ = [
    "STRATEGIES",
    "TIMEOUT",
    "WAITS",
    "Lost",
    "Waits",
    "command",
    "first",
    "joined",
    "launched",
    "rank",
    "share",
    "waiting",
]

T = TypeVar("T")

#: Seconds that a collective waits for the other processes unless asked for others.
TIMEOUT = 60.0

#: What gloo's errors say of a process that has ended or does not answer; they have no class of their own.
_LOST = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


class Waits(NamedTuple):
    """The collectives of a step, by what it is doing; "" where there is none."""

    forward: str
    backward: str
    update: str


WAITS = {
    "ddp": Waits("the broadcast of buffers", "the all-reduce of gradients", "the all-reduce of magnitudes"),
    "zero1": Waits("the broadcast of buffers", "the all-reduce of gradients", "the all-gather of parameters"),
    "zero2": Waits(
        "the all-gather of parameters", "the reduce-scatter of gradients", "the all-reduce of the norm of gradients"
    ),
    "zero3": Waits(
        "the all-gather of parameters",
        "the all-gather of parameters or the reduce-scatter of gradients",
        "the all-reduce of the norm of gradients",
    ),
}

#: The ways of ``lowbit.distributed`` that a run can have.
STRATEGIES = tuple(WAITS)


class Lost(RuntimeError):
    """A collective that other processes did not take part in."""


def launched() -> bool:
    """Whether ``torchrun`` started this process, or whoever else sets the same variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """The number of this process, 0 where it is alone."""
    return dist.get_rank() if processes() > 1 else 0


@contextmanager
def joined(timeout: float) -> Iterator[Callable[[Exception], bool]]:
    """Within, the processes are a group whose collectives wait at most ``timeout`` seconds. Yields what says whether
    this process is the first that has an error, which all may have alike.

    Raises: ValueError for a timeout that is not positive; RuntimeError where the processes do not meet.
    """
    if not 0 < timeout < 1e6:
        raise ValueError(f"--timeout is in seconds, above 0, got {timeout:g}")
    wait = timedelta(seconds=timeout)
    store, number, count = next(rendezvous("env://", timeout=max(wait, timedelta(seconds=TIMEOUT))))
    store.set_timeout(wait)

    def is_news(error: Exception) -> bool:
        what = "" if isinstance(error, Lost) else str(error)  # each has waited for another time
        try:
            said: int = store.add(f"lowbit/{type(error).__name__}/{zlib.crc32(what.encode()):08x}", 1)
        except RuntimeError:  # the process that has the store is gone
            return True
        return said == 1

    dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=wait)
    yield is_news
    gc.collect()  # models first: DDP's reducer waits for ever where it outlives its group
    dist.destroy_process_group()  # not after an error: it could wait for a process that is lost


def first(work: Callable[[], T], what: str) -> T:
    """What ``work`` gives in process 0, in every process. All raise what it raises. ``what`` it is, for ``Lost``."""
    if processes() == 1:
        return work()
    said: list[tuple[T | None, Exception | None]] = [(None, None)]
    if rank() == 0:
        try:
            said = [(work(), None)]
        except Exception as error:  # whatever it is, the others wait for it
            said = [(None, error)]
    with waiting(f"the broadcast of {what}"):
        dist.broadcast_object_list(said)
    value, raised = said[0]
    if raised is not None:
        raise raised
    return value  # type: ignore[return-value]  # None where work gives None


def share(batch: int) -> slice:
    """The sequences of a batch that this process takes.

    Raises: ValueError where the batch does not divide among the processes.
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
def waiting(what: str, left: str = "") -> Iterator[None]:
    """Within is the collective ``what``. ``left``: what there is to go on with.

    Raises: Lost where another process has ended, or did not answer within the group's timeout.
    """
    start = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, Lost) or not any(mark in str(error) for mark in _LOST):
            raise
        silent = "Timed out" in str(error)
        happened = "did not answer in time" if silent else "has ended"
        raise Lost(
            f"process {rank()} of {processes()} waited {time.perf_counter() - start:.1f} s for {what}, and another "
            f"process {happened}; {left}start the same command with --resume"
            + (", with a longer --timeout if that process was only slow" if silent else "")
        ) from error


def command(arguments: Sequence[str]) -> str:
    """How to start ``lowbit`` with these arguments as this process was."""
    if not launched():
        return shlex.join(["lowbit", *arguments])
    here, count = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    machines = [] if int(here) == count else [f"--nnodes={count // int(here)}"]
    return shlex.join(["torchrun", *machines, f"--nproc-per-node={here}", "-m", "lowbit", *arguments])
