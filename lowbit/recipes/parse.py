"""Recipes by name.

A name may carry a scaling for the weight: ``"int4-weight-only:group32"``. Upper case and ``_`` for ``-`` are the same
name. Names of llm-compressor and compressed-tensors (``"W4A16"``) are aliases, or refused where they mean another thing
there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from lowbit import formats
from lowbit.name_tables import did_you_mean, spelled
from lowbit.recipes.cast import Cast, Gemm
from lowbit.recipes.definition import HADAMARD, PRECISIONS, Recipe
from lowbit.recipes.table import ALIASES, FOREIGN, RECIPES
from lowbit.scaling import find_scaling, scheme

__all__ = ["OPTIONS", "recipe"]

#: What the name of a recipe ends with that leaves activations as they are.
_WEIGHT_ONLY = "-weight-only"


def _gradients(base: Recipe, value: str) -> Recipe:
    return base.with_gradients(f"fp8_{value}" if f"fp8_{value}" in formats.FORMATS else value)


def _keep_blocks(base: Recipe, value: str) -> Recipe:
    try:
        return base.with_keep_blocks(float(value))
    except ValueError as error:
        raise ValueError(f"recipe {base.name!r}: keep_blocks={value!r} is no share of the blocks; {error}") from None


class Option(NamedTuple):
    """What the name of a recipe that trains may carry as ``:OPTION=VALUE``, with its values in words."""

    values: str
    about: str
    change: Callable[[Recipe, str], Recipe]


#: By name. A row is a word of recipes' names, and so API.
OPTIONS: dict[str, Option] = {
    "output": Option(
        " | ".join(PRECISIONS[:2]), "how forward is multiplied in training",
        lambda base, value: base.with_products(output=value),
    ),
    "grad_input": Option(
        " | ".join(PRECISIONS), "how the gradient of the input is multiplied",
        lambda base, value: base.with_products(grad_input=value),
    ),
    "grad_weight": Option(
        " | ".join(PRECISIONS), "how the gradient of the weight is multiplied",
        lambda base, value: base.with_products(grad_weight=value),
    ),
    "gradients": Option("e4m3 | e5m2 or a name of a format", "what gradients are quantized to", _gradients),
    "rule": Option(
        "amax | search | four-over-six", "how scales of forward's operands follow from a block's elements",
        lambda base, value: base.with_rule(value),
    ),
    "keep_blocks": Option(
        "a share such as 0.15", "which share of the blocks, first and last, stays as it is", _keep_blocks
    ),
}  # fmt: skip


def recipe(name: str | Recipe, *, group: int | None = None) -> Recipe:
    """The recipe of that name; ``group`` (or ``NAME:SCALING``) changes how finely its weight is scaled.

    ``SCHEME-weight-only`` is one for every scheme: ``mxfp4-weight-only``, ``int3-weight-only:group128``.
    ``NAME:hadamard`` transforms weights and inputs before they are quantized (``lowbit.hadamard``): ``nvfp4:hadamard``.
    ``NAME:OPTION=VALUE`` changes how a recipe trains, as a row of ``OPTIONS`` says, and several may follow one another:
    ``fp8:grad_weight=high:gradients=e4m3``. Another scaling than the table's is for inference only.

    Raises ValueError for an unknown name, listing the known ones, for one that means another thing elsewhere
    (``FOREIGN``), for another scaling of a recipe whose weight's scales are not fp32 (MX, NVFP4: the scaling is part of
    the format), and for an option that is unknown or said twice. TypeError for what is neither.
    """
    if isinstance(name, Recipe):
        return name if group is None else _rescaled(name, f"group{group}")
    if not isinstance(name, str):
        raise TypeError(f"a recipe is a Recipe or one of {', '.join(RECIPES)}; got {type(name).__name__}")
    if name.lower().endswith(HADAMARD):
        return recipe(name[: -len(HADAMARD)], group=group).rotated()
    if "=" in name:
        return _with_options(name, group)
    base, _, scaling = name.partition(":")
    foreign = base.upper().replace("-", "_")
    if foreign in FOREIGN and base not in RECIPES:
        raise ValueError(f"recipe {name!r}: {FOREIGN[foreign]}")
    known = RECIPES.get(ALIASES.get(foreign, spelled(base)))
    if known is None and spelled(base).endswith(_WEIGHT_ONLY):
        return _weight_only(base.lower()[: -len(_WEIGHT_ONLY)], f"group{group}" if group is not None else scaling)
    if known is None:
        raise ValueError(f"unknown recipe {name!r}{_meant(name)}; expected one of {_known()}")
    if group is not None:
        if scaling:
            raise ValueError(f"recipe {name!r} already says {scaling!r}; leave out group={group} or the suffix")
        scaling = f"group{group}"
    return _rescaled(known, scaling) if scaling else known


def _with_options(name: str, group: int | None) -> Recipe:
    """The recipe that ``NAME:OPTION=VALUE...`` means; an option that leaves it as it is is no part of its name."""
    words = name.split(":")
    made = recipe(":".join(word for word in words if "=" not in word), group=group)
    given = [word.lower().partition("=") for word in words if "=" in word]
    asked = {option.replace("-", "_"): value for option, _, value in given}
    if len(asked) < len(given) or not asked.keys() <= OPTIONS.keys():
        known = ", ".join(f"{option}={row.values}" for option, row in OPTIONS.items())
        wrong = next((option for option in asked if option not in OPTIONS), None)
        what = "says an option twice" if wrong is None else f"has an unknown option {wrong!r}"
        raise ValueError(f"recipe {name!r} {what}; options are {known}")
    for option, value in asked.items():
        made = OPTIONS[option].change(made, value)
    return made


def _weight_only(weight: str, scaling: str) -> Recipe:
    """The recipe, without a row of its own, that quantizes nothing but weights, by the scheme ``weight:scaling``."""
    suffix = f":{scaling}" if scaling else ""
    name = f"{weight}{_WEIGHT_ONLY}{suffix}"
    try:
        return Recipe(Gemm(None, scheme(weight + suffix)), name=name)
    except ValueError as error:
        raise ValueError(f"recipe {name!r} names no scheme of a weight: {error}") from None


def _rescaled(base: Recipe, scaling: str) -> Recipe:
    if find_scaling(scaling.split(":")[0]) is None:
        raise ValueError(f"recipe {base.name!r}: unknown scaling {scaling!r}; write for instance {base.name}:group32")
    if base.weight.scale_format.name != "fp32":
        plain = f"{base.weight.format.name}:{scaling}"
        raise ValueError(
            f"recipe {base.name!r} has scales in {base.weight.scale_format.name}, and another scaling would make it "
            f"another format; use one with fp32 scales, such as int4-weight-only:{scaling}, "
            f"or Recipe(Gemm(None, {plain!r}), name='mine')"
        )
    affine = ":affine" if base.weight.affine and "affine" not in scaling.split(":") else ""
    weight = scheme(f"{base.weight.format.name}:{scaling}{affine}")
    if weight == base.weight:
        return base
    assert isinstance(base.output.b, Cast)
    output = replace(base.output, b=replace(base.output.b, scheme=weight))
    # Backward products depend on the scalings of the table.
    return Recipe(output, about=base.about, name=f"{base.name}:{scaling}")


def _known() -> str:
    """The names of recipes, and what those need that cannot be used at once."""
    at_once = [name for name, row in RECIPES.items() if row.dynamic]
    with_data = [name for name, row in RECIPES.items() if row.static]
    training = [name for name in RECIPES if name not in (*at_once, *with_data)]
    return (
        f"{', '.join(at_once)}; with calibration data {', '.join(with_data)}; for train.prepare_ alone "
        f"{', '.join(training)}"
    )


def _meant(name: str) -> str:
    """What an unknown name may stand for: a scheme or format of a weight, or a near miss of a known name."""
    words = name.split(":")
    of_format = [row for row in RECIPES.values() if row.input is None and row.weight.format.name == words[0].lower()]
    if of_format:
        return f" (did you mean {':'.join([of_format[0].name, *words[1:]])}?)"
    try:
        weight = scheme(name)
    except ValueError:
        return did_you_mean(words[0], (*ALIASES, *RECIPES), name.removeprefix(words[0]))
    return f" (for weights of this scheme give Recipe(Gemm(None, {weight.name!r}), name='mine'))"
