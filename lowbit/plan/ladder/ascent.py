"""Runs the ladder: every rung on one shape, and the largest shape that each rung trains within the budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowbit._version import __version__
from lowbit.files import read_json, write_json
from lowbit.memory.rss import available_bytes
from lowbit.plan.ladder.cell import Cell, Result, measure
from lowbit.plan.ladder.rungs import RUNGS, Rung
from lowbit.plan.ladder.shape import Shape, first_above, textbook
from lowbit.plan.settings import TrainingSettings
from lowbit.progress import Progress

__all__ = ["LOWER", "Climb", "Ladder", "Row", "climb", "largest"]

#: Relative tolerance of losses with another order of sums: half a bf16 ulp.
_CLOSE = 2.0**-8
#: Higher rungs include a rung only if it lowers the peak below this fraction of the previous peak.
LOWER = 0.99


@dataclass(frozen=True)
class Climb:
    """Arguments of a ladder.

    Attributes:
        budget: Memory budget in bytes.
        device: ``"cpu"`` or ``"cuda"``.
        steps: Steps per cell.
        search: Number of shapes that are tried to find the largest of a rung; 0: no search.
        directory: Cache of finished cells.
    """

    budget: int
    device: str = "cpu"
    steps: int = 3
    search: int = 6
    directory: Path | None = None


@dataclass(frozen=True)
class Row:
    """The results of one rung.

    Attributes:
        rung: The rung.
        settings: Its settings, with the rungs below.
        limited: Result of the ladder's shape under the limit.
        whole: The same, or without the limit if memory ran out; None if the machine has too little memory.
        kept: Whether the rungs above include it.
        alike: Whether losses compare with the rung below as promised; None without a promise or a comparison.
        largest: Largest shape that trained within the budget; None if none did.
        beyond: Size of the next shape that is known not to fit.
    """

    rung: Rung
    settings: TrainingSettings
    limited: Result
    whole: Result | None
    kept: bool
    alike: bool | None
    largest: Shape | None = None
    beyond: int | None = None


@dataclass(frozen=True)
class Ladder:
    """The results of all rungs."""

    climb: Climb
    shape: Shape
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        rows = [
            {
                "name": row.rung.name, "settings": asdict(row.settings), "limited": asdict(row.limited),
                "whole": row.whole and asdict(row.whole), "kept": row.kept, "alike": row.alike,
                "largest": row.largest and {**asdict(row.largest), "parameters": row.largest.parameters},
                "beyond": row.beyond,
            }
            for row in self.rows
        ]  # fmt: skip
        return {
            "budget": self.climb.budget, "device": self.climb.device, "steps": self.climb.steps,
            "shape": {**asdict(self.shape), "parameters": self.shape.parameters}, "textbook": textbook(self.shape),
            "rungs": rows,
        }  # fmt: skip


def climb(asked: Climb, rungs: Sequence[Rung] = RUNGS, progress: Progress = lambda what, done, total: None) -> Ladder:
    """Run ``rungs`` in order, each on top of the rungs below that lower the peak.

    Args:
        asked: Arguments of the ladder.
        rungs: The rungs.
        progress: Called as ``progress(what, done, total)``.

    Raises:
        ValueError: For a budget that is too small.
        RuntimeError: If a process fails for another reason than its limit.
        OSError: If results cannot be stored.
    """
    shape, rows = first_above(asked.budget), list[Row]()
    for index, rung in enumerate(rungs):
        below = next((row for row in reversed(rows) if row.kept), None)
        progress(rung.name, index, len(rungs))
        rows.append(_row(asked, rung, shape, below))
    progress("done", len(rungs), len(rungs))
    return Ladder(asked, shape, tuple(rows))


def _row(asked: Climb, rung: Rung, shape: Shape, below: Row | None) -> Row:
    settings = rung.on(below.settings if below is not None else TrainingSettings())
    cell = Cell(shape, settings, asked.budget, asked.steps, asked.device)
    limited = _measured(asked, rung, cell)
    whole: Result | None = limited
    if not limited.fits:
        whole = _measured(asked, rung, replace(cell, budget=None)) if _has_room(cell) else None
    base = None if below is None else below.whole
    kept = base is None or whole is None or whole.peak < LOWER * base.peak
    row = Row(rung, settings, limited, whole, kept, _alike(rung, whole, base))
    if not asked.search or not kept:
        return row
    tried = {shape.size: limited.fits}

    def fits(size: int) -> bool:
        tried[size] = _measured(asked, rung, replace(cell, shape=replace(shape, size=size), steps=2)).fits
        return tried[size]

    size = largest(fits, tried, _guess(shape, limited if whole is None else whole, asked.budget), asked.search)
    beyond = min((size for size, fitted in tried.items() if not fitted), default=None)
    return replace(row, largest=replace(shape, size=size) if size else None, beyond=beyond)


def _has_room(cell: Cell) -> bool:
    """Return whether a step in plain fp32 in each process surely fits the machine."""
    free = torch.cuda.mem_get_info()[0] if cell.device == "cuda" else available_bytes()
    return free is not None and free > 1.2 * cell.settings.gpus * sum(textbook(cell.shape).values())


def _alike(rung: Rung, here: Result | None, below: Result | None) -> bool | None:
    if rung.losses == "own" or here is None or below is None:
        return None
    if rung.losses == "equal":
        return here.losses == below.losses
    return all(math.isclose(a, b, rel_tol=_CLOSE) for a, b in zip(here.losses, below.losses, strict=True))


# -- the largest shape ------------------------------------------------------------------------------------------------
def _guess(shape: Shape, measured: Result, budget: int) -> int:
    """Return the size whose peak would equal the budget, if peaks were proportional to the textbook's sum."""
    ratio, size = measured.peak / sum(textbook(shape).values()), 1
    while ratio * sum(textbook(replace(shape, size=size + 1)).values()) <= budget:
        size += 1
    return size


