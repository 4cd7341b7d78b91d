"""What training by a plan takes of the system's memory, beside the bytes that torch's allocator counts.

A process of its own trains: what the system has given it at most, less what it had after its imports.
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
    """Bytes at the peak of the process's resident set in some steps, above its imports."""
    return int(answer(started("resident", [subject.name, plan.as_dict()]))["resident"])


def main() -> None:
    """The process: a plan comes as JSON, bytes go out."""
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
        run.optimizer.state.clear()  # files of states go before their directory does


def _import_all(subject: Subject) -> None:
    """What the model and a first step import, and the threads and kernels that torch starts then."""
    subject.make()
    batch = torch.zeros(2, 8)
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plan = lb.fit(small, batch, "200%", lambda output, batch: output.square().mean(), exclude=("disk",), progress=False)
    plan.apply_(small).step(batch)


if __name__ == "__main__":
    main()
