"""What a plan chooses from: in each dimension one row of ``CHOICES``, as what it changes of ``Settings``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from lowbit.named import did_you_mean
from lowbit.plan.settings import Settings

__all__ = ["CHOICES", "Choice", "allowed", "combinations", "picked", "words"]


class Choice(NamedTuple):
    """``changes``: of the settings. ``about``: what it does, for people. ``asked``: only where a caller keeps it."""

    name: str
    changes: Mapping[str, Any]
    about: str
    asked: bool = False


#: By dimension, the plain choice first.
CHOICES: dict[str, tuple[Choice, ...]] = {
    "precision": (
        Choice("fp32", {}, "weights, products and activations in fp32"),
        Choice("bf16", {"mixed": "bf16"}, "products and their weights in bf16, 16 more bits for the optimizer"),
        Choice("fp8", {"mixed": "bf16", "recipe": "fp8", "compress": True},
               "FP8 products and FP8 codes of activations, the rest in bf16", asked=True),
    ),
    "optimizer": (
        Choice("adamw", {}, "both states of AdamW in fp32"),
        Choice("adamw8bit", {"bits": 8}, "both states of AdamW as 8-bit codes"),
    ),
    "checkpoint": (
        Choice("everything kept", {}, "backward finds all that it needs"),
        Choice("attention", {"checkpoint": "attention"}, "the attention of each block is computed again"),
        Choice("save_matmuls", {"checkpoint": "save_matmuls"}, "all but the results of products is computed again"),
        Choice("block", {"checkpoint": "block"}, "each block is computed again"),
        Choice("sqrt", {"checkpoint": "sqrt"}, "segments of about sqrt(N) blocks are computed again"),
    ),
    "states": (
        Choice("memory", {}, "states of the optimizer are beside the weights"),
        Choice("disk", {"offload_states": True}, "states of the optimizer are in files, on a GPU in host memory"),
    ),
}  # fmt: skip


def allowed(keep: Iterable[str], no: Iterable[str]) -> dict[str, tuple[Choice, ...]]:
    """The choices that are left: of a dimension with a name in ``keep`` these alone, and none in ``no``.

    Raises ValueError for an unknown name, and where a dimension has no choice left.
    """
    kept, left_out = set(keep), set(no)
    known = [choice.name for row in CHOICES.values() for choice in row]
    for name in (*kept, *left_out):
        if name not in known:
            raise ValueError(f"fit: no choice is called {name!r}{did_you_mean(name, known)}; there are {known}")
    found = {}
    for dimension, row in CHOICES.items():
        chosen = [choice for choice in row if choice.name in kept] or [choice for choice in row if not choice.asked]
        found[dimension] = tuple(choice for choice in chosen if choice.name not in left_out)
        if not found[dimension]:
            raise ValueError(
                f"fit: keep and no leave nothing for the {dimension}, which is one of "
                f"{[choice.name for choice in row]}; leave one of them in"
            )
    return found


def combinations(choices: Mapping[str, tuple[Choice, ...]]) -> Iterable[Settings]:
    """The settings of each combination, in one part."""
    for picked in product(*choices.values()):
        changes: dict[str, Any] = {}
        for choice in picked:
            changes |= choice.changes
        yield replace(Settings(), **changes)


def picked(dimension: str, settings: Settings) -> Choice:
    """The choice of that dimension which the settings have."""
    having = (c for c in CHOICES[dimension] if all(getattr(settings, name) == v for name, v in c.changes.items()))
    *_, last = having
    return last


def words(settings: Settings) -> str:
    """The names of all that is not plain."""
    names = [picked(dimension, settings).name for dimension in CHOICES]
    found = [name for name, row in zip(names, CHOICES.values(), strict=True) if name != row[0].name]
    return ", ".join([*found, *([f"{settings.micro} parts"] if settings.micro > 1 else [])]) or "plain training"