def largest(fits: Callable[[int], bool], tried: dict[int, bool], guess: int, tries: int) -> int:
    """Return the largest size that fits, after at most ``tries`` calls of ``fits``; 0 if none does.

    The guess is tried first, then steps that double, then bisection.

    Args:
        fits: Tries a size, and stores the result in ``tried``.
        tried: Known results by size.
        guess: First size to try.
        tries: Limit on the calls.
    """
    step = 1
    for _ in range(tries):
        low = max((size for size, fitted in tried.items() if fitted), default=0)
        high = min((size for size, fitted in tried.items() if not fitted), default=None)
        if high is not None and high - low <= 1:
            break
        if low < guess and (high is None or guess < high):
            size = guess
        elif high is None:
            size, step = low + step, 2 * step
        elif not low:
            size, step = max(1, high - step), 2 * step
        else:
            size = (low + high) // 2
        fits(size)
    return max((size for size, fitted in tried.items() if fitted), default=0)


# -- the cache of cells -----------------------------------------------------------------------------------------------
def _measured(asked: Climb, rung: Rung, cell: Cell) -> Result:
    """Return the result of ``cell``, from its file if that has the same cell and versions."""
    if asked.directory is None:
        return measure(cell)
    name = re.sub(r"[^a-z0-9]+", "-", rung.name.lower())
    limit = "unlimited" if cell.budget is None else f"{cell.budget >> 20}mib"
    path = asked.directory / "cells" / f"{name}-size{cell.shape.size}-{limit}-{cell.device}.json"
    identity = {**asdict(cell), "versions": [__version__, torch.__version__]}
    try:
        record = read_json(path)
    except FileNotFoundError:
        record = {}
    if record.get("cell") != identity:
        record = {"cell": identity, "result": asdict(measure(cell))}
        write_json(path, record)
    return Result(**{**record["result"], "losses": tuple(record["result"]["losses"])})
