"""Estimates of loops over many tiles from four of them.

The first and the last two tiles run. The ops of the second, and the storages that these allocate, then stand for each
tile that did not run. That holds if the second and the last but one agree: equal ops in equal order, and storages of
equal sizes that die at the same op of the same or of the next tile. Otherwise ``Unlike`` is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from lowbit.memory.fewer_blocks import Unlike
from lowbit.memory.ledger import Ledger, Piece
from lowbit.memory.tile_loops import shown_by

__all__ = ["FewerTiles"]

#: Tiles that run.
_SHOWN = 4


class _Loop(NamedTuple):
    """A loop whose middle did not run.

    Attributes:
        second: Number of the first op of the second tile.
        third: Of the last tile but one.
        last: Of the last tile.
        hidden: Number of tiles that did not run.
    """

    second: int
    third: int
    last: int
    hidden: int

    @property
    def size(self) -> int:
        """Number of ops of a tile."""
        return self.third - self.second

    def moved(self, number: int) -> int:
        """Return the new number of an op that ran."""
        return number + self.hidden * self.size if number >= self.third else number


class FewerTiles:
    """Leaves out tiles of loops while a model runs, and adds them to the record afterwards.

    Args:
        ledger: The record.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._loops = list[_Loop]()

    def left_out(self) -> AbstractContextManager[None]:
        """Context in which loops have only the tiles that run."""
        return shown_by(self._shown)

    def _shown(self, tiles: Sequence[slice]) -> Iterator[slice]:
        hidden = len(tiles) - _SHOWN
        if hidden < 1:
            yield from tiles
            return
        starts = list[int]()
        for tile in (*tiles[:2], *tiles[-2:]):
            starts.append(len(self._ledger.ops))
            yield tile
        _, second, third, last = starts
        self._loops.append(_Loop(second, third, last, hidden))

    def extend(self, seen: Any, since: int, move: Callable[[Callable[[int], int]], object]) -> int:
        """Add the ops and storages of the tiles that did not run.

        Args:
            seen: What is known of the ops, an ``estimator.Seen``.
            since: Number of an op between two passes.
            move: Called with a function that returns the new number of an op.

        Returns:
            The new number of op ``since``.

        Raises:
            Unlike: Two tiles turned out to differ.
        """
        ops = self._ledger.ops
        for loop in sorted(self._loops, reverse=True):
            self._check(loop, seen)
            self._extend_pieces(loop)
            repeated = range(loop.second, loop.third)
            order = [(number, 0) for number in range(loop.third)]
            order += [(number, k) for k in range(1, loop.hidden + 1) for number in repeated]
            order += [(number, 0) for number in range(loop.third, len(ops))]
            seen.reorder(order)
            ops[:] = [ops[number] for number, _ in order]
            move(loop.moved)
            since = loop.moved(since)
        return since

    def _check(self, loop: _Loop, seen: Any) -> None:
        ops = self._ledger.ops
        one, other = (
            [(*ops[n], seen.done[n][1]) for n in range(start, stop)]
            for start, stop in ((loop.second, loop.third), (loop.third, loop.last))
        )
        if one != other:
            raise Unlike("two tiles run different ops")
        lifetimes: tuple[list[tuple[str, ...]], ...] = ([], [])
        for piece in self._ledger.pieces:
            if loop.second <= piece.born < loop.last:
                lifetimes[piece.born >= loop.third].append(_lifetime(loop, piece))
        if sorted(lifetimes[0]) != sorted(lifetimes[1]):
            raise Unlike("storages of two tiles differ in size or lifetime")

    def _extend_pieces(self, loop: _Loop) -> None:
        """Move storages to their new times, and add those of the hidden tiles."""
        added = list[Piece]()
        for piece in self._ledger.pieces:
            if loop.second <= piece.born < loop.third and piece.died is not None:
                for k in range(1, loop.hidden + 1):
                    added.append(piece.copy(piece.born + k * loop.size, piece.died + k * loop.size, piece.layer))
            else:
                piece.born = loop.moved(piece.born)
                piece.died = None if piece.died is None else loop.moved(piece.died)
        self._ledger.pieces[:] = sorted([*self._ledger.pieces, *added], key=lambda piece: piece.born)


def _lifetime(loop: _Loop, piece: Piece) -> tuple[str, ...]:
    start = loop.third if piece.born >= loop.third else loop.second
    if piece.died is None or piece.died >= start + 2 * loop.size:
        raise Unlike("storages of a tile live longer than the next tile")
    return tuple(map(str, (piece.bytes, piece.kind, piece.layer, piece.born - start, piece.died - start)))
