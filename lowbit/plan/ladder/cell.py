"""A cell of the ladder: a few steps of one shape with one rung's settings, in a separate process with a memory limit.

``measure`` starts the process and reads its result; the process runs ``main``. If memory runs out, only that process
ends.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_modules

from lowbit.memory.shortage import ran_out
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.ladder.shape import Shape, Transformer, batch_of
from lowbit.plan.settings import TrainingSettings, arrange_, offloading, sharded
from lowbit.train.micro_batches import micro_batches

__all__ = ["MALLOC", "Cell", "Result", "measure"]

_LR = 1e-3

#: Makes glibc return freed memory, and keeps threads from reserving memory, because the limit counts both.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Cell:
    """Arguments of a run.

    Attributes:
        shape: The transformer.
        settings: Its training settings.
        budget: Bytes that the process may allocate from the creation of the model on; None: no limit.
        steps: Number of steps, at least 2. The first one is not measured.
        device: ``"cpu"`` or ``"cuda"``.
    """

    shape: Shape
    settings: TrainingSettings
    budget: int | None
    steps: int = 3
    device: str = "cpu"


@dataclass(frozen=True)
class Result:
    """The result of a cell.

    Attributes:
        before: Bytes in use before the model is created.
        peak: Peak bytes above ``before`` after the first step; if memory ran out, the bytes in use at that time.
        seconds: Time per step, without the first; None if memory ran out.
        losses: Loss before each step.
        ran_out: The phase of the step in which memory ran out, with the layer if it is known; None if it did not.
    """

    before: int
    peak: int
    seconds: float | None
    losses: tuple[float, ...]
    ran_out: str | None = None

    @property
    def fits(self) -> bool:
        return self.ran_out is None


# -- the parent -------------------------------------------------------------------------------------------------------
def measure(cell: Cell) -> Result:
    """Run ``cell`` in separate processes, as many as its settings have, each with the limit.

    For several processes the result is the first one's, with the largest peak and the longest time. If a process runs
    out of memory, the result is that one's.

    Raises:
        RuntimeError: If a process fails for another reason than the limit; the error includes its output.
    """
    count = cell.settings.gpus
    threads = str(max(1, torch.get_num_threads() // count))
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads), **MALLOC}
    command = [sys.executable, "-m", "lowbit.plan.ladder.cell", json.dumps(asdict(cell))]
    with tempfile.TemporaryDirectory(prefix="lowbit-ladder-") as directory, ThreadPoolExecutor(count) as pool:

        def start(rank: int) -> subprocess.CompletedProcess[str]:
            arguments = [*command, str(rank), f"{directory}/meet"]
            return subprocess.run(arguments, capture_output=True, text=True, env=environment)

        processes = list(pool.map(start, range(count)))
    results = []
    for process in processes:
        result = _result(process)
        if result is not None and not result.fits:  # the other processes lose their peer, and fail
            return result
        results.append(result)
    for process, result in zip(processes, results, strict=True):
        if result is None:
            raise RuntimeError(
                f"ladder: a process ended {_ended(process.returncode)}, not because of its limit; its output: "
                f"{process.stderr.strip()[-2000:] or 'none'}"
            )
    finished = [result for result in results if result is not None]
    return replace(
        finished[0], peak=max(row.peak for row in finished), seconds=max(row.seconds or 0.0 for row in finished)
    )


def _result(process: subprocess.CompletedProcess[str]) -> Result | None:
    """Return the result that a process printed; None if it failed."""
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines or "peak" not in lines[-1]:
        return None
    return Result(**{**lines[-1], "losses": tuple(lines[-1]["losses"])})


def _ended(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    name = signal.Signals(-code).name
    return f"by {name}{', as the system ends processes if memory runs out' if name == 'SIGKILL' else ''}"


# -- the child --------------------------------------------------------------------------------------------------------
class _Position:
    """The current phase of a step, and the layer that was called last in it."""

    def __init__(self) -> None:
        self.phase = "creation of the model"
        self.layer: str | None = None
        self._names: dict[int, str] = {}

    def enter(self, phase: str) -> None:
        self.phase, self.layer = phase, None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Track the calls of layers of ``model`` in this context, recomputation in backward included."""
        self._names = {id(module): name for name, module in model.named_modules() if name}
        handle = torch_modules.register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module, args: Any) -> None:
        self.layer = self._names.get(id(module), self.layer)

    def __str__(self) -> str:
        return self.phase if self.layer is None else f"{self.phase}, {self.layer}"


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], micro: int, position: _Position
) -> float:
    """Run one step; return the mean loss of the batch before it, in nats per token."""
    total = 0.0
    for (tokens, targets), weight in micro_batches(batch, micro):
        position.enter("forward")
        logits = model(tokens)
        position.enter("loss")
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) * weight
        del logits
        position.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        del loss
    position.enter("step")
    optimizer.step()
    optimizer.zero_grad()
    return total


def _train(cell: Cell, position: _Position, target: str) -> Iterator[float]:
    """Create the model and train it; yield the loss before each step. ``target``: the offload target."""
    torch.manual_seed(0)
    position.enter("creation of the model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing processor instructions: the time is measured anyway
        model: nn.Module = Transformer(cell.shape).to(cell.device)
        optimizer = arrange_(model, cell.settings, target, lr=_LR)
        model, optimizer = sharded(model, optimizer, cell.settings)
    batch = batch_of(cell.shape, cell.device)
    with position.watching(model), offloading(cell.settings, target):
        for _ in range(cell.steps):
            yield step(model, optimizer, batch, cell.settings.micro_batches, position)


def run(cell: Cell, directory: str) -> Result:
    """Run ``cell`` in this process; ``directory`` is for offloaded tensors.

    A step of the smallest shape runs first, so that memory of libraries and thread stacks is not counted.
    """
    limit, position = LIMITS[cell.device], _Position()
    target = limit.target(directory)
    for _ in _train(replace(cell, shape=replace(cell.shape, size=1), steps=1), position, target):
        pass
    gc.collect()
    before, losses, started = limit.held(), list[float](), 0.0
    with nullcontext() if cell.budget is None else limit.within(cell.budget):
        try:
            for loss in _train(cell, position, target):
                losses.append(loss)
                if len(losses) == 1:
                    limit.reset()
                    started = time.perf_counter()
            seconds = (time.perf_counter() - started) / (cell.steps - 1)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            return Result(before, limit.held() - before, None, tuple(losses), str(position))
    return Result(before, limit.peak() - before, seconds, tuple(losses))


def main() -> None:
    """Run the process. Its arguments are a cell as JSON, its rank, and a rendezvous file; it prints JSON last."""
    values = json.loads(sys.argv[1])
    cell = Cell(**{**values, "shape": Shape(**values["shape"]), "settings": TrainingSettings(**values["settings"])})
    count, rank, meet = cell.settings.gpus, int(sys.argv[2]), sys.argv[3]
    if count > 1:
        backend = "nccl" if cell.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=count)
    with tempfile.TemporaryDirectory(prefix="lowbit-ladder-") as directory:
        print(json.dumps(asdict(run(cell, directory))), flush=True)
    if count > 1:
        os._exit(0)  # the group would wait for processes that ran out of memory


if __name__ == "__main__":
    main()
