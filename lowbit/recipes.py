"""Recipes by name, and recipes by layer.

A name may carry a scaling for the weight: ``"int4-weight-only:group32"``. Upper case and ``_`` for ``-`` are the same
name, and the names that llm-compressor and compressed-tensors use are aliases (``"W4A16"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from lowbit.casts import Cast, Gemm, Recipe
from lowbit.scaling import find_scaling, scheme

__all__ = ["ALIASES", "RECIPES", "STATIC_RECIPES", "Cast", "Gemm", "Plan", "Recipe", "plan", "recipe"]

#: Every named recipe. Names are API.
RECIPES: dict[str, Recipe] = {
    row.name: row
    for row in (
        Recipe(
            Gemm("int8:row", "int8:row"),
            name="int8", about="8-bit weights and activations (dynamic, a scale a token)",
        ),
        Recipe(
            Gemm("int8:group128", "int8:row"),
            name="int8-group", about="8-bit weights and activations, a scale for 128 activations: loses less on LLMs",
        ),
        Recipe(Gemm(None, "int8:row"), name="int8-weight-only", about="8-bit weights"),
        Recipe(
            Gemm(None, "int4:group128"),
            name="int4-weight-only", about="4-bit weights, a scale for 128; say :group32 for finer ones",
        ),
        Recipe(
            Gemm(None, "uint4:group128:affine"),
            name="uint4-weight-only", about="4-bit weights with zero points, a scale for 128",
        ),
        Recipe(Gemm(None, "nf4"), name="nf4", about="4-bit NormalFloat weights (QLoRA)"),
        Recipe(
            Gemm("fp8_e4m3:row", "fp8_e4m3:row"),
            Gemm("fp8_e5m2:row", "fold"),
            Gemm("fp8_e5m2:col", "fold"),
            name="fp8", about="FP8, a scale a row; trains",
        ),
        Recipe(
            Gemm("fp8_e4m3:tensor", "fp8_e4m3:tensor"),
            Gemm("fp8_e5m2:tensor", "reuse"),
            Gemm("fp8_e5m2:tensor", "reuse"),
            name="fp8-tensor", about="FP8, a scale a tensor; trains",
        ),
        Recipe(
            Gemm("fp8_e4m3:group128", "fp8_e4m3:block128x128"),
            Gemm("fp8_e4m3:group128", "reuse"),
            Gemm("fp8_e4m3:group128:T", "fp8_e4m3:group128:T"),
            name="fp8-block", about="FP8 in blocks of 1x128 and 128x128 (DeepSeek-V3, arXiv 2412.19437); trains",
        ),
        Recipe(Gemm(None, "fp8_e4m3:row"), name="fp8-weight-only", about="FP8 weights"),
        Recipe(
            Gemm("mxfp8:ceil", "mxfp8:ceil"),
            Gemm("mxfp8:ceil", "mxfp8:ceil:T"),
            Gemm("mxfp8:ceil:T", "mxfp8:ceil:T"),
            name="mxfp8", about="OCP MX, FP8 elements; trains",
        ),
        Recipe(Gemm("mxfp6", "mxfp6"), name="mxfp6", about="OCP MX, FP6 (E2M3) elements"),
        Recipe(Gemm("mxfp4", "mxfp4"), name="mxfp4", about="OCP MX, FP4 elements"),
        Recipe(
            Gemm("nvfp4:global_row", "nvfp4"),
            name="nvfp4", about="NVFP4: FP4 elements, a scale for 16, one for a row of activations or a weight",
        ),
        Recipe(Gemm(None, "nvfp4"), name="nvfp4-weight-only", about="NVFP4 weights"),
        Recipe(Gemm("int8:row", "int4:group128"), name="w4a8", about="4-bit weights, 8-bit activations"),
    )
}  # fmt: skip

#: Recipes whose inputs have static scales: quantize_ needs the calibration that chose them. Names are API.
STATIC_RECIPES: dict[str, Recipe] = {
    row.name: row
    for row in (
        Recipe(
            Gemm(Cast("int8:tensor", scale="static"), "int8:row"),
            name="int8-static", about="8-bit weights and activations, one scale for all of a layer's activations",
        ),
        Recipe(
            Gemm(Cast("uint8:tensor:affine", scale="static"), "int8:row"),
            name="int8-static-affine", about="the same with a zero point, for activations that are seldom negative",
        ),
        Recipe(
            Gemm(Cast("fp8_e4m3:tensor", scale="static"), "fp8_e4m3:row"),
            name="fp8-static", about="FP8, one scale for all of a layer's activations",
        ),
    )
}  # fmt: skip

#: Names that llm-compressor and compressed-tensors give to these recipes. Their FP8 has static input scales, which come
#: from calibration; here both FP8 and FP8_DYNAMIC are dynamic.
ALIASES: dict[str, str] = {
    "W8A8": "int8",
    "W8A16": "int8-weight-only",
    "W4A16": "int4-weight-only",
    "W4A16_ASYM": "uint4-weight-only",
    "W4A8": "w4a8",
    "FP8": "fp8",
    "FP8_DYNAMIC": "fp8",
    "FP8_BLOCK": "fp8-block",
    "NVFP4": "nvfp4",
    "NVFP4A16": "nvfp4-weight-only",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}


def _spelled(name: str) -> str:
    """A name as the table has it: upper case and ``_`` make no other one."""
    return name.lower().replace("_", "-")


_TABLE: dict[str, Recipe] = {**RECIPES, **STATIC_RECIPES}
_KNOWN: dict[str, str] = {_spelled(alias): name for alias, name in ALIASES.items()} | {name: name for name in _TABLE}


def recipe(name: str | Recipe, *, group: int | None = None) -> Recipe:
    """The recipe of that name; ``group`` (or ``NAME:SCALING``) changes how finely its weight is scaled.

    Raises ValueError for an unknown name, listing the known ones, and for another scaling of a recipe that trains or
    whose weight's scales are not fp32 (MX, NVFP4: the scaling is part of the format). TypeError for what is neither.
    """
    if isinstance(name, Recipe):
        return name if group is None else _rescaled(name, f"group{group}")
    if not isinstance(name, str):
        raise TypeError(f"a recipe is a Recipe or one of {', '.join(_TABLE)}; got {type(name).__name__}")
    base, _, scaling = name.partition(":")
    known = _KNOWN.get(_spelled(base))
    if known is None:
        raise ValueError(f"unknown recipe {name!r}{_meant(name)}; expected one of {', '.join(_TABLE)}")
    if group is not None:
        if scaling:
            raise ValueError(f"recipe {name!r} already says {scaling!r}; leave out group={group} or the suffix")
        scaling = f"group{group}"
    return _rescaled(_TABLE[known], scaling) if scaling else _TABLE[known]


def _rescaled(base: Recipe, scaling: str) -> Recipe:
    if base.trains:
        raise ValueError(f"recipe {base.name!r} fixes its scalings, because its backward products depend on them")
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
    return replace(base, name=f"{base.name}:{scaling}", output=output)


def _meant(name: str) -> str:
    """What an unknown name may stand for: a scheme or format of a weight, or a near miss of a known name."""
    words = name.split(":")
    of_format = [row for row in RECIPES.values() if row.input is None and row.weight.format.name == words[0].lower()]
    if of_format:
        return f" (did you mean {':'.join([of_format[0].name, *words[1:]])}?)"
    try:
        weight = scheme(name)
    except ValueError:
        spelled = {_spelled(alias): alias for alias in ALIASES} | {row: row for row in _TABLE}
        close = get_close_matches(_spelled(words[0]), spelled, n=1)
        return f" (did you mean {':'.join([spelled[close[0]], *words[1:]])}?)" if close else ""
    return f" (for weights of this scheme give Recipe(Gemm(None, {weight.name!r}), name='mine'))"


# -- by layer --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """Which recipe each layer gets: patterns of names, of which the last that matches decides."""

    patterns: tuple[tuple[str, Recipe | None], ...]

    def recipe_for(self, name: str) -> Recipe | None:
        """The recipe of the layer with that full dotted name; None: it is left as it is."""
        matching = [chosen for pattern, chosen in self.patterns if fnmatchcase(name, pattern)]
        return matching[-1] if matching else None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match none of ``names``."""
        known = list(names)
        return [pattern for pattern, _ in self.patterns if not any(fnmatchcase(name, pattern) for name in known)]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Every recipe of the plan, once."""
        return tuple(dict.fromkeys(chosen for _, chosen in self.patterns if chosen is not None))

    def __str__(self) -> str:
        if [pattern for pattern, _ in self.patterns] == ["*"]:
            return str(self.patterns[0][1])
        return ", ".join(f"{pattern}: {chosen or 'float'}" for pattern, chosen in self.patterns)

    def to_dict(self) -> dict[str, Any]:
        """JSON data; the patterns are a list, because their order counts."""
        rows = [[pattern, None if chosen is None else chosen.to_dict()] for pattern, chosen in self.patterns]
        return {"patterns": rows}

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The Plan that ``to_dict`` described. Raises ValueError for other data."""
        rows = data.get("patterns") if isinstance(data, dict) and len(data) == 1 else None
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in rows
        ):
            raise ValueError(f"Plan: expected {{'patterns': [[pattern, recipe], ...]}}, got {data!r}")
        return plan({pattern: None if row is None else Recipe.from_dict(row) for pattern, row in rows})


def plan(recipes: str | Recipe | Plan | Mapping[str, str | Recipe | None]) -> Plan:
    """The Plan of a recipe for every layer, or of recipes by layer.

    ``{"*": "int4-weight-only", "*.down_proj": "int8", "lm_head": None}``: the last pattern that matches a layer's full
    dotted name decides (``*``, ``?``, ``[...]`` as in fnmatch); None, and no match, leave it as it is.
    Raises ValueError for an unknown recipe or no pattern; TypeError for what is no pattern or recipe.
    """
    if isinstance(recipes, Plan):
        return recipes
    if not isinstance(recipes, Mapping):
        return Plan((("*", recipe(recipes)),))
    wrong = [pattern for pattern in recipes if not isinstance(pattern, str)]
    if wrong:
        raise TypeError(f"recipes by layer: a pattern is a string such as '*.down_proj', got {wrong[0]!r}")
    if not recipes:
        raise ValueError("recipes by layer: no pattern is given; write for instance {'*': 'int8', 'lm_head': None}")
    return Plan(tuple((pattern, None if row is None else recipe(row)) for pattern, row in recipes.items()))
