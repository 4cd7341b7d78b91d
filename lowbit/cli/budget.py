"""Per-layer recipes for ``lowbit quantize --bits`` and ``--size``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from lowbit.cli.console import errors, size
from lowbit.convert.select import Skip
from lowbit.datafree import find_data_free
from lowbit.plan import sensitivity
from lowbit.progress import bar
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes
from lowbit.recipes import recipe as find_recipe
from lowbit.sizes import budget_in, bytes_in

__all__ = ["CANDIDATES", "Budget"]

#: The default recipes to choose from.
CANDIDATES = ("int4-weight-only", "nf4", "int4-weight-only:group32", "int8-weight-only")

#: Recipes to choose from; None leaves a layer in high precision.
Candidates = list[Recipe | None]

#: Side of a matrix so large that scales per row or tensor add nothing to its bits per weight.
_LARGE = 1 << 20


def _least_bits(recipe: Recipe) -> float:
    """Bits per weight of a large matrix, scales included."""
    return 8 * recipe.weight.nbytes((_LARGE, _LARGE)) / _LARGE**2


class Budget(NamedTuple):
    """The limit of ``--bits`` or ``--size``."""

    bits: float | None
    """Bits per weight, on average."""
    size: str | None
    """Bytes of the whole model, such as ``80MB``."""
    plot: Path | None
    """File for a plot of the accuracy loss per layer."""

    @property
    def is_set(self) -> bool:
        """Whether the user set a limit."""
        return self.bits is not None or self.size is not None

    @property
    def label(self) -> str:
        """The part of a directory's name that stands for the budget."""
        return f"{self.bits:g}bit" if self.bits is not None else str(self.size).replace(" ", "")

    def check(self, text: Path | None, recipes: str | None, method: str | None) -> Candidates:
        """The recipes to choose from.

        Raises:
            ValueError: Both limits are set, there is no text, a recipe is unknown, the method needs data, or ``bits``
                is below the smallest recipe.
        """
        if self.bits is not None and self.size is not None:
            raise ValueError("--bits and --size are both set; pass only one of them")
        if text is None:
            raise ValueError("--bits and --size measure layers on a text; pass one with --text FILE")
        if self.size is not None:
            budget_in(self.size, "--size", shares=False)
        find_data_free(method, "--method with --bits or --size")
        names = CANDIDATES if recipes is None else tuple(name.strip() for name in recipes.split(","))
        candidates = [None if name == "none" else find_recipe(name) for name in names]
        smallest = min((recipe for recipe in candidates if recipe is not None), key=_least_bits, default=None)
        if smallest is None or (self.bits is not None and not math.isfinite(self.bits)):
            raise ValueError("--bits and --size expect a finite number, and at least one recipe other than none")
        if self.bits is not None and self.bits < _least_bits(smallest):
            raise ValueError(
                f"--bits {self.bits:g}: the smallest recipe, {smallest.name}, has {_least_bits(smallest):.3f} bits "
                f"per weight; raise --bits, or add a smaller recipe"
            )
        return candidates

    def choose(
        self, model: nn.Module, data: list[Tensor], candidates: Candidates, method: str | None, skip: Skip
    ) -> LayerRecipes:
        """The recipe for each layer of ``model``; prints a table to standard error."""
        with bar("measuring layers") as progress:
            scores = sensitivity(model, candidates, data, method=method, skip=skip, progress=progress)
        if self.plot is not None:
            scores.plot(self.plot)
        recipes = scores.choose(self.bits, None if self.size is None else bytes_in(self.size))
        errors.print(str(scores), soft_wrap=True)
        errors.print(
            f"chosen: {scores.bits(recipes):.3f} bits per weight, {size(scores.size(recipes))} in total, estimated "
            f"loss {scores.loss(recipes):.4g}",
            soft_wrap=True,
        )
        return layer_recipes(recipes)
