"""Documents that share a row: runs of positions that attend only to each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from lowbit.memory.fake import value_of
from lowbit.torch_private import is_fake, without_modes

__all__ = ["Documents", "documents_of"]


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of rows of one length.

    Attributes:
        numbers: The document of each position, int32 ``[rows, length]``, counted from 0 in each row. One row holds for
            every row of a batch.
        bounds: For each row, the first position of each document, and the length at the end.
    """

    numbers: Tensor
    bounds: tuple[tuple[int, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Whether each row is one document."""
        return all(len(row) == 2 for row in self.bounds)

    @cached_property
    def longest(self) -> int:
        """The most positions of a document."""
        return max((stop - start for row in self.bounds for start, stop in pairwise(row)), default=0)

    def split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the parts of tensors ``[batch, heads, length, ...]`` for each document, views."""
        rows = zip(*(t.split(1) if len(self.bounds) > 1 else (t,) for t in tensors), strict=True)
        for bounds, row in zip(self.bounds, rows, strict=True):
            lengths = [stop - start for start, stop in pairwise(bounds)]
            yield from zip(*(t.split(lengths, 2) for t in row), strict=True)

    def around(self, batches: slice, positions: slice) -> slice:
        """Return the positions from the first to the last of all documents that have one of ``positions``."""
        rows = self._rows(batches)
        start = min(row[bisect_right(row, positions.start) - 1] for row in rows)
        return slice(start, max(row[bisect_left(row, positions.stop)] for row in rows))

    def apart(self, batches: slice, rows: slice, columns: slice) -> Tensor | None:
        """Return which keys are of another document than a query, bool ``[batches, rows, columns]``; None if none is.

        Args:
            batches: Rows of the batch.
            rows: Queries.
            columns: Keys.
        """
        both = slice(min(rows.start, columns.start), max(rows.stop, columns.stop))
        if all(bisect_right(row, both.start) == bisect_left(row, both.stop) for row in self._rows(batches)):
            return None
        numbers = self.numbers[batches if len(self.bounds) > 1 else slice(None)]
        return numbers[:, rows, None] != numbers[:, None, columns]

    def _rows(self, batches: slice) -> tuple[tuple[int, ...], ...]:
        return self.bounds[batches] if len(self.bounds) > 1 else self.bounds


def documents_of(ids: Tensor) -> Documents:
    """Return the documents of integers ``[rows, length]``: each run of equal integers is one.

    Reads values, also those that are known of fake tensors.

    Raises:
        DataDependentOutputException: ``ids`` is fake and its values are unknown.
    """
    begins = ids[:, 1:] != ids[:, :-1]
    numbers = torch.zeros(ids.shape, dtype=torch.int32, device=ids.device)
    torch.cumsum(begins, 1, dtype=torch.int32, out=numbers[:, 1:])
    value = value_of(begins) if is_fake(begins) else begins.cpu()
    if value is None:
        value = begins.nonzero()  # raises
    found: list[list[int]] = [[0] for _ in range(len(ids))]
    with without_modes():
        for row, place in value.nonzero().tolist():
            found[row].append(place + 1)
    return Documents(numbers, tuple((*row, ids.shape[1]) for row in found))
