"""Parses ``method=`` of ``calibrate``: weight methods, observers of activations and transforms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lowbit.calibrate.methods import METHODS, Method
from lowbit.calibrate.transforms import TRANSFORMS, Transform
from lowbit.datafree import DATA_FREE
from lowbit.name_tables import did_you_mean, register, spelled
from lowbit.observers import OBSERVERS, Observer, find_observer
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes, refuse_beyond

__all__ = ["Choice", "choose", "register_method", "resolve"]

#: This transform is a part of the recipe.
_HADAMARD = "hadamard"


class Choice(NamedTuple):
    """The parsed ``method``."""

    weights: Method | None = None  # None: the best known method for each scheme
    inputs: Observer = OBSERVERS["minmax"]  # for static ranges of activations
    transforms: tuple[Transform, ...] = ()  # applied to the model first, in this order
    rotated: bool = False  # whether recipes get a Hadamard transform, as in NAME:hadamard

    def __str__(self) -> str:
        names = [*(transform.name for transform in self.transforms), self.weights.name if self.weights else "default"]
        return " ".join([*names, self.inputs.name])


def choose(method: str | Method | Iterable[str | Method] | None) -> Choice:
    """Parse ``method``. Only the order of transforms counts.

    ``"mse"`` is both a weight method and an observer, and sets each of them for which there is no other name.
    Raises ValueError for an unknown name and for two weight methods or observers, and TypeError for other types.
    """
    entries = [] if method is None else [method] if isinstance(method, str | Method) else list(method)
    weights: list[Method] = []
    inputs: list[Observer] = []
    transforms: list[Transform] = []
    ambiguous = False
    rotated = False
    for entry in entries:
        if isinstance(entry, Method):
            weights.append(entry)
            continue
        if not isinstance(entry, str):
            raise TypeError(f"a method is a name, one of {_known()}; got {type(entry).__name__}")
        name = spelled(entry)
        observer = find_observer(entry)
        if name in METHODS and observer is not None:
            ambiguous = True
        elif name in METHODS:
            weights.append(METHODS[name])
        elif observer is not None:
            inputs.append(observer)
        elif name == _HADAMARD:
            rotated = True
        elif name in TRANSFORMS:
            transforms.append(TRANSFORMS[name])
        else:
            suggestion = did_you_mean(entry, [*METHODS, *TRANSFORMS, _HADAMARD, *OBSERVERS])
            raise ValueError(f"unknown method {entry!r}{suggestion}; expected one of {_known()}")
    if ambiguous:
        weights = weights or [METHODS["mse"]]
        inputs = inputs or [OBSERVERS["mse"]]
    for what, rows in (("weights", weights), ("activations", inputs)):
        if len(rows) > 1:
            names = " and ".join(row.name for row in rows)
            raise ValueError(f"one method chooses the scales of {what}, got {names}; give one of them")
    observer = inputs[0] if inputs else Choice().inputs
    return Choice(weights[0] if weights else None, observer, tuple(transforms), rotated)


def register_method(method: Method) -> None:
    """Add a weight method to the table that ``calibrate`` and the command line use.

    ``quantize_`` accepts it as well if it needs no data.

    Args:
        method: A Method with a name of lower case letters and digits, separated by dashes.

    Raises:
        ValueError: The name has another form, or a method, transform or observer has it already.
        TypeError: ``method`` is not a Method.
    """
    if not isinstance(method, Method):
        raise TypeError(f"register_method: expected a Method, got {type(method).__name__}")
    register(METHODS, method, (*TRANSFORMS, _HADAMARD, *OBSERVERS), "method")
    if method.need == "nothing":
        DATA_FREE[method.name] = method.rule("quantize_")


def _known() -> str:
    before = ", ".join([*TRANSFORMS, _HADAMARD])
    return f"{', '.join(METHODS)} (weights), {before} (before), {', '.join(OBSERVERS)} (activations)"


def resolve(
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None],
    method: str | Method | Iterable[str | Method] | None,
    caller: str,
) -> tuple[LayerRecipes, Choice]:
    """The recipes, with the Hadamard transform if ``method`` has it, and the Choice.

    Raises ValueError for recipes that ``caller`` does not support.
    """
    recipes, choice = layer_recipes(recipe), choose(method)
    if choice.rotated:
        recipes = recipes.map(Recipe.rotated)
    for row in recipes.recipes:
        refuse_beyond(row, caller, ("output.a",), scale=("static",), transform=("hadamard",))
        refuse_beyond(row, caller, ("output.b",), transform=("hadamard",))
    return recipes, choice
