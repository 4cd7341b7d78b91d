"""Compares memory estimates with torch's profiler, on the models of ``estimate_cases``.

``lowbit bench estimates`` writes estimates.md.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

import lowbit as lb
from lowbit.bench.estimate_cases import Case, cases, random_network
from lowbit.machine import provenance
from lowbit.models.batches import call
from lowbit.tables import markdown

#: Number of random networks, and the range of estimate / measured peak that should hold.
NETWORKS, LOW, HIGH = 100, 0.99, 1.04


class Row(NamedTuple):
    """Bytes at the peak of a step without an optimizer."""

    name: str
    estimated: int
    held: int

    @property
    def share(self) -> float:
        return self.estimated / self.held


def row(case: Case) -> Row:
    """Estimate a case, then run one step for one-time allocations and one under the profiler."""
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()
    estimated = lb.estimate(model, batch, case.loss, optimizer=None).peak_bytes

    def step() -> None:
        case.loss(call(model, batch), batch).backward()
        model.zero_grad()

    step()
    gc.collect()
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers(), batch)]
    before = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return Row(case.name, estimated, lb.memory.allocated_peak(step) + before)


def measure(chosen: Iterable[Case], each: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row per case."""
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in chosen:
            rows.append(row(case))
            each(rows[-1])
    return rows


def _summary(rows: list[Row]) -> str:
    shares = [one.share for one in rows]
    outside = sum(not LOW <= share <= HIGH for share in shares)
    return (
        f"{len(rows)} cases: estimate / held is {statistics.median(shares):.4f} in the median, from {min(shares):.4f} "
        f"to {max(shares):.4f}; {outside} outside {LOW} to {HIGH}"
    )


def run(directory: Path) -> Path:
    """Measure all cases, and write ``estimates.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about = provenance()
    ops, networks = measure(cases()), measure(map(random_network, range(NETWORKS)))
    worst = sorted((*ops, *networks), key=lambda one: -abs(one.share - 1))[:20]
    cells = [(r.name, f"{r.estimated:,}", f"{r.held:,}", f"{r.share:.4f}") for r in worst]
    text = [
        "# Estimates of memory, op by op\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\nA model of a Linear and one op, in the layouts in which ops are met, and networks of 3 to 8 random parts. "
        "Held is the peak of torch's profiler in the second step, with weights and batch.\n",
        f"- ops: {_summary(ops)}",
        f"- random networks: {_summary(networks)}\n",
        "The 20 cases that are furthest off:\n",
        markdown(("case", "estimated, bytes", "held", "estimate / held"), cells, numbers=(1, 2, 3)),
    ]
    path = directory / "estimates.md"
    path.write_text("\n".join(text) + "\n")
    return path
