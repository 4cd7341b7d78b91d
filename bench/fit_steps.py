"""Measures memory and time of steps by a plan, and caches measurements in files."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lowbit as lb
from lowbit.bench.memory import Subject, storages
from lowbit.memory.measure import allocations
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.identity import identity_of
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject as Trained
from lowbit.storage.mapped import is_mapped

__all__ = ["STEPS", "WATCHED", "Cells", "Held", "answer", "by", "measured", "started", "trained", "training"]

#: A finished process.
_Process = subprocess.CompletedProcess[str]

#: Steps of the median time, after the first step.
STEPS = 5
#: Steps of the peak measurement.
WATCHED = 3


@dataclass(frozen=True)
class Held:
    """``peak``: bytes of torch's allocator and of mapped file pages in a step. ``seconds``: per step."""

    peak: int
    seconds: float


def measured(plan: TrainingPlan, subject: Subject, steps: int = STEPS) -> Held:
    """Measure training by ``plan`` in this process: one step for the states, some steps for the peak (offloaded tensors
    come and go in parallel), then ``steps`` for the time.
    """
    with training(plan, subject) as (run, batch):
        gc.collect()
        states = [t for s in run.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        there = [*run.model.parameters(), *run.model.buffers(), *states]
        before = storages([[t for t in there if not is_mapped(t)], batch])
        peak = before + _peak(lambda: [run.step(batch) for _ in range(WATCHED)], plan.settings.offload_weights)
        return Held(peak, _timed(run, batch, steps))


def _peak(run: Callable[[], object], mapped: bool) -> int:
    """Peak bytes of ``run()`` in the allocator. ``mapped``: also count mapped pages of scratch files, sampled every two
    milliseconds.
    """
    if not mapped:
        return lb.memory.allocated_peak(run, "cpu")
    pages, done = [(time.time_ns(), _mapped_now())], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            pages.append((time.time_ns(), _mapped_now()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        changes = allocations(run)
    finally:
        done.set()
        thread.join()
    held, there, peak = 0, 0, 0
    moments = [*((when, True, size) for when, size in pages), *((when, False, size) for when, size in changes)]
    for _, of_pages, size in sorted(moments):
        held, there = (held, size) if of_pages else (held + size, there)
        peak = max(peak, held + there)
    return peak


def _mapped_now() -> int:
    ours, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[:1].isupper():  # the address range and file of a mapping
            ours = "lowbit-offload-" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def trained(plan: TrainingPlan, subject: Subject, steps: int) -> tuple[float, bool]:
    """The time per step, without torch's profiler (which allocates memory per op), and whether the run fell back to
    less memory than planned.
    """
    with training(plan, subject) as (run, batch):
        return _timed(run, batch, steps), run.settings != plan.settings


@contextmanager
def training(plan: TrainingPlan, subject: Subject) -> Iterator[tuple[Any, Any]]:
    """The run of a plan after a step, and its batch."""
    torch.manual_seed(0)
    model, batch = subject.make(), subject.batch()
    with tempfile.TemporaryDirectory(prefix="lowbit-fit-") as directory:
        run = plan.apply_(model, directory=directory)
        run.step(batch)
        yield run, batch
        run.optimizer.state.clear()  # state files must be removed before their directory


def _timed(run: Any, batch: Any, steps: int) -> float:
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        run.step(batch)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


class Cells:
    """Cached measurements, each in a file of the directory, with the commit that measured it."""

    def __init__(self, directory: Path, commit: str) -> None:
        self.directory, self.commit, self.used = directory, commit, dict[str, str]()
        directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.directory / f"{''.join(c if c.isalnum() else '-' for c in name.lower())}.json".replace("--", "-")
        if not path.exists():
            path.write_text(json.dumps({"cell": name, "commit": self.commit, **make()}) + "\n")
        measurement: dict[str, Any] = json.loads(path.read_text())
        self.used[name] = measurement.get("commit", "unknown")
        return measurement

    def commits(self) -> str:
        """The number of measurements per commit, in words."""
        counts = Counter(self.used.values()).items()
        return ", ".join(f"{commit} ({count})" for commit, count in counts)


def by(settings: TrainingSettings, subject: Subject) -> TrainingPlan:
    """A plan with these settings for a subject, without a budget."""
    prediction = Prediction(settings, 1, 1.0)
    return TrainingPlan(
        prediction, 1 << 50, prediction, [prediction], identity=identity_of(Trained(subject.make(), None))
    )


def started(module: str, question: list[Any], environment: Mapping[str, str] | None = None) -> _Process:
    """Run ``lowbit.bench.MODULE`` in a separate process with as many threads. It reads the question as JSON."""
    threads = {name: str(torch.get_num_threads()) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return subprocess.run(
        [sys.executable, "-m", f"lowbit.bench.{module}"], input=json.dumps(question), capture_output=True, text=True,
        env={**os.environ, **threads, **(environment or {})},
    )  # fmt: skip


def answer(process: _Process) -> dict[str, Any]:
    """The last JSON object that the process printed. Raises RuntimeError if it failed."""
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise RuntimeError(
            f"fit: a process ended with exit code {process.returncode}: {process.stderr.strip()[-2000:]}"
        )
    values: dict[str, Any] = json.loads(lines[-1])
    return values
