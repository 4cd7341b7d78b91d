"""What each layer of a model loses by each recipe, and the recipes by layer that lose the least for their size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.plan.frontier import undominated
from lowbit.recipes import Recipe
from lowbit.report import family
from lowbit.sizes import amount
from lowbit.tables import aligned

__all__ = ["FLOAT", "Option", "Score", "Sensitivity", "allocate"]

#: The name of the choice to leave a layer as it is.
FLOAT = "float"

#: The columns of the table.
_HEAD = ("layer", "recipe", "bits", "SQNR dB: weight", "input", "output", "loss")

#: A plot has so many layers at most, with room for a name each.
_MOST_DRAWN = 40


@dataclass(frozen=True)
class Score:
    """A layer with a recipe. ``weights``: how many numbers its weights hold; ``bytes``: of codes and scales.

    ``loss``: what it is estimated to cost. ``weight``, ``input``, ``output``: the SQNR of each in dB, inf without
    error.
    """

    name: str
    recipe: str
    weights: int
    bytes: int
    loss: float
    weight: float
    input: float
    output: float

    @property
    def bits(self) -> float:
        """A weight, scales included."""
        return 8 * self.bytes / self.weights


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """What each layer of a model loses by each recipe. ``print`` shows a table, ``to_dict()`` gives JSON data.

    ``scores``: by layer and recipe, in the order of the model. ``groups``: the layers that share a choice, because
    they are given the same input or have one weight. ``by``: what the ``loss`` of a score is of, the model's ``"loss"``
    or the layer's ``"output"``. ``others``: the bytes of all else in the model.
    """

    scores: dict[str, dict[str, Score]]
    groups: tuple[tuple[str, ...], ...]
    recipes: dict[str, Recipe | None]
    by: str
    others: int

    def choose(self, bits: float | None = None, size: int | None = None) -> dict[str, Recipe | None]:
        """The recipe of each layer, for ``quantize_`` and ``calibrate``, with the least sum of losses. Layers deeper in
        the model come later, since the name of a layer may be the end of another's, and the last match wins.

        ``bits``: a weight, scales included, on average over these layers; or ``size``: bytes of the whole model.
        Raises ValueError for neither or both, for what is no finite number, and where no choice is as small.
        """
        given = [value for value in (bits, size) if value is not None]
        if len(given) != 1 or not math.isfinite(given[0]):
            raise ValueError(
                f"choose: give bits a weight, or the size of the model in bytes, for instance bits=4.5; got "
                f"bits={bits} and size={size}"
            )
        weights = sum(next(iter(rows.values())).weights for rows in self.scores.values())
        budget = math.floor(bits * weights / 8) if bits is not None else int(size or 0) - self.others
        names = list(self.recipes)
        options = [
            [
                Option(sum(self.scores[n][r].bytes for n in group), math.fsum(self.scores[n][r].loss for n in group))
                for r in names
            ]
            for group in self.groups
        ]
        try:
            chosen = allocate(options, budget)
        except ValueError:
            least = sum(min(option.cost for option in row) for row in options)
            raise ValueError(
                f"choose: the smallest choice takes {8 * least / weights:.3f} bits a weight, "
                f"{amount(least + self.others)} in all; ask for as much, or give a recipe that is smaller"
            ) from None
        recipe_of = {name: names[index] for group, index in zip(self.groups, chosen, strict=True) for name in group}
        return {name: self.recipes[recipe_of[name]] for name in sorted(self.scores, key=lambda name: name.count("."))}

    def bits(self, chosen: Mapping[str, Recipe | None]) -> float:
        """Bits a weight of ``chosen``, scales included."""
        rows = self._rows(chosen)
        return 8 * sum(row.bytes for row in rows) / sum(row.weights for row in rows)

    def loss(self, chosen: Mapping[str, Recipe | None]) -> float:
        """The sum of the losses of ``chosen``."""
        return math.fsum(row.loss for row in self._rows(chosen))

    def size(self, chosen: Mapping[str, Recipe | None]) -> int:
        """Bytes of the whole model with ``chosen``."""
        return self.others + sum(row.bytes for row in self._rows(chosen))

    def _rows(self, chosen: Mapping[str, Recipe | None]) -> list[Score]:
        names = {recipe: name for name, recipe in self.recipes.items()}
        return [rows[names[chosen[name]]] for name, rows in self.scores.items()]

    def to_dict(self) -> dict[str, Any]:
        """JSON data. An infinite SQNR is None."""
        rows = [asdict(score) for rows in self.scores.values() for score in rows.values()]
        finite = [
            {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
            for row in rows
        ]
        return {"by": self.by, "others": self.others, "groups": [list(g) for g in self.groups], "scores": finite}

    def __repr__(self) -> str:
        return f"<Sensitivity of {len(self.scores)} layers to {', '.join(self.recipes)}; print it for a table>"

    def __str__(self) -> str:
        return self.table()

    def table(self, every_layer: bool = False) -> str:
        """Lines of layers and recipes, with the sum of losses; layers whose names differ in numbers only are one line,
        unless ``every_layer``.
        """
        alike: dict[tuple[str, str, float], list[Score]] = {}
        for row in (rows[recipe] for recipe in self.recipes for rows in self.scores.values()):
            alike.setdefault((row.recipe, row.name if every_layer else family(row.name), row.bits), []).append(row)
        lines: list[tuple[str, ...]] = [_HEAD]
        for (recipe, name, bits), rows in alike.items():
            shown = [_range([getattr(row, what) for row in rows]) for what in ("weight", "input", "output")]
            lines.append((name, recipe, f"{bits:.3f}", *shown, f"{math.fsum(row.loss for row in rows):.4g}"))
        return aligned(lines, range(2, len(_HEAD)))

    def worst(self, count: int = 10) -> list[Score]:
        """The layers that lose the most, by falling loss, each with the recipe by which it loses the most."""
        found = [max(rows.values(), key=lambda score: score.loss) for rows in self.scores.values()]
        return sorted(found, key=lambda score: -score.loss)[:count]

    def plot(self, path: str | Path) -> None:
        """Draw losses and the SQNR of outputs over the layers to an image. Raises ImportError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("Sensitivity.plot needs matplotlib: pip install matplotlib") from None
        names = list(self.scores)
        worst = {score.name for score in self.worst(_MOST_DRAWN)}
        shown = [name for name in names if name in worst]
        figure = Figure(figsize=(8.5, 8), layout="constrained")
        losses, outputs = figure.subplots(2, 1, sharex=True)
        for recipe in self.recipes:
            if recipe == FLOAT:
                continue
            rows = [self.scores[name][recipe] for name in shown]
            losses.semilogy([row.loss for row in rows], marker=".", label=recipe)
            outputs.plot([row.output for row in rows], marker=".", label=recipe)
        losses.set_ylabel("loss" if self.by == "loss" else "error of the output")
        some = "all layers" if len(shown) == len(names) else f"the {len(shown)} worst of {len(names)} layers"
        losses.set_title(f"What each layer loses by each recipe, {some}", loc="left", size=10)
        losses.legend()
        outputs.set_ylabel("SQNR of the output, dB")
        outputs.set_xticks(range(len(shown)), shown, rotation=90, fontsize=8)
        figure.savefig(path, dpi=150)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


# -- one choice for each of several groups: the multiple-choice knapsack ----------------------------------------------
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
        rest, left = bounds[-2 - index], budget - cheapest[-2 - index]
        limit = incumbent - rest + price * budget
        limit += 1e-9 * (incumbent + price * budget)  # sums in floats
        found = [
            _State(state.cost + option.cost, state.loss + option.loss, choice, state)
            for state in states
            for choice, option in enumerate(options)
            if state.cost + option.cost <= left
            and state.loss + option.loss + price * (state.cost + option.cost) <= limit
        ]
        states = undominated(found, lambda state: (state.cost, state.loss))
    last: _State | None = states[-1]
    chosen: list[int] = []
    while last is not None and last.before is not None:
        chosen.append(last.choice)
        last = last.before
    return chosen[::-1]


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
    return price, math.fsum(option.loss for option in taken)


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
