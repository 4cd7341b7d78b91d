"""The recipe of a layer, from the schemes of its weight and of its input."""

from __future__ import annotations

from collections.abc import Iterable

from lowbit.recipes import RECIPES, Cast, Gemm, Recipe
from lowbit.recipes import recipe as find_recipe
from lowbit.scaling import Scheme

__all__ = ["alike", "recipe_of"]


def recipe_of(weight: Scheme, input: Cast | None) -> Recipe:
    """The recipe with this weight and this input: a named one if there is one."""
    for recipe in _candidates(weight, input):
        if alike(recipe.weight, weight):
            return recipe
    return Recipe(Gemm(input, weight))


def _candidates(weight: Scheme, input: Cast | None) -> Iterable[Recipe]:
    """Recipes with that input: named ones, and named ones with the weight's scaling."""
    rows = [row for row in RECIPES.values() if _same_input(row, input) and row.rotation is None]
    yield from (row for row in rows if row.dynamic or row.static)
    element, _, scaling = weight.name.partition(":")
    for row in rows:
        if row.weight.format == weight.format and row.weight.scale_format.name == "fp32" and scaling:
            yield find_recipe(f"{row.name}:{scaling}")
    if input is None:
        yield find_recipe(f"{element}-weight-only{f':{scaling}' if scaling else ''}")


def _same_input(row: Recipe, input: Cast | None) -> bool:
    if row.input is None or input is None:
        return row.input is None and input is None
    return alike(row.input, input.scheme) and row.static == (input.scale == "static")


def alike(a: Scheme, b: Scheme) -> bool:
    """Whether two schemes decode alike: they may differ in the rounding of scales."""
    fields = ("format", "block", "scale_format", "affine", "minimum", "global_scale", "full")
    return all(getattr(a, field) == getattr(b, field) for field in fields)
