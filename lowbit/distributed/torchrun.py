"""Training runs of ``lowbit train`` under ``torchrun``: their process group, and errors for lost processes."""

from __future__ import annotations

import gc
import os
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from lowbit.dist_utils import everywhere, gathered, launched, processes
from lowbit.distributed import checkpoint
from lowbit.distributed.strategies import STRATEGIES as ROWS
from lowbit.user_warnings import warn

__all__ = [
    "STRATEGIES",
    "TIMEOUT",
    "Lost",
    "Together",
    "Waits",
    "command",
    "device",
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
    row = ROWS[strategy]
    if not row.parameters:
        update = "the all-gather of parameters" if row.states else "the all-reduce of magnitudes"
        reduce = "the reduce-scatter of gradients" if row.gradients else "the all-reduce of gradients"
        return Waits("the broadcast of buffers", reduce, update)
    gather, reduce = "the all-gather of parameters", "the reduce-scatter of gradients"
    backward = f"{gather} or {reduce}" if row.gathered == "a block" else reduce
    return Waits(gather, backward, "the all-reduce of the norm of gradients")


#: The strategies of ``lowbit.distributed`` that a run supports. Runs have no groups of processes.
STRATEGIES = tuple(name for name, row in ROWS.items() if not row.one_process and not row.grouped)


class Lost(RuntimeError):
    """A collective failed because another process ended or did not answer."""


def rank() -> int:
    """The rank of this process, 0 for a single process."""
    return dist.get_rank() if processes() > 1 else 0


def device() -> torch.device:
    """The device of this process: its own GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if launched() else torch.cuda.current_device())


@contextmanager
def joined(timeout: float, target: torch.device) -> Iterator[Callable[[Exception], bool]]:
    """Join the process group, in which collectives wait at most ``timeout`` seconds.

    Args:
        timeout: The seconds.
        target: The device of the model: the backend is gloo for a CPU, and NCCL beside it for a GPU.

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

    backend = "gloo"
    if target.type == "cuda":
        torch.cuda.set_device(target)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=wait)
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


class Together:
    """What the processes of a run do together.

    Attributes:
        strategy: The sharding strategy; None for a run of one process, in which nothing waits.
        path: Directory of the state that all processes save.
        waits: The collectives of a step.
        share: This process's sequences of a batch.

    Args:
        strategy: As the attribute.
        batch: Sequences of a batch.
        path: As the attribute.

    Raises:
        ValueError: The processes do not divide the batch.
    """

    def __init__(self, strategy: str | None, batch: int, path: Path) -> None:
        self.strategy, self.path = strategy, path
        self.waits = Waits("", "", "") if strategy is None else waits_of(strategy)
        self.share = slice(None) if strategy is None else share(batch)
        self._saved_step = 0

    def waiting(self, collective: str, step: int) -> AbstractContextManager[None]:
        """Context of a collective: if a process is lost, the error names the collective and the saved steps."""
        if self.strategy is None or not collective:
            return nullcontext()
        saved = self._saved_step
        state = f"{saved} steps are saved in {self.path}" if saved else "no step is saved yet"
        return waiting(f"{collective} in step {step}", f"{state}; ")

    def anywhere(self, stopped: bool, step: int) -> bool:
        """Whether any process received a signal, so that all processes stop after the same step."""
        if self.strategy is None:
            return stopped
        with self.waiting("the all-reduce that agrees on going on", step):
            return not everywhere(not stopped)

    def mean(self, loss: float, step: int) -> float:
        """The loss of the whole batch, of which each process has an equal share."""
        if self.strategy is None:
            return loss
        with self.waiting("the all-gather of losses", step):
            losses = gathered(torch.tensor(loss, dtype=torch.float64))
        return sum(map(float, losses)) / len(losses)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **more: Any) -> None:
        """Write one state of all processes; ``more`` as for ``lowbit.distributed.save``. Raises RuntimeError."""
        with self.waiting("the checkpoint", step):
            checkpoint.save(self.path, model, optimizer, processes=processes(), step=step, **more)
        self._saved_step = step

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, check: Callable[[dict[str, Any]], None], **more: Any
    ) -> dict[str, Any]:
        """Load the state, and return its values; warn if another number of processes saved it.

        Args:
            model: The model.
            optimizer: Its optimizer.
            check: Raises an error for the values of another run.
            more: As for ``lowbit.distributed.load``.
        """
        with self.waiting("the checkpoint", 0):
            values = checkpoint.load(self.path, model, optimizer, **more)
        check(values)
        if values["processes"] != processes():
            warn(
                f"{self.path} was saved by {values['processes']} processes, and {processes()} continue: gradients "
                f"are summed in another order, and random bits differ, so the run is not bit-identical"
            )
        self._saved_step = values["step"]
        return values


def command(arguments: Sequence[str]) -> str:
    """The command line that starts ``lowbit`` with these arguments, with torchrun if this process was."""
    if not launched():
        return shlex.join(["lowbit", *arguments])
    local, count = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    machines = [] if int(local) == count else [f"--nnodes={count // int(local)}"]
    return shlex.join(["torchrun", *machines, f"--nproc-per-node={local}", "-m", "lowbit", *arguments])
