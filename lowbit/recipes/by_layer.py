"""LayerRecipes: which recipe each layer gets, by patterns of layer names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.recipes.definition import Recipe
from lowbit.recipes.parse import recipe

__all__ = ["LayerRecipes", "Pattern", "layer_recipes", "require_pattern"]

#: Selects modules: a string in the syntax of ``lowbit.models.names``, or a function of module and path.
Pattern = str | Callable[[Any, str], bool]


@dataclass(frozen=True)
class LayerRecipes:
    """Which recipe each layer gets. The last pattern that matches a layer decides."""

    #: Pairs of pattern and recipe. None: matching layers stay as they are.
    patterns: tuple[tuple[Pattern, Recipe | None], ...]

    def map(self, change: Callable[[Recipe], Recipe]) -> LayerRecipes:
        """Return the same patterns with ``change(recipe)`` for each recipe."""
        return LayerRecipes(tuple((pattern, recipe and change(recipe)) for pattern, recipe in self.patterns))

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The distinct recipes, in order."""
        return tuple(dict.fromkeys(recipe for _, recipe in self.patterns if recipe is not None))

    def __str__(self) -> str:
        if [pattern for pattern, _ in self.patterns] == ["*"]:
            return str(self.patterns[0][1])
        rows = ((getattr(pattern, "__name__", pattern), recipe) for pattern, recipe in self.patterns)
        return ", ".join(f"{name}: {recipe or 'float'}" for name, recipe in rows)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data. Raises ValueError if a pattern is a function, which cannot be stored."""
        functions = [pattern for pattern, _ in self.patterns if not isinstance(pattern, str)]
        if functions:
            raise ValueError(
                f"recipes by layer: the function {getattr(functions[0], '__name__', functions[0])} cannot be written "
                f"to a file; give names or patterns"
            )
        # A list, because the order of the patterns counts.
        rows = [[pattern, None if recipe is None else recipe.to_dict()] for pattern, recipe in self.patterns]
        return {"patterns": rows}

    @classmethod
    def from_dict(cls, data: Any) -> LayerRecipes:
        """Return the LayerRecipes that ``to_dict`` described. Raises ValueError for other data."""
        rows = data.get("patterns") if isinstance(data, dict) and len(data) == 1 else None
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in rows
        ):
            raise ValueError(f"LayerRecipes: expected {{'patterns': [[pattern, recipe], ...]}}, got {data!r}")
        return layer_recipes({pattern: None if row is None else Recipe.from_dict(row) for pattern, row in rows})


def layer_recipes(recipes: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None]) -> LayerRecipes:
    """Return one recipe for every layer, or per-layer recipes, as LayerRecipes.

    Args:
        recipes: A recipe or its name, or a mapping from patterns (``lowbit.models.names``) to recipes. The last pattern
            that matches a layer decides. None as recipe, and no match, leave a layer as it is.

    Raises:
        ValueError: An unknown recipe, or an empty mapping.
        TypeError: A key is not a pattern, or a value is not a recipe.

    Example:
        ``layer_recipes({"*": "int4-weight-only", "down_proj": "int8", "lm_head": None})``
    """
    if isinstance(recipes, LayerRecipes):
        return recipes
    if not isinstance(recipes, Mapping):
        return LayerRecipes((("*", recipe(recipes)),))
    if not recipes:
        raise ValueError("recipes by layer: the mapping is empty; write for instance {'*': 'int8', 'lm_head': None}")
    for pattern, row in recipes.items():
        require_pattern(pattern, "recipes by layer")
        if not isinstance(row, str | Recipe | None):
            raise TypeError(
                f"recipes by layer: expected a recipe for {pattern!r}, or None to leave such layers as they are; got "
                f"{type(row).__name__}"
            )
    return LayerRecipes(tuple((pattern, None if row is None else recipe(row)) for pattern, row in recipes.items()))


def require_pattern(pattern: Any, what: str) -> None:
    """Raise TypeError unless ``pattern`` is one. Classes and modules are callable, but are not patterns."""
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
        f"{what}: a pattern is a string such as 'down_proj' or a function of module and path, got {name}{remedy}"
    )
