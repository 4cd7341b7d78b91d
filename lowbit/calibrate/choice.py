"""What ``method=`` of ``calibrate`` means: names of weight methods, of observers of activations and of transforms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lowbit.calibrate.methods import METHODS, Method
from lowbit.calibrate.transforms import TRANSFORMS, Transform
from lowbit.datafree import DATA_FREE
from lowbit.name_tables import did_you_mean, register, spelled
from lowbit.observers import OBSERVERS, Observer, find_observer
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes, refuse_beyond

__all__ = ["Choice", "choose", "planned", "register_method"]


#: The transform that is a part of the recipe.
_HADAMARD = "hadamard"


class Choice(NamedTuple):
    """``weights``: how codes are chosen; None: the best known for each scheme. ``inputs``: what makes static ranges of
    activations. ``transforms``: what is done to the model before, in this order; ``rotated``: whether weights and
    inputs go through a Hadamard transform, as recipes ``NAME:hadamard`` say.
    """

    weights: Method | None = None
    inputs: Observer = OBSERVERS["minmax"]
    transforms: tuple[Transform, ...] = ()
    rotated: bool = False

    def __str__(self) -> str:
        names = [*(one.name for one in self.transforms), self.weights.name if self.weights else "default"]
        return " ".join([*names, self.inputs.name])


def choose(method: str | Method | Iterable[str | Method] | None) -> Choice:
    """The Choice that names stand for, in any order but that of transforms.

    ``"mse"`` is a weight method and an observer: it is each that no other name is given for.
    Raises ValueError for an unknown name, listing the known ones, and for two weight methods or observers; TypeError
    for what is no name.
    """
    given = [] if method is None else [method] if isinstance(method, str | Method) else list(method)
    weights: list[Method] = []
    inputs: list[Observer] = []
    transforms: list[Transform] = []
    both = 0
    rotated = False
    for one in given:
        if isinstance(one, Method):
            weights.append(one)
            continue
        if not isinstance(one, str):
            raise TypeError(f"a method is a name, one of {_known()}; got {type(one).__name__}")
        name = spelled(one)
        observer = find_observer(one)
        if name in METHODS and observer is not None:
            both += 1
        elif name in METHODS:
            weights.append(METHODS[name])
        elif observer is not None:
            inputs.append(observer)
        elif name == _HADAMARD:
            rotated = True
        elif name in TRANSFORMS:
            transforms.append(TRANSFORMS[name])
        else:
            meant = did_you_mean(one, [*METHODS, *TRANSFORMS, _HADAMARD, *OBSERVERS])
            raise ValueError(f"unknown method {one!r}{meant}; expected one of {_known()}")
    if both:
        weights = weights or [METHODS["mse"]]
        inputs = inputs or [OBSERVERS["mse"]]
    for what, found in (("weights", weights), ("activations", inputs)):
        if len(found) > 1:
            names = " and ".join(row.name for row in found)
            raise ValueError(f"one method chooses the scales of {what}, got {names}; give one of them")
    chosen = inputs[0] if inputs else Choice().inputs
    return Choice(weights[0] if weights else None, chosen, tuple(transforms), rotated)


def register_method(method: Method) -> None:
    """Add a method of weights: ``calibrate`` and the command line know its name from now on, and ``quantize_`` too
    where it needs no data.

    Its name has lower case letters and digits, with dashes between. Raises ValueError for another name and for one that
    a method, a transform or an observer has; TypeError for what is no Method.
    """
    if not isinstance(method, Method):
        raise TypeError(f"register_method: expected a Method, got {type(method).__name__}")
    register(METHODS, method, (*TRANSFORMS, _HADAMARD, *OBSERVERS), "method")
    if method.need == "nothing":
        DATA_FREE[method.name] = method.rule("quantize_")


def _known() -> str:
    before = ", ".join([*TRANSFORMS, _HADAMARD])
    return f"{', '.join(METHODS)} (weights), {before} (before), {', '.join(OBSERVERS)} (activations)"


def planned(
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None],
    method: str | Method | Iterable[str | Method] | None,
    caller: str,
) -> tuple[LayerRecipes, Choice]:
    """The recipes with the transform that ``method`` asks of them, and the Choice. Raises ValueError for recipes that
    ``caller`` cannot serve.
    """
    chosen, choice = layer_recipes(recipe), choose(method)
    if choice.rotated:
        chosen = chosen.map(Recipe.rotated)
    for one in chosen.recipes:
        refuse_beyond(one, caller, ("output.a",), scale=("static",), transform=("hadamard",))
        refuse_beyond(one, caller, ("output.b",), transform=("hadamard",))
    return chosen, choice
