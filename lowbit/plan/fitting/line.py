"""Memory and time of a micro-batch as a function of its rows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lowbit.checkpointing.block_table import BlockTable

__all__ = ["Line"]

#: The part of the saved bytes that may be independent of the rows.
_FIXED = 0.01

#: The fields of a ``BlockTable`` that are seconds.
_TIMES = frozenset({"seconds", "recomputation"})


@dataclass
class Line:
    """Forward and backward of a micro-batch as a function of its rows.

    It is known for the whole batch, for the first half, and for the second half, when gradients already exist.
    ``single`` is the time of the ``least`` rows relative to half of the batch, since every op has a minimum time.

    Bytes are interpolated between the whole and half of the batch. Times are interpolated between half of the batch and
    the least rows; they are at least proportional to the rows, because fewer rows are not faster per row.
    """

    rows: int
    whole: BlockTable
    first: BlockTable | None = None
    second: BlockTable | None = None
    single: float = 0.0
    least: int = 1

    @property
    def half_seconds(self) -> float:
        """The time of half of the batch relative to the whole."""
        return 0.5 if self.second is None else self.second.seconds / max(self.whole.seconds, 1e-12)

    @property
    def is_proportional(self) -> bool:
        """Whether all that blocks save for backward is in proportion to the rows, and no codes of weights are."""
        if self.first is None:
            return True
        return bool(np.all(np.abs(2 * self.first.kept - self.whole.kept) <= _FIXED * self.whole.kept))

    def with_whole(self, whole: BlockTable) -> Line:
        """Return the line of a checkpointing policy with this table for the whole batch.

        Bytes that do not depend on the rows, such as those of weights and gradients, are the same with every policy.
        """
        if self.first is None or self.second is None:
            return Line(self.rows, whole)
        before, after = self.first, self.second

        def half(field: str, at: BlockTable) -> Any:
            if field in _TIMES:
                return getattr(whole, field) * self.half_seconds
            of_rows = getattr(self.whole, field) - getattr(before, field)  # of half of the rows, without checkpoints
            fixed = getattr(before, field) - of_rows
            return np.maximum(getattr(at, field) - of_rows + (getattr(whole, field) - fixed) / 2, 0.0)

        first, second = (BlockTable(**{f.name: half(f.name, at) for f in fields(BlockTable)}) for at in (before, after))
        first, second = (replace(table, peak=table.peak_of_parts) for table in (first, second))
        return Line(self.rows, whole, first, second, self.single, self.least)

    def at(self, count: int) -> BlockTable:
        """Return the table of one of ``count`` micro-batches."""
        if count == 1 or self.first is None or self.second is None:
            return self.whole
        half, rows = -(-self.rows // 2), -(-self.rows // count)
        below = (half - rows) / max(self.rows - half, 1)
        above = (rows - self.least) / max(half - self.least, 1)
        time = max(rows / half, self.single + (1 - self.single) * above)

        def on_line(field: str) -> Any:
            whole, first, second = (getattr(t, field) for t in (self.whole, self.first, self.second))
            return second * time if field in _TIMES else np.maximum(second - below * (whole - first), 0.0)

        return BlockTable(**{field.name: on_line(field.name) for field in fields(BlockTable)})
