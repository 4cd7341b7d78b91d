"""One choice for each of several groups, with the least loss that a budget allows: the multiple-choice knapsack."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

__all__ = ["Option", "allocate"]


class Option(NamedTuple):
    """What a choice costs, an integer, and what is lost by it."""

    cost: int
    loss: float


class _State(NamedTuple):
    """Choices for the first groups: their cost and loss, the last of them, and those before it."""

    cost: int
    loss: float
    choice: int
    before: _State | None


def allocate(groups: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """The index of an option for each group, so that the costs sum to ``budget`` at most and the losses to the least.

    The optimum, by dynamic programming over costs: of partial choices only those stay that no other beats in both, and
    that the relaxed problem (Lagrange multiplier of the budget) does not rule out (Pisinger, EJOR 83, 1995).
    Raises ValueError where the cheapest choices cost more than ``budget``.
    """
    least = sum(min(option.cost for option in options) for options in groups)
    if least > budget:
        raise ValueError(f"the cheapest choice costs {least}, and the budget is {budget}")
    price, incumbent = _relaxed(groups, budget)
    # What the groups from each on lose at least, with a price on their cost; and what they cost at least.
    bounds, cheapest = [0.0], [0]
    for options in reversed(groups):
        bounds.append(bounds[-1] + min(option.loss + price * option.cost for option in options))
        cheapest.append(cheapest[-1] + min(option.cost for option in options))
    states: list[_State] = [_State(0, 0.0, -1, None)]
    for index, options in enumerate(groups):
        rest, room = bounds[-2 - index], budget - cheapest[-2 - index]
        limit = incumbent - rest + price * budget
        limit += 1e-9 * (incumbent + price * budget)  # sums in floats
        found = [
            _State(state.cost + option.cost, state.loss + option.loss, choice, state)
            for state in states
            for choice, option in enumerate(options)
            if state.cost + option.cost <= room
            and state.loss + option.loss + price * (state.cost + option.cost) <= limit
        ]
        states = _undominated(found)
    last: _State | None = states[-1]
    chosen: list[int] = []
    while last is not None and last.before is not None:
        chosen.append(last.choice)
        last = last.before
    return chosen[::-1]


def _undominated(states: list[_State]) -> list[_State]:
    """By rising cost and falling loss."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.cost, state.loss)):
        if not kept or state.loss < kept[-1].loss:
            kept.append(state)
    return kept


def _relaxed(groups: Sequence[Sequence[Option]], budget: int) -> tuple[float, float]:
    """The loss that a unit of the budget saves at the optimum of the relaxed problem, and the loss of one choice that
    fits: the steps along the lower convex hulls of the groups, those first that save the most for their cost.
    """
    hulls = [_hull(options) for options in groups]
    steps = [
        (-_slope(*hull[position - 1 : position + 1]), number, position)
        for number, hull in enumerate(hulls)
        for position in range(1, len(hull))
    ]
    taken, price, stopped = [hull[0] for hull in hulls], 0.0, set()
    cost = sum(option.cost for option in taken)
    for saved, number, position in sorted(steps, key=lambda step: (-step[0], step[2])):
        after = hulls[number][position]
        if number in stopped or cost + after.cost - taken[number].cost > budget:
            price = price or saved
            stopped.add(number)  # its later steps begin where this one ends
            continue
        cost += after.cost - taken[number].cost
        taken[number] = after
    return price, fsum(option.loss for option in taken)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull, by rising cost and falling loss."""
    hull: list[Option] = []
    for option in sorted(set(options)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    return (b.loss - a.loss) / (b.cost - a.cost)
