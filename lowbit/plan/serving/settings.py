"""What a plan for generation chooses from, and one choice of it: recipes by layer, cache, prompt and layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lowbit.plan.allowed import left
from lowbit.plan.bits import FLOAT
from lowbit.recipes import recipe

__all__ = ["CHOICES", "PACKED", "Allowed", "ServingSettings", "allowed", "cache_name", "packs", "part_name"]

#: Names of the choices to leave the cache as the model has it, to take the prompt at once, and of the two layouts.
PLAIN, WHOLE, PACKED, STORED = "plain cache", "whole prompt", "prepacked", "as stored"

#: How many tokens of a prompt are taken at a time; None: all.
_PARTS = (None, 512, 64)

#: By dimension, the plain choice first, each with what it means.
CHOICES: dict[str, dict[str, str]] = {
    "weights": {
        FLOAT: "as they are",
        "int8": "8 bits, inputs in 8 bits too",
        "int8-weight-only": "8 bits, a scale for a row",
        "fp6_e2m3-weight-only:group32": "6 bits, a scale for 32",
        "int4-weight-only:group32": "4 bits, a scale for 32",
        "w4a8": "4 bits, a scale for 128, inputs in 8 bits",
        "int4-weight-only": "4 bits, a scale for 128",
        "int3-weight-only:group32": "3 bits, a scale for 32",
        "int2-weight-only:group32": "2 bits, a scale for 32",
    },
    "cache": {
        PLAIN: "keys and values as the model makes them",
        "int8:group32": "8 bits, a scale for 32",
        "nf4:group32": "4 bits of unequal steps, a scale for 32",
    },
    "prompt": {
        WHOLE: "all tokens at once",
        **{f"parts of {part}": f"{part} tokens at a time" for part in _PARTS if part is not None},
    },
    "layout": {
        PACKED: "in the order in which CPU kernels read it, which is faster",
        STORED: "rows of codes",
    },
}  # fmt: skip


@dataclass(frozen=True)
class ServingSettings:
    """``weights``: the recipe of each layer by name, ``FLOAT`` for none. ``cache``: the scheme of keys and values, None
    as the model has them. ``part``: how many tokens of the prompt are taken at a time, None for all. ``packed``:
    whether ``prepack_`` is called.
    """

    weights: dict[str, str] = field(default_factory=dict)
    cache: str | None = None
    part: int | None = None
    packed: bool = False


class Allowed(NamedTuple):
    """What is left to choose from."""

    weights: list[str]
    caches: list[str | None]
    parts: list[int | None]
    packed: list[bool]


def allowed(require: Iterable[str], exclude: Iterable[str]) -> Allowed:
    """What ``require`` and ``exclude`` leave; raises as ``left``."""
    found = left(CHOICES, require, exclude, who="fit_generation")
    return Allowed(
        list(found["weights"]),
        [None if name == PLAIN else name for name in found["cache"]],
        [part for part in _PARTS if part_name(part) in found["prompt"]],
        [name == PACKED for name in found["layout"]],
    )


def cache_name(scheme: str | None) -> str:
    """The name of the choice."""
    return PLAIN if scheme is None else scheme


def part_name(part: int | None) -> str:
    """The name of the choice."""
    return WHOLE if part is None else f"parts of {part}"


def packs(name: str) -> bool:
    """Whether a recipe of weights quantizes inputs, which the packed layout needs."""
    return name != FLOAT and recipe(name).input is not None
