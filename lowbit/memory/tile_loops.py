"""Loops over alike tiles. An estimate runs only some of their tiles, see ``lowbit.memory.fewer_tiles``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["alike", "shown_by"]

#: Chooses tiles of a loop.
Choose = Callable[[Sequence[slice]], Iterable[slice]]

_choose: Choose | None = None


def alike(tiles: Iterable[slice]) -> Iterable[slice]:
    """Return the tiles of a loop whose iterations run equal ops; while a step is estimated, some of them."""
    return tiles if _choose is None else _choose(tuple(tiles))


@contextmanager
def shown_by(choose: Choose) -> Iterator[None]:
    """Context in which ``choose`` returns the tiles that run."""
    global _choose
    before, _choose = _choose, choose
    try:
        yield
    finally:
        _choose = before
