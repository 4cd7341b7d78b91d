"""The climb: each rung at the shape that plain fp32 does not fit, and the largest shape that trains in its budget."""

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

__all__ = ["Climb", "Ladder", "Row", "climb", "largest"]

#: By how much losses of another order of sums may differ, as a fraction: half a unit in the last place of bf16.
_CLOSE = 2.0**-8
#: A rung that does not lower the peak to this part of the one below is left out of those above.
_LOWER = 0.99


@dataclass(frozen=True)
class Climb:
    """What is climbed. ``budget`` in bytes. ``search``: how many shapes are tried for the largest of a rung; 0: none.
    ``directory``: where each finished cell is kept, and looked for.
    """

    budget: int
    device: str = "cpu"
    steps: int = 3
    search: int = 6
    directory: Path | None = None


@dataclass(frozen=True)
class Row:
    """A rung climbed.

    ``limited`` is the ladder's shape under the limit; ``whole`` the same, or without the limit where memory ran out
    (None: the machine has too little). ``kept``: whether rungs above have it too. ``alike``: whether the losses are to
    those of the rung below what the rung promises, None where it promises nothing or there is nothing to compare.
    ``largest``: the largest shape found to train within the budget, None where none was; ``beyond``: the next one that
    is known not to.
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
    """What was climbed on which shape, and its rows."""

    climb: Climb
    shape: Shape
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
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
    """Climb ``rungs`` one after the other, each on top of those below that lower the peak.

    Raises: ValueError for a budget that no shape exceeds clearly; RuntimeError where a process fails otherwise than by
    its limit; OSError where results cannot be kept.
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
    kept = base is None or whole is None or whole.peak < _LOWER * base.peak
    row = Row(rung, settings, limited, whole, kept, _alike(rung, whole, base))
    if not asked.search or not kept:
        return row
    tried = {shape.size: limited.fits}

    def fits(size: int) -> bool:
        tried[size] = _measured(asked, rung, replace(cell, shape=replace(shape, size=size), steps=2)).fits
        return tried[size]

    found = largest(fits, tried, _guess(shape, limited if whole is None else whole, asked.budget), asked.search)
    beyond = min((size for size, fitted in tried.items() if not fitted), default=None)
    return replace(row, largest=replace(shape, size=found) if found else None, beyond=beyond)


def _has_room(cell: Cell) -> bool:
    """Whether a step of plain fp32 in each process surely fits the machine."""
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
    """The size whose peak would be the budget, if peaks grew as the textbook's sum does."""
    each, size = measured.peak / sum(textbook(shape).values()), 1
    while each * sum(textbook(replace(shape, size=size + 1)).values()) <= budget:
        size += 1
    return size


def largest(fits: Callable[[int], bool], tried: dict[int, bool], guess: int, tries: int) -> int:
    """The largest size that fits, of what is ``tried`` and of at most ``tries`` more; 0 where none does.

    ``fits`` notes in ``tried`` what it finds. The guess comes first, then steps that double from what is known, then
    halves of what is between.
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


# -- cells that are kept ----------------------------------------------------------------------------------------------
def _measured(asked: Climb, rung: Rung, cell: Cell) -> Result:
    """The result of ``cell``, from its file where there is one of the same cell and versions."""
    if asked.directory is None:
        return measure(cell)
    name = re.sub(r"[^a-z0-9]+", "-", rung.name.lower())
    limit = "unlimited" if cell.budget is None else f"{cell.budget >> 20}mib"
    path = asked.directory / "cells" / f"{name}-size{cell.shape.size}-{limit}-{cell.device}.json"
    identity = {**asdict(cell), "versions": [__version__, torch.__version__]}
    try:
        kept = read_json(path)
    except FileNotFoundError:
        kept = {}
    if kept.get("cell") != identity:
        kept = {"cell": identity, "result": asdict(measure(cell))}
        write_json(path, kept)
    return Result(**{**kept["result"], "losses": tuple(kept["result"]["losses"])})
