"""Selects and measures benchmark groups and writes the results, for ``lowbit bench``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from lowbit.backends.cpu import processor
from lowbit.bench import peers, report, work
from lowbit.bench.timing import Budget, measure
from lowbit.machine import provenance

#: Rows and columns of the measured matrices.
SIZE, QUICK_SIZE = (4096, 4096), (32, 256)


def select(only: str = "", quick: bool = False) -> list[work.Item]:
    """All items whose 'label subject' matches the regular expression ``only``. Raises ValueError if none does."""
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ValueError(f"{only!r} is no regular expression: {error}") from None
    size = QUICK_SIZE if quick else SIZE
    found = [item for item in work.items(*size) if pattern.search(f"{item.label} {item.subject}")]
    if not found:
        ops = ", ".join(dict.fromkeys(item.op for item in work.items(*QUICK_SIZE)))
        raise ValueError(f"nothing to measure matches {only!r}; it is searched for in 'OP VARIANT SUBJECT', ops: {ops}")
    return found


def run(
    items: list[work.Item],
    directory: Path,
    quick: bool = False,
    on_item: Callable[[work.Item], None] = lambda _: None,
    name: str = "cpu",
    shapes: str = "",
) -> tuple[Path, list[report.Row]]:
    """Measure ``items``, write ``NAME.md``, ``NAME.csv`` and ``NAME.png``; return the path of the first and all rows.

    ``quick``: tiny inputs and few samples, as a test.
    """
    about = provenance(packages=peers.PACKAGES, kernels=processor())  # before the measurement loads the machine
    budget = Budget(3, 0.0, 0.1) if quick else Budget()
    rows: list[report.Row] = []
    for item in items:
        on_item(item)
        group = item.make()
        rows += report.rows_of(group, measure(group, budget))
    if work.isas() != [""]:
        torch.ops.lowbit_native.force_isa("")
    shapes = shapes or "Matrices are {} x {}".format(*(QUICK_SIZE if quick else SIZE))
    return report.write(directory, name, rows, shapes, about, quick), rows
