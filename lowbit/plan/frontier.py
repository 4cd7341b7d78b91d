"""What is worth choosing from: of things with a cost and a loss those that nothing is better than in both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["undominated"]

_Thing = TypeVar("_Thing")


def undominated(things: Iterable[_Thing], of: Callable[[_Thing], tuple[float, float]]) -> list[_Thing]:
    """Those of ``things`` that no other has at most the cost and less of the loss of, by rising cost. ``of``: a
    thing's cost and loss.
    """
    kept: list[_Thing] = []
    for thing in sorted(things, key=of):
        if not kept or of(thing)[1] < of(kept[-1])[1]:
            kept.append(thing)
    return kept
