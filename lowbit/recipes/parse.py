"""Parses recipe names.

A name may carry a scaling for the weight: ``"int4-weight-only:group32"``. Case, and ``_`` for ``-``, do not matter.
Names of llm-compressor and compressed-tensors (``"W4A16"``) are aliases. Names that mean something else there raise
an error.
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

#: Suffix of the names of recipes that leave activations float.
_WEIGHT_ONLY = "-weight-only"


def _gradients(base: Recipe, value: str) -> Recipe:
    return base.with_gradients(f"fp8_{value}" if f"fp8_{value}" in formats.FORMATS else value)


def _keep_blocks(base: Recipe, value: str) -> Recipe:
    try:
        return base.with_keep_blocks(float(value))
    except ValueError as error:
        raise ValueError(f"recipe {base.name!r}: keep_blocks={value!r} is not a share of blocks; {error}") from None


class Option(NamedTuple):
    """An option ``:OPTION=VALUE`` in the name of a recipe that trains."""

    values: str  # in words
    about: str
    change: Callable[[Recipe, str], Recipe]


#: Options by name. Names are API.
OPTIONS: dict[str, Option] = {
    "output": Option(
        " | ".join(PRECISIONS[:2]), "precision of the forward matmul in training",
        lambda base, value: base.with_products(output=value),
    ),
    "grad_input": Option(
        " | ".join(PRECISIONS), "precision of the matmul for the input gradient",
        lambda base, value: base.with_products(grad_input=value),
    ),
    "grad_weight": Option(
        " | ".join(PRECISIONS), "precision of the matmul for the weight gradient",
        lambda base, value: base.with_products(grad_weight=value),
    ),
    "gradients": Option("e4m3 | e5m2 or a format name", "format of quantized gradients", _gradients),
    "rule": Option(
        "amax | search | four-over-six", "scale selection for the forward operands",
        lambda base, value: base.with_rule(value),
    ),
    "keep_blocks": Option(
        "a share such as 0.15", "share of blocks, first and last, in high precision", _keep_blocks
    ),
}  # fmt: skip


def recipe(name: str | Recipe, *, group: int | None = None) -> Recipe:
    """Return the recipe with this name.

    Args:
        name: One of these forms, or a Recipe:

            - a name or alias in the table: ``"int8"``, ``"W4A16"``;
            - ``NAME:SCALING``, with another scaling of the weight, for inference only: ``"int4-weight-only:group32"``;
            - ``SCHEME-weight-only`` for any scheme: ``"mxfp4-weight-only"``, ``"int3-weight-only:group128"``;
            - ``NAME:hadamard``, which transforms weights and inputs first (``lowbit.hadamard``): ``"nvfp4:hadamard"``;
            - ``NAME:OPTION=VALUE``, once or more, with rows of ``OPTIONS``: ``"fp8:grad_weight=high:gradients=e4m3"``.
        group: Elements per weight scale, the same as ``NAME:groupN``.

    Raises:
        ValueError: An unknown name; a name with another meaning elsewhere (``FOREIGN``); another scaling if the
            weight's scales are not fp32 (MX, NVFP4: the scaling is part of the format); an option that is unknown or
            given twice.
        TypeError: ``name`` is neither a Recipe nor a string.
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
    options = bool(scaling) and find_scaling(scaling.split(":")[0]) is None
    if (known is None or options) and spelled(base).endswith(_WEIGHT_ONLY):
        return _weight_only(base.lower()[: -len(_WEIGHT_ONLY)], f"group{group}" if group is not None else scaling)
    if known is None:
        raise ValueError(f"unknown recipe {name!r}{_suggestion(name)}; expected one of {_known()}")
    if group is not None:
        if scaling:
            raise ValueError(f"recipe {name!r} already says {scaling!r}; leave out group={group} or the suffix")
        scaling = f"group{group}"
    return _rescaled(known, scaling) if scaling else known


def _with_options(name: str, group: int | None) -> Recipe:
    """The recipe for ``NAME:OPTION=VALUE...``. An option that changes nothing is not in its name."""
    words = name.split(":")
    changed = recipe(":".join(word for word in words if "=" not in word), group=group)
    pairs = [word.lower().partition("=") for word in words if "=" in word]
    options = {option.replace("-", "_"): value for option, _, value in pairs}
    if len(options) < len(pairs) or not options.keys() <= OPTIONS.keys():
        known = ", ".join(f"{option}={row.values}" for option, row in OPTIONS.items())
        wrong = next((option for option in options if option not in OPTIONS), None)
        problem = "has an option twice" if wrong is None else f"has an unknown option {wrong!r}"
        raise ValueError(f"recipe {name!r} {problem}; options are {known}")
    for option, value in options.items():
        changed = OPTIONS[option].change(changed, value)
    return changed


def _weight_only(weight: str, scaling: str) -> Recipe:
    """A weight-only recipe for the scheme ``weight:scaling``, without a row in the table."""
    suffix = f":{scaling}" if scaling else ""
    name = f"{weight}{_WEIGHT_ONLY}{suffix}"
    try:
        return Recipe(Gemm(None, scheme(weight + suffix)), name=name)
    except ValueError as error:
        raise ValueError(f"recipe {name!r} has no valid weight scheme: {error}") from None


def _rescaled(base: Recipe, scaling: str) -> Recipe:
    if find_scaling(scaling.split(":")[0]) is None:
        raise ValueError(f"recipe {base.name!r}: unknown scaling {scaling!r}; write for instance {base.name}:group32")
    if base.weight.scale_format.name != "fp32":
        plain = f"{base.weight.format.name}:{scaling}{':affine' if base.weight.affine else ''}"
        raise ValueError(
            f"recipe {base.name!r} has scales in {base.weight.scale_format.name}, and its scaling is part of the "
            f"format; use a recipe with fp32 scales, such as int4-weight-only:{scaling}, "
            f"or Recipe(Gemm(None, {plain!r}), name='mine')"
        )
    affine = ":affine" if base.weight.affine and not {"affine", "min"} & set(scaling.split(":")) else ""
    weight = scheme(f"{base.weight.format.name}:{scaling}{affine}")
    if weight == base.weight:
        return base
    assert isinstance(base.output.b, Cast)
    output = replace(base.output, b=replace(base.output.b, scheme=weight))
    # Without backward matmuls, which depend on the scalings in the table.
    return Recipe(output, about=base.about, name=f"{base.name}:{scaling}")


def _known() -> str:
    """The names of recipes, grouped by their use."""
    dynamic = [name for name, row in RECIPES.items() if row.dynamic]
    static = [name for name, row in RECIPES.items() if row.static]
    training = [name for name in RECIPES if name not in (*dynamic, *static)]
    return (
        f"{', '.join(dynamic)}; with calibration data {', '.join(static)}; for train.prepare_ alone "
        f"{', '.join(training)}"
    )


def _suggestion(name: str) -> str:
    """The recipe that an unknown name may stand for: of that weight format or scheme, or with a similar name."""
    words = name.split(":")
    rows = [row for row in RECIPES.values() if row.input is None and row.weight.format.name == words[0].lower()]
    if rows:
        return f" (did you mean {':'.join([rows[0].name, *words[1:]])}?)"
    try:
        weight = scheme(name)
    except ValueError:
        return did_you_mean(words[0], (*ALIASES, *RECIPES), name.removeprefix(words[0]))
    return f" (for weights of this scheme give Recipe(Gemm(None, {weight.name!r}), name='mine'))"
