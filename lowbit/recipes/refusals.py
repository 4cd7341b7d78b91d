"""Errors for recipes that a function does not support, with a recipe to use instead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from lowbit.recipes.cast import Cast, listed
from lowbit.recipes.definition import Recipe
from lowbit.recipes.table import RECIPES

__all__ = ["refuse_beyond"]


def refuse_beyond(
    recipe: Recipe, what: str, roles: Iterable[str], training: bool = False, **able: tuple[str | None, ...]
) -> None:
    """Raise ValueError if ``recipe`` uses a feature that its caller does not support, or static scales per row.

    Args:
        recipe: The recipe to check.
        what: The caller, for the message.
        roles: Which operands to check, such as ``"output.a"``.
        training: As for ``Recipe.casts``.
        able: Per field of Cast, the supported values besides the default.
    """
    if recipe.reordered:
        raise ValueError(f"recipe {recipe.name!r}: {what} does not support reordered columns")
    casts = recipe.casts(training)
    for role in roles:
        if role in casts and casts[role].scale == "static" and "static" in able.get("scale", ()):
            scheme = casts[role].scheme
            if scheme.block[0] is not None or scheme.global_scale:
                raise ValueError(
                    f"recipe {recipe.name!r}: static scales are the same for every row, but {role} is {scheme}, "
                    f"which has scales per row; use {scheme.format.name}:tensor, or scale='current'"
                )
        for name, value in casts[role].chosen().items() if role in casts else ():
            if name != "history" and value not in able.get(name, ()):
                if name == "scale":
                    raise ValueError(f"recipe {recipe.name!r}: {_scales_refused(recipe, what, str(value))}")
                supported = listed([*(f.default for f in fields(Cast) if f.name == name), *able.get(name, ())])
                raise ValueError(
                    f"recipe {recipe.name!r}: {what} does not support {name}={value!r} of {role}; it supports "
                    f"{supported}"
                )


def _scales_refused(recipe: Recipe, what: str, scale: str) -> str:
    """Why ``what`` does not support delayed or static scales, with a dynamic recipe to use instead."""
    schemes = (recipe.input, recipe.weight)
    dynamic = [row.name for row in RECIPES.values() if row.dynamic and (row.input, row.weight) == schemes]
    instead = f", such as {dynamic[0]!r}" if dynamic else ""
    if scale == "delayed":
        return (
            f"{what} does not support delayed scaling; use it with lowbit.train.prepare_, or give a recipe with "
            f"dynamic input scales{instead}"
        )
    return (
        f"{what} does not support static input scales, which come from lowbit.calibrate and are used by "
        f"lowbit.quantize_; give a recipe with dynamic input scales{instead}"
    )
