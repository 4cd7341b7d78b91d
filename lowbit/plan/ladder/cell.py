"""A cell of the ladder: some steps of one shape by one rung's settings, in a process of their own under a real limit.

``measure`` starts the process and reads its result; the process runs ``main``. Running out of memory ends that process
alone, and what it holds is its own.
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

#: The learning rate of every run.
_LR = 1e-3

#: What makes glibc give memory back as it is freed, and keeps threads from reserving any: a limit counts both.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Cell:
    """What is run. ``budget``: bytes that the process may take beyond what it has before the model is made; None: no
    limit. ``steps``: at least 2, of which the first is not measured.
    """

    shape: Shape
    settings: TrainingSettings
    budget: int | None
    steps: int = 3
    device: str = "cpu"


@dataclass(frozen=True)
class Result:
    """What came of a cell.

    ``before``: bytes held before the model was made. ``peak``: the most bytes beyond them, of the steps after the
    first; of a run that ran out, what it held then. ``seconds``: of a step after the first. ``losses``: before each
    step. ``ran_out``: None, or the part of a step in which memory ran out, with the layer where it is known.
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
    """Run ``cell`` in a process of its own, or in as many as its settings have, each under the limit.

    Of several processes the result is the first's, with the largest peak and the longest time; where one runs out, its
    own. Raises RuntimeError where a process fails otherwise than by the limit, with what it says.
    """
    count = cell.settings.gpus
    threads = str(max(1, torch.get_num_threads() // count))
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads), **MALLOC}
    command = [sys.executable, "-m", "lowbit.plan.ladder.cell", json.dumps(asdict(cell))]
    with tempfile.TemporaryDirectory(prefix="lowbit-ladder-") as directory, ThreadPoolExecutor(count) as pool:

        def started(rank: int) -> subprocess.CompletedProcess[str]:
            arguments = [*command, str(rank), f"{directory}/meet"]
            return subprocess.run(arguments, capture_output=True, text=True, env=environment)

        done = list(pool.map(started, range(count)))
    results = [_result(one) for one in done]
    out = next((one for one in results if one is not None and not one.fits), None)
    if out is not None:  # the others wait for a process that has gone, and fail
        return out
    for one, result in zip(done, results, strict=True):
        if result is None:
            raise RuntimeError(
                f"ladder: a process ended {_ended(one.returncode)} and not by its limit; it says: "
                f"{one.stderr.strip()[-2000:] or 'nothing'}"
            )
    found = [one for one in results if one is not None]
    return replace(found[0], peak=max(one.peak for one in found), seconds=max(one.seconds or 0.0 for one in found))


def _result(done: subprocess.CompletedProcess[str]) -> Result | None:
    """What a process has told at its end; None where it has failed."""
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines or "peak" not in lines[-1]:
        return None
    return Result(**{**lines[-1], "losses": tuple(lines[-1]["losses"])})


def _ended(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    name = signal.Signals(-code).name
    return f"by {name}{', as the system ends processes when the machine runs out,' if name == 'SIGKILL' else ''}"


# -- the child --------------------------------------------------------------------------------------------------------
class _Place:
    """Where in a step the process is: the part of the step, and the layer entered last in it."""

    def __init__(self) -> None:
        self.part = "making the model"
        self.layer: str | None = None
        self._names: dict[int, str] = {}

    def enter(self, part: str) -> None:
        self.part, self.layer = part, None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, layers of ``model`` are noted as they are called; backward calls those that it recomputes."""
        self._names = {id(module): name for name, module in model.named_modules() if name}
        handle = torch_modules.register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module, args: Any) -> None:
        self.layer = self._names.get(id(module), self.layer)

    def __str__(self) -> str:
        return self.part if self.layer is None else f"{self.part}, {self.layer}"


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], micro: int, place: _Place
) -> float:
    """One step; returns the mean loss of the batch, in nats a token, before it."""
    total = 0.0
    for (tokens, targets), weight in micro_batches(batch, micro):
        place.enter("forward")
        logits = model(tokens)
        place.enter("loss")
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) * weight
        del logits
        place.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        del loss
    place.enter("step")
    optimizer.step()
    optimizer.zero_grad()
    return total


def _train(cell: Cell, place: _Place, where: str) -> Iterator[float]:
    """The losses before each step of a model that is made here. ``where``: what offload moves tensors to."""
    torch.manual_seed(0)
    place.enter("making the model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of instructions that a processor lacks: seconds are measured
        model: nn.Module = Transformer(cell.shape).to(cell.device)
        optimizer = arrange_(model, cell.settings, where, lr=_LR)
        model, optimizer = sharded(model, optimizer, cell.settings)
    batch = batch_of(cell.shape, cell.device)
    with place.watching(model), offloading(cell.settings, where):
        for _ in range(cell.steps):
            yield step(model, optimizer, batch, cell.settings.micro_batches, place)


def run(cell: Cell, directory: str) -> Result:
    """Run ``cell`` in this process; ``directory`` is for what is offloaded.

    A step of the smallest shape goes before, so that what libraries load and keep, stacks of threads among it, is there
    before the count begins.
    """
    limit, place = LIMITS[cell.device], _Place()
    where = limit.elsewhere(directory)
    for _ in _train(replace(cell, shape=replace(cell.shape, size=1), steps=1), place, where):
        pass
    gc.collect()
    before, losses, started = limit.held(), list[float](), 0.0
    with nullcontext() if cell.budget is None else limit.within(cell.budget):
        try:
            for loss in _train(cell, place, where):
                losses.append(loss)
                if len(losses) == 1:
                    limit.reset()
                    started = time.perf_counter()
            seconds = (time.perf_counter() - started) / (cell.steps - 1)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            return Result(before, limit.held() - before, None, tuple(losses), str(place))
    return Result(before, limit.peak() - before, seconds, tuple(losses))


def main() -> None:
    """The process: its arguments are a cell as JSON, its rank, and a file by which several meet; its last line is its
    result as JSON.
    """
    asked = json.loads(sys.argv[1])
    cell = Cell(**{**asked, "shape": Shape(**asked["shape"]), "settings": TrainingSettings(**asked["settings"])})
    count, rank, meet = cell.settings.gpus, int(sys.argv[2]), sys.argv[3]
    if count > 1:
        backend = "nccl" if cell.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=count)
    with tempfile.TemporaryDirectory(prefix="lowbit-ladder-") as directory:
        print(json.dumps(asdict(run(cell, directory))), flush=True)
    if count > 1:
        os._exit(0)  # the group would wait for processes that have run out


if __name__ == "__main__":
    main()
