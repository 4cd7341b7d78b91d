"""The Pareto frontier of candidates with a cost and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["undominated"]

_Candidate = TypeVar("_Candidate")


def undominated(
    candidates: Iterable[_Candidate], cost_and_loss: Callable[[_Candidate], tuple[float, float]]
) -> list[_Candidate]:
    """Return the candidates for which no other has both a lower or equal cost and a lower loss, by rising cost."""
    frontier: list[_Candidate] = []
    for candidate in sorted(candidates, key=cost_and_loss):
        if not frontier or cost_and_loss(candidate)[1] < cost_and_loss(frontier[-1])[1]:
            frontier.append(candidate)
    return frontier
