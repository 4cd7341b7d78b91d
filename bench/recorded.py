"""Losses of recorded training runs by seed, and differences between runs: mean, error, interval.

All loss changes in documents and plans are read from here, over all recorded seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit.files import read_records
from lowbit.tables import markdown

__all__ = ["Difference", "change", "difference", "losses", "losses_table", "student"]

#: Student's t for 95%, two-sided, by degrees of freedom. Above the last: slightly more than the normal distribution's.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T_BEYOND = 2.2
#: Half-width of the interval that a study should reach, in percent.
RESOLUTION = 0.2

#: Last held-out losses by seed; None: the run failed.
BySeed = Mapping[int, float | None]


def student(freedom: int) -> float:
    """The quantile for 95%; infinite for 0 degrees of freedom."""
    if freedom < 1:
        return math.inf
    return _T[freedom - 1] if freedom <= len(_T) else _T_BEYOND


@dataclass(frozen=True)
class Difference:
    """Paired differences in percent of the other loss: mean, standard deviation of one pair, number of pairs."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        """In percent, with the standard error if there is more than one pair."""
        return f"{_signed(self.mean)}%" + (f" ± {self.error:.2f}%" if self.count > 1 else "")

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.deviation / math.sqrt(self.count)

    @property
    def half_width(self) -> float:
        """Half-width of the 95% interval."""
        return math.inf if self.count < 2 else student(self.count - 1) * self.error

    @property
    def interval(self) -> tuple[float, float]:
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def verdict(self) -> str:
        """Whether the change exceeds the noise of seeds, in words."""
        if self.count < 2:
            return "unknown: one seed"
        low, high = self.interval
        return "yes" if low <= 0 <= high else "no"

    def needed(self, width: float = RESOLUTION) -> int:
        """The number of pairs for a half-width of at most ``width``, with the same deviation."""
        count = 2
        while student(count - 1) * self.deviation / math.sqrt(count) > width:
            count += 1
        return count


def _signed(percent: float) -> str:
    """With two decimals; a change that rounds to zero has no minus sign."""
    return f"{round(percent, 2) + 0.0:+.2f}"


def difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    """The Difference of pairs (loss, other loss); None without pairs."""
    if not pairs:
        return None
    changes = [100 * (loss / other - 1) for loss, other in pairs]
    return Difference(statistics.fmean(changes), statistics.stdev(changes) if len(changes) > 1 else 0.0, len(changes))


def losses(table: Path) -> dict[str, dict[int, float | None]]:
    """The last held-out losses of a table of runs, one record per run and seed.

    Args:
        table: Such as ``bench/results/convergence.jsonl``.

    Returns:
        By name of the run, then by seed; None for a run that failed.

    Raises:
        ValueError: The table has no record.
    """
    by_run: dict[str, dict[int, float | None]] = {}
    for record in read_records(table).values():
        about = record["about"]
        by_run.setdefault(about.get("run") or about["name"], {})[about["seed"]] = record["held_out"][-1][1]
    if not by_run:
        raise ValueError(f"{table} has no record of a training run; expected lines that lowbit bench writes")
    return by_run


def change(run: BySeed, base: BySeed) -> Difference | None:
    """The loss of a run relative to another, over the seeds that both have. None: they share no seed."""
    return difference(
        [
            (mine, other)
            for seed in sorted(run.keys() & base.keys())
            if (mine := run[seed]) is not None and (other := base[seed]) is not None
        ]
    )


def losses_table(rows: Mapping[str, BySeed], base: str) -> str:
    """Last losses by run and seed, and the change from the run ``base`` over the seeds that both have."""
    seeds = sorted({seed for row in rows.values() for seed in row})
    head = ("run", *(f"seed {seed}" for seed in seeds), "change", "95% interval, %", "within the noise of seeds")
    cells = []
    for name in sorted(rows, key=lambda name: (name != base, name)):
        shown = ["-" if (loss := rows[name].get(seed)) is None else f"{loss:.4f}" for seed in seeds]
        found = None if name == base else change(rows[name], rows[base])
        cells.append((name, *shown, *(_compared(found) if found else ("", "", ""))))
    return markdown(head, cells, numbers=range(1, len(seeds) + 3))


def _compared(found: Difference) -> tuple[str, str, str]:
    low, high = found.interval
    return str(found), "-" if found.count < 2 else f"{_signed(low)} to {_signed(high)}", found.verdict
