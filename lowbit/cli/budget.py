"""Recipes by layer for ``lowbit quantize --bits`` and ``--size``."""

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

#: What is chosen from where the user names no recipes.
CANDIDATES = ("int4-weight-only", "nf4", "int4-weight-only:group32", "int8-weight-only")

#: What there is to choose from; None: a layer stays as it is.
Candidates = list[Recipe | None]

#: The side of a matrix beside which what a whole row or tensor shares is nothing.
_LARGE = 1 << 20


def _least_bits(recipe: Recipe) -> float:
    """What a recipe takes for a weight of a matrix that is large in both directions, scales included."""
    return 8 * recipe.weight.nbytes((_LARGE, _LARGE)) / _LARGE**2


class Budget(NamedTuple):
    """What the user allows: bits a weight or bytes in all. ``plot``: where what layers lose is drawn."""

    bits: float | None
    size: str | None
    plot: Path | None

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.bits is not None or self.size is not None

    @property
    def label(self) -> str:
        """What it is called in the name of a directory."""
        return f"{self.bits:g}bit" if self.bits is not None else str(self.size).replace(" ", "")

    def check(self, text: Path | None, recipes: str | None, method: str | None) -> Candidates:
        """The recipes to choose from. Raises ValueError for both kinds of budget, no text, unknown recipes, a method
        that needs data, and bits below those of the smallest recipe.
        """
        if self.bits is not None and self.size is not None:
            raise ValueError("--bits and --size are two budgets; give one of them")
        if text is None:
            raise ValueError("--bits and --size choose recipes by what layers compute; give a text with --text FILE")
        if self.size is not None:
            budget_in(self.size, "--size", shares=False)
        find_data_free(method, "--method with --bits or --size")
        names = CANDIDATES if recipes is None else tuple(name.strip() for name in recipes.split(","))
        found = [None if name == "none" else find_recipe(name) for name in names]
        smallest = min((recipe for recipe in found if recipe is not None), key=_least_bits, default=None)
        if smallest is None or (self.bits is not None and not math.isfinite(self.bits)):
            raise ValueError("--bits and --size take a number, and recipes to choose from besides none")
        if self.bits is not None and self.bits < _least_bits(smallest):
            raise ValueError(
                f"--bits {self.bits:g}: the smallest choice takes {_least_bits(smallest):.3f} bits a weight "
                f"({smallest.name}); ask for as much, or name a smaller recipe"
            )
        return found

    def choose(
        self, model: nn.Module, data: list[Tensor], candidates: Candidates, method: str | None, skip: Skip
    ) -> LayerRecipes:
        """The recipes by layer for ``model``, of which a table is printed to standard error."""
        with bar("measuring layers") as progress:
            scores = sensitivity(model, candidates, data, method=method, skip=skip, progress=progress)
        if self.plot is not None:
            scores.plot(self.plot)
        chosen = scores.choose(self.bits, None if self.size is None else bytes_in(self.size))
        errors.print(str(scores), soft_wrap=True)
        errors.print(
            f"chosen: {scores.bits(chosen):.3f} bits a weight, {size(scores.size(chosen))} in all, estimated loss "
            f"{scores.loss(chosen):.4g}",
            soft_wrap=True,
        )
        return layer_recipes(chosen)
