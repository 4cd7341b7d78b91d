"""What a function does not do of a recipe, and the recipe to use in its place."""

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
    """Raise ValueError where a Cast of ``recipe`` in one of ``roles`` asks for what ``what`` does not do, or for static
    scales in a scheme that has scales for rows.

    ``training``: as for ``casts``. ``able``: the values of a field that it does besides the default one.
    """
    casts = recipe.casts(training)
    for role in roles:
        if role in casts and casts[role].scale == "static" and "static" in able.get("scale", ()):
            found = casts[role].scheme
            if found.block[0] is not None or found.global_scale:
                raise ValueError(
                    f"recipe {recipe.name!r}: static scales are the same for every row, and {role} is in {found}, "
                    f"which has scales for rows; use {found.format.name}:tensor, or scale='current'"
                )
        for name, value in casts[role].chosen().items() if role in casts else ():
            if name != "history" and value not in able.get(name, ()):
                if name == "scale":
                    raise ValueError(f"recipe {recipe.name!r}: {_scales_refused(recipe, what, str(value))}")
                can = listed([*(f.default for f in fields(Cast) if f.name == name), *able.get(name, ())])
                raise ValueError(
                    f"recipe {recipe.name!r}: {what} does not do {name}={value!r}, which {role} asks for; it does {can}"
                )


def _scales_refused(recipe: Recipe, what: str, scale: str) -> str:
    """Why ``what`` does not take a recipe with delayed or static scales, and what to use."""
    schemes = (recipe.input, recipe.weight)
    others = [row.name for row in RECIPES.values() if row.dynamic and (row.input, row.weight) == schemes]
    instead = f", such as {others[0]!r}" if others else ""
    if scale == "delayed":
        return (
            f"its scales follow from earlier steps of training (delayed scaling), which {what} does not take; use it "
            f"with lowbit.train.prepare_, or give a recipe whose scales follow from each input{instead}"
        )
    return (
        f"the scales of its inputs come from data (lowbit.calibrate, then lowbit.quantize_), which {what} does not "
        f"take; give a recipe whose scales follow from each input{instead}"
    )
