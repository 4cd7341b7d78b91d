"""ServingSettings and the table of their choices: recipes by layer, cache, prompt and layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lowbit.plan.allowed import left
from lowbit.plan.bits import FLOAT
from lowbit.recipes import recipe

__all__ = ["CHOICES", "PACKED", "Allowed", "ServingSettings", "allowed", "cache_name", "packs", "part_name"]

#: Names of the unquantized cache, the prompt in one piece, and the two layouts.
PLAIN, WHOLE, PACKED, STORED = "plain cache", "whole prompt", "prepacked", "as stored"

#: Tokens of the prompt per forward; None: all.
_PARTS = (None, 512, 64)

#: The choices of each dimension with their descriptions, the plain choice first.
CHOICES: dict[str, dict[str, str]] = {
    "weights": {
        FLOAT: "not quantized",
        "int8": "8 bits, inputs also in 8 bits",
        "int8-weight-only": "8 bits, one scale per row",
        "fp6_e2m3-weight-only:group32": "6 bits, one scale per 32",
        "int4-weight-only:group32": "4 bits, one scale per 32",
        "w4a8": "4 bits, one scale per 128, inputs in 8 bits",
        "int4-weight-only": "4 bits, one scale per 128",
        "int3-weight-only:group32": "3 bits, one scale per 32",
        "int2-weight-only:group32": "2 bits, one scale per 32",
    },
    "cache": {
        PLAIN: "keys and values in the model's precision",
        "int8:group32": "8 bits, one scale per 32",
        "nf4:group32": "4-bit NormalFloat, one scale per 32",
    },
    "prompt": {
        WHOLE: "all tokens at once",
        **{f"parts of {part}": f"{part} tokens at a time" for part in _PARTS if part is not None},
    },
    "layout": {
        PACKED: "in the order in which CPU kernels read it (faster)",
        STORED: "row by row",
    },
}  # fmt: skip


@dataclass(frozen=True)
class ServingSettings:
    """The settings of a generation. The defaults are the unchanged model."""

    weights: dict[str, str] = field(default_factory=dict)
    """Recipe by layer; ``FLOAT`` leaves a layer unquantized."""
    cache: str | None = None
    """Scheme of keys and values; None keeps the model's precision."""
    part: int | None = None
    """Tokens of the prompt per forward; None: all."""
    packed: bool = False
    """Whether ``prepack_`` is called."""


class Allowed(NamedTuple):
    """The allowed choices."""

    weights: list[str]
    caches: list[str | None]
    parts: list[int | None]
    packed: list[bool]


def allowed(require: Iterable[str], exclude: Iterable[str]) -> Allowed:
    """Return the choices that ``require`` and ``exclude`` allow. Raises as ``left``."""
    rows = left(CHOICES, require, exclude, who="fit_generation")
    return Allowed(
        list(rows["weights"]),
        [None if name == PLAIN else name for name in rows["cache"]],
        [part for part in _PARTS if part_name(part) in rows["prompt"]],
        [name == PACKED for name in rows["layout"]],
    )


def cache_name(scheme: str | None) -> str:
    return PLAIN if scheme is None else scheme


def part_name(part: int | None) -> str:
    return WHOLE if part is None else f"parts of {part}"


def packs(name: str) -> bool:
    """Return whether a recipe quantizes inputs, which the packed layout requires."""
    return name != FLOAT and recipe(name).input is not None
