"""Memory by operation: how often each op ran, the bytes that it allocated, and how many of these the peak includes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowbit.sizes import amount
from lowbit.tables import aligned

__all__ = ["BEFORE", "BETWEEN", "OpMemory", "OpTable"]

#: Rows of memory that no op allocated: before the first op, and between two ops.
BEFORE, BETWEEN = "(before)", "(between ops)"


class OpMemory(NamedTuple):
    """Memory of all calls of an op.

    Attributes:
        calls: Number of calls.
        allocated: Bytes that the calls allocated, whether or not they were freed since.
        at_peak: Bytes of these that were held at the peak.
    """

    calls: int
    allocated: int
    at_peak: int


class OpTable(dict[str, OpMemory]):
    """Memory by the name of the op, most allocated bytes first. ``print`` shows the first 20 rows."""

    def table(self, rows: int = 20) -> str:
        """Return the first ``rows`` ops as text, and the sum of the others."""
        named = list(self.items())
        cells = [_cells(name, row) for name, row in named[:rows]]
        rest = [row for _, row in named[rows:]]
        if rest:
            cells.append(_cells(f"{len(rest)} more", OpMemory(*map(sum, zip(*rest, strict=True)))))
        return aligned([("op", "calls", "allocated", "at the peak"), *cells], (1, 2, 3))

    def __str__(self) -> str:
        return self.table()

    @classmethod
    def of(cls, calls: Iterable[str], allocated: Sequence[tuple[str, int]], held: Sequence[tuple[str, int]]) -> OpTable:
        """Return the table.

        Args:
            calls: Names of the ops that ran.
            allocated: Name and bytes of each allocation.
            held: Name and bytes of each allocation that is held at the peak.
        """
        counts, sums, peaks = Counter(calls), _sums(allocated), _sums(held)
        names = {**counts, **sums, **peaks}
        rows = {name: OpMemory(counts[name], sums[name], peaks[name]) for name in names}
        return cls(sorted(rows.items(), key=lambda row: (-row[1].allocated, -row[1].at_peak, row[0])))


def _sums(sizes: Iterable[tuple[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, size in sizes:
        sums[name] += size
    return sums


def _cells(name: str, row: OpMemory) -> tuple[str, str, str, str]:
    return name, f"{row.calls:,}" if row.calls else "", amount(row.allocated), amount(row.at_peak)
