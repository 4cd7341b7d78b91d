"""Recipes by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.recipes.definition import Recipe
from lowbit.recipes.parse import recipe

__all__ = ["LayerRecipes", "Pattern", "layer_recipes", "require_pattern"]

#: Which modules are meant, in the language of ``lowbit.models.names``: a string, or a function of module and path.
Pattern = str | Callable[[Any, str], bool]


@dataclass(frozen=True)
class LayerRecipes:
    """Which recipe each layer gets: patterns of names, of which the last that matches decides."""

    patterns: tuple[tuple[Pattern, Recipe | None], ...]

    def map(self, change: Callable[[Recipe], Recipe]) -> LayerRecipes:
        """The plan with other recipes in the place of these."""
        return LayerRecipes(tuple((pattern, chosen and change(chosen)) for pattern, chosen in self.patterns))

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Every recipe of the plan, once."""
        return tuple(dict.fromkeys(chosen for _, chosen in self.patterns if chosen is not None))

    def __str__(self) -> str:
        if [pattern for pattern, _ in self.patterns] == ["*"]:
            return str(self.patterns[0][1])
        rows = ((getattr(pattern, "__name__", pattern), chosen) for pattern, chosen in self.patterns)
        return ", ".join(f"{name}: {chosen or 'float'}" for name, chosen in rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON data; the patterns are a list, because their order counts. Raises ValueError for functions, which no
        file can hold.
        """
        functions = [pattern for pattern, _ in self.patterns if not isinstance(pattern, str)]
        if functions:
            raise ValueError(
                f"recipes by layer: the function {getattr(functions[0], '__name__', functions[0])} cannot be written "
                f"to a file; give names or patterns"
            )
        rows = [[pattern, None if chosen is None else chosen.to_dict()] for pattern, chosen in self.patterns]
        return {"patterns": rows}

    @classmethod
    def from_dict(cls, data: Any) -> LayerRecipes:
        """The Plan that ``to_dict`` described. Raises ValueError for other data."""
        rows = data.get("patterns") if isinstance(data, dict) and len(data) == 1 else None
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in rows
        ):
            raise ValueError(f"Plan: expected {{'patterns': [[pattern, recipe], ...]}}, got {data!r}")
        return layer_recipes({pattern: None if row is None else Recipe.from_dict(row) for pattern, row in rows})


def layer_recipes(recipes: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None]) -> LayerRecipes:
    """The Plan of a recipe for every layer, or of recipes by layer.

    ``{"*": "int4-weight-only", "down_proj": "int8", "lm_head": None}``: the last pattern that means a layer decides
    (``lowbit.models.names``); None, and no match, leave it as it is.
    Raises ValueError for an unknown recipe or no pattern; TypeError for what is no pattern or recipe.
    """
    if isinstance(recipes, LayerRecipes):
        return recipes
    if not isinstance(recipes, Mapping):
        return LayerRecipes((("*", recipe(recipes)),))
    if not recipes:
        raise ValueError("recipes by layer: no pattern is given; write for instance {'*': 'int8', 'lm_head': None}")
    for pattern, row in recipes.items():
        require_pattern(pattern, "recipes by layer")
        if not isinstance(row, str | Recipe | None):
            raise TypeError(
                f"recipes by layer: expected a recipe for {pattern!r}, or None to leave such layers as they are; got "
                f"{type(row).__name__}"
            )
    return LayerRecipes(tuple((pattern, None if row is None else recipe(row)) for pattern, row in recipes.items()))


def require_pattern(pattern: Any, what: str) -> None:
    """Raises TypeError for what is no pattern; classes and modules, which are callable, are none."""
    if isinstance(pattern, type):
        remedy = f"; write lambda module, path: isinstance(module, {pattern.__name__})"
    elif hasattr(pattern, "named_modules"):
        remedy = "; give the module's name, as named_modules has it"
    elif isinstance(pattern, str) or callable(pattern):
        return
    else:
        remedy = f"; write {'re:' + pattern.pattern!r}" if isinstance(pattern, re.Pattern) else ""
    name = pattern.__name__ if isinstance(pattern, type) else type(pattern).__name__
    raise TypeError(
        f"{what}: a pattern is a string such as 'down_proj', or a function of module and path; got {name}{remedy}"
    )
