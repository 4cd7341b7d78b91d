"""Measures the resident memory of training by a plan, in a separate process.

The result is the process's peak resident set minus the resident set after imports.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import lowbit as lb
from lowbit.bench.fit_steps import answer, started
from lowbit.bench.memory import SUBJECTS, Subject
from lowbit.memory.rss import peak_bytes, reset_peak, resident_bytes
from lowbit.plan import TrainingPlan

__all__ = ["resident"]

_STEPS = 3


def resident(plan: TrainingPlan, subject: Subject) -> int:
    """Peak resident bytes of some steps, minus the resident bytes after imports."""
    return int(answer(started("resident", [subject.name, plan.as_dict()]))["resident"])


def main() -> None:
    """The process: reads a plan as JSON and prints the bytes."""
    name, data = json.loads(sys.stdin.read())
    subject = next(one for one in SUBJECTS if one.name == name)
    with tempfile.TemporaryDirectory(prefix="lowbit-fit-") as directory:
        path = Path(directory) / "plan.json"
        path.write_text(json.dumps(data))
        plan = TrainingPlan.load(path)
        _import_all(subject)
        gc.collect()
        before = resident_bytes()
        torch.manual_seed(0)
        model, batch = subject.make(), subject.batch()
        run = plan.apply_(model, directory=directory)
        reset_peak()
        for _ in range(_STEPS):
            run.step(batch)
        print(json.dumps({"resident": peak_bytes() - before}))
        run.optimizer.state.clear()  # state files must be removed before their directory


def _import_all(subject: Subject) -> None:
    """Import modules and start threads and kernels that the model and a first step need."""
    subject.make()
    batch = torch.zeros(2, 8)
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = lb.fit(small, batch, "200%", lambda output, batch: output.square().mean(), exclude=("disk",), progress=False)
    plan.apply_(small).step(batch)


if __name__ == "__main__":
    main()
