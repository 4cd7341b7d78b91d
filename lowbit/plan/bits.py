"""Sensitivity of layers to recipes, and the choice of recipes with the least loss for a model size or a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.plan.frontier import undominated
from lowbit.recipes import Recipe
from lowbit.report import family
from lowbit.sizes import amount
from lowbit.tables import aligned

__all__ = ["FLOAT", "Option", "Score", "Sensitivity", "allocate"]

#: Name of the choice that leaves a layer in high precision.
FLOAT = "float"

_HEAD = ("layer", "recipe", "bits", "SQNR dB: weight", "input", "output", "loss")

#: A recipe counts as faster if it saves more than this share of the time, because measured times vary.
_NOISE = 0.05

#: Most layers in a plot, so that every name is readable.
_MOST_DRAWN = 40


@dataclass(frozen=True)
class Score:
    """The size and the estimated loss of one layer with one recipe."""

    name: str
    """Path of the layer."""
    recipe: str
    """Name of the recipe."""
    weights: int
    """Number of weight elements."""
    bytes: int
    """Bytes of quantized values and scales."""
    loss: float
    """Estimated increase of the loss, in the units of ``Sensitivity.by``."""
    weight: float
    """SQNR of the weight in dB; inf without error."""
    input: float
    """SQNR of the input in dB; inf without error."""
    output: float
    """SQNR of the output in dB; inf without error."""
    seconds: float | None = None
    """Measured seconds of the layer in one batch; None without ``sensitivity(time=True)``."""

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.bytes / self.weights


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """The estimated loss of each layer of a model with each recipe. ``print`` shows a table."""

    scores: dict[str, dict[str, Score]]
    """Scores by layer and recipe, in the order of the model."""
    groups: tuple[tuple[str, ...], ...]
    """Layers that get the same recipe, because they have the same input or share a weight."""
    recipes: dict[str, Recipe | None]
    """The recipes by name; None leaves a layer in high precision."""
    by: str
    """Meaning of ``Score.loss``: the model's ``"loss"``, or the relative error of the layer's ``"output"``."""
    others: int
    """Bytes of all other tensors of the model."""
    plain_seconds: dict[str, float] | None = None
    """Measured seconds of each layer in high precision; None without ``sensitivity(time=True)``."""

    def choose(
        self, bits: float | None = None, size: int | None = None, time: float | str | bool | None = None
    ) -> dict[str, Recipe | None]:
        """Return the recipe of each layer, for ``quantize_`` and ``calibrate``, with the least sum of losses.

        The dict has layers with longer paths last. The path of one layer may be the end of another layer's path, and
        the last match counts.

        Args:
            bits: Largest average number of bits per weight of these layers, scales included.
            size: Largest size of the whole model in bytes.
            time: Largest time of these layers relative to the layers in high precision, such as ``"0.8x"`` or 0.8.
                True gives each layer its fastest recipe. Layers that no recipe makes faster by more than 5% then stay
                in high precision, if None is one of the recipes. Needs ``sensitivity(time=True)``.

        Raises:
            ValueError: Unless exactly one limit is given, and it is finite; if no choice is small or fast enough; for
                ``time`` if no times were measured.
        """
        if sum(limit is not None for limit in (bits, size, time)) != 1 or not _finite(bits, size, time):
            raise ValueError(
                f"choose: expected bits per weight, such as bits=4.5, or the size of the model in bytes, or "
                f"time='0.8x'; got bits={bits}, size={size} and time={time!r}"
            )
        if time is not None:
            chosen = self._chosen_by_time(time)
        else:
            chosen = self._chosen_by_bytes(bits, size)
        names = list(self.recipes)
        recipe_of = {name: names[index] for group, index in zip(self.groups, chosen, strict=True) for name in group}
        return {name: self.recipes[recipe_of[name]] for name in sorted(self.scores, key=lambda name: name.count("."))}

    def _options(self, cost: Callable[[Score], int]) -> list[list[Option]]:
        """The options of each group in the order of the recipes."""
        return [
            [
                Option(sum(cost(self.scores[n][r]) for n in group), math.fsum(self.scores[n][r].loss for n in group))
                for r in self.recipes
            ]
            for group in self.groups
        ]

    def _chosen_by_bytes(self, bits: float | None, size: int | None) -> list[int]:
        weights = sum(next(iter(rows.values())).weights for rows in self.scores.values())
        budget = math.floor(bits * weights / 8) if bits is not None else int(size or 0) - self.others

        def refusal(least: int) -> str:
            return (
                f"choose: the smallest choice needs {8 * least / weights:.3f} bits per weight, "
                f"{amount(least + self.others)} in total; ask for as much, or add a smaller recipe"
            )

        return _allocated(self._options(lambda score: score.bytes), budget, refusal)

    def _chosen_by_time(self, time: float | str | bool) -> list[int]:
        if self.plain_seconds is None:
            raise ValueError("choose: no times were measured; pass time=True to lowbit.sensitivity")
        options = self._options(lambda score: _nanoseconds(score.seconds or 0.0))
        if time is True:
            plain = list(self.recipes).index(FLOAT) if FLOAT in self.recipes else None
            return [_fastest(row, plain) for row in options]
        plain_time = sum(_nanoseconds(seconds) for seconds in self.plain_seconds.values())

        def refusal(least: int) -> str:
            return (
                f"choose: the fastest choice takes {least / max(plain_time, 1):.3f}x the time of the plain layers; ask "
                f"for as much, or add a faster recipe"
            )

        return _allocated(options, math.floor(_share(time) * plain_time), refusal)

    def bits(self, chosen: Mapping[str, Recipe | None]) -> float:
        """Return the bits per weight of ``chosen``, scales included."""
        rows = self._rows(chosen)
        return 8 * sum(row.bytes for row in rows) / sum(row.weights for row in rows)

    def loss(self, chosen: Mapping[str, Recipe | None]) -> float:
        """Return the sum of the losses of ``chosen``."""
        return math.fsum(row.loss for row in self._rows(chosen))

    def size(self, chosen: Mapping[str, Recipe | None]) -> int:
        """Return the bytes of the whole model with ``chosen``."""
        return self.others + sum(row.bytes for row in self._rows(chosen))

    def seconds(self, chosen: Mapping[str, Recipe | None]) -> float:
        """Return the measured seconds of these layers with ``chosen``. Raises ValueError if none were measured."""
        if self.plain_seconds is None:
            raise ValueError("seconds: no times were measured; pass time=True to lowbit.sensitivity")
        return math.fsum(row.seconds or 0.0 for row in self._rows(chosen))

    def _rows(self, chosen: Mapping[str, Recipe | None]) -> list[Score]:
        names = {recipe: name for name, recipe in self.recipes.items()}
        return [rows[names[chosen[name]]] for name, rows in self.scores.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data. An infinite SQNR is None."""
        rows = [asdict(score) for rows in self.scores.values() for score in rows.values()]
        finite = [
            {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
            for row in rows
        ]
        return {
            "by": self.by, "others": self.others, "groups": [list(g) for g in self.groups], "scores": finite,
            "plain_seconds": self.plain_seconds,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<Sensitivity of {len(self.scores)} layers to {', '.join(self.recipes)}; print it for a table>"

    def __str__(self) -> str:
        return self.table()

    def table(self, every_layer: bool = False) -> str:
        """Return a table of layers and recipes with the sums of losses.

        Layers whose names differ only in numbers share a row, unless ``every_layer`` is true.
        """
        alike: dict[tuple[str, str, float], list[Score]] = {}
        for row in (rows[recipe] for recipe in self.recipes for rows in self.scores.values()):
            alike.setdefault((row.recipe, row.name if every_layer else family(row.name), row.bits), []).append(row)
        head = _HEAD if self.plain_seconds is None else (*_HEAD, "time")
        lines: list[tuple[str, ...]] = [head]
        for (recipe, name, bits), rows in alike.items():
            shown = [_range([getattr(row, part) for row in rows]) for part in ("weight", "input", "output")]
            loss = f"{math.fsum(row.loss for row in rows):.4g}"
            lines.append((name, recipe, f"{bits:.3f}", *shown, loss, *self._relative_time(rows)))
        return aligned(lines, range(2, len(head)))

    def _relative_time(self, rows: Sequence[Score]) -> tuple[str, ...]:
        """The column ``time``: relative to the same layers in high precision."""
        if self.plain_seconds is None:
            return ()
        plain = math.fsum(self.plain_seconds[row.name] for row in rows)
        return (f"{math.fsum(row.seconds or 0.0 for row in rows) / plain:.2f}x" if plain else "",)

    def worst(self, count: int = 10) -> list[Score]:
        """Return the layers with the largest losses, each with its worst recipe, by falling loss."""
        scores = [max(rows.values(), key=lambda score: score.loss) for rows in self.scores.values()]
        return sorted(scores, key=lambda score: -score.loss)[:count]

    def plot(self, path: str | Path) -> None:
        """Plot losses and output SQNR of the layers to an image file. Raises ImportError without matplotlib."""
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
        losses.set_ylabel("loss" if self.by == "loss" else "output error")
        selection = "all layers" if len(shown) == len(names) else f"the {len(shown)} worst of {len(names)} layers"
        losses.set_title(f"Loss of each layer with each recipe, {selection}", loc="left", size=10)
        losses.legend()
        outputs.set_ylabel("output SQNR, dB")
        outputs.set_xticks(range(len(shown)), shown, rotation=90, fontsize=8)
        figure.savefig(path, dpi=150)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


# -- limits of time ---------------------------------------------------------------------------------------------------
def _finite(bits: float | None, size: int | None, time: float | str | bool | None) -> bool:
    """Whether the limit is a finite number, or True for ``time``."""
    if time is not None:
        return time is True or (time is not False and 0 < _share(time) < math.inf)
    return all(limit is None or math.isfinite(limit) for limit in (bits, size))


def _share(time: float | str) -> float:
    """The factor in ``"0.8x"`` or 0.8; NaN for other text."""
    try:
        return float(time.removesuffix("x") if isinstance(time, str) else time)
    except (TypeError, ValueError):
        return math.nan


def _nanoseconds(seconds: float) -> int:
    """Costs of ``allocate`` are whole numbers."""
    return round(1e9 * seconds)


def _allocated(groups: Sequence[Sequence[Option]], budget: int, refusal: Callable[[int], str]) -> list[int]:
    """Return ``allocate(groups, budget)``. If nothing fits, raise ValueError with the refusal of the least cost."""
    try:
        return allocate(groups, budget)
    except ValueError:
        least = sum(min(option.cost for option in row) for row in groups)
        raise ValueError(refusal(least)) from None


def _fastest(options: Sequence[Option], plain: int | None) -> int:
    """The fastest option, of equally fast ones the one with the least loss; ``plain`` unless it is clearly slower."""
    best = min(range(len(options)), key=lambda index: options[index])
    if plain is not None and options[best].cost > (1 - _NOISE) * options[plain].cost:
        return plain
    return best


# -- the multiple-choice knapsack problem -----------------------------------------------------------------------------
class Option(NamedTuple):
    """The cost of a choice, in bytes, and its loss."""

    cost: int
    loss: float


class _State(NamedTuple):
    """A choice for each of the first groups: cost and loss of all, the last choice, and the state before it."""

    cost: int
    loss: float
    choice: int
    before: _State | None


def allocate(groups: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Return the index of an option for each group, with the least sum of losses and costs of at most ``budget``.

    The result is the optimum. Dynamic programming over costs keeps the undominated partial choices that the relaxed
    problem (Lagrange multiplier of the budget) does not rule out (Pisinger, EJOR 83, 1995).

    Raises:
        ValueError: If the cheapest options cost more than ``budget``.
    """
    least = sum(min(option.cost for option in options) for options in groups)
    if least > budget:
        raise ValueError(f"the cheapest choice costs {least}, which is above the budget of {budget}")
    price, incumbent = _relaxed(groups, budget)
    # Lower bounds for the last groups: of their loss with the price of their cost, and of their cost.
    bounds, cheapest = [0.0], [0]
    for options in reversed(groups):
        bounds.append(bounds[-1] + min(option.loss + price * option.cost for option in options))
        cheapest.append(cheapest[-1] + min(option.cost for option in options))
    states: list[_State] = [_State(0, 0.0, -1, None)]
    for index, options in enumerate(groups):
        rest, left = bounds[-2 - index], budget - cheapest[-2 - index]
        limit = incumbent - rest + price * budget
        limit += 1e-9 * (incumbent + price * budget)  # for rounding of the sums
        reached = [
            _State(state.cost + option.cost, state.loss + option.loss, choice, state)
            for state in states
            for choice, option in enumerate(options)
            if state.cost + option.cost <= left
            and state.loss + option.loss + price * (state.cost + option.cost) <= limit
        ]
        states = undominated(reached, lambda state: (state.cost, state.loss))
    last: _State | None = states[-1]
    chosen: list[int] = []
    while last is not None and last.before is not None:
        chosen.append(last.choice)
        last = last.before
    return chosen[::-1]


def _relaxed(groups: Sequence[Sequence[Option]], budget: int) -> tuple[float, float]:
    """Solve the relaxed problem: take the steps on the lower convex hulls of the groups, the best ratio first.

    Returns:
        The loss that one more unit of the budget saves at the optimum, and the loss of one choice that fits.
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
            stopped.add(number)  # the group's later steps start from this one
            continue
        cost += after.cost - taken[number].cost
        taken[number] = after
    return price, math.fsum(option.loss for option in taken)


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull, by rising cost and falling loss."""
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
