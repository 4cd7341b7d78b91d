"""What a plan chooses from: in each dimension one row of ``TECHNIQUES``, as what it changes of ``TrainingSettings``.

Checkpoints of blocks and the number of parts follow from the budget; see ``search``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from lowbit.distributed.strategies import STRATEGIES
from lowbit.name_tables import did_you_mean
from lowbit.plan.allowed import left, names_in
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.techniques import (
    AS_LOADED,
    LAST,
    MICRO_BATCHES,
    PLANNED,
    STRATEGY,
    TECHNIQUES,
    Technique,
    conflict,
    defaults,
    in_use,
    technique_of,
    techniques,
)

__all__ = [
    "NOISE", "QUALITY", "Most", "allowed", "combinations", "described", "has_half", "most_of", "plainer_by_dimension",
    "quality_of", "words",
]  # fmt: skip

#: The most that choices may add to the loss together, in percent, where the caller says nothing, and what their sum may
#: be above it by rounding.
QUALITY, _ROUNDING = 0.3, 1e-9

#: By how many percent plain fp32 differs from bf16 in the record of recipes, and so what rounding alone may do.
NOISE = 0.42

#: What more is to be said of a model whose weights are not in fp32.
_ABOUT_LOADED = {"fp16": "; small gradients become zero, so call model.bfloat16() or model.float() first"}


def has_half(model: nn.Module) -> bool:
    """Whether weights that train are in 16 bits as the model comes."""
    parameters = (p for p in model.parameters() if p.requires_grad)
    return any(p.is_floating_point() and p.itemsize == 2 and p.dim() > 1 for p in parameters)


def allowed(
    require: Iterable[str], exclude: Iterable[str], most: Most, gpus: int = 1, group_size: int | None = None
) -> dict[str, tuple[Technique, ...]]:
    """What ``require`` and ``exclude`` leave; of a dimension without a required name those that cost at most ``most``
    alone.
    Of a single process there is one way, and ``hsdp`` needs a ``group_size``.
    Raises as ``left``, and ValueError for a way that cannot be.
    """
    require, exclude = names_in(require), names_in(exclude)
    rows = {dimension: {choice.name: choice for choice in row} for dimension, row in TECHNIQUES.items()}
    strategies = {name for name in rows[STRATEGY] if gpus > 1 or name == TrainingSettings.strategy}
    strategies -= set() if group_size else {name for name, one in STRATEGIES.items() if one.grouped}
    asked = [name for name in require if name in rows[STRATEGY] and name not in strategies]
    if asked:
        needed = "gpus=2 or more" if gpus == 1 else "group_size=, the processes of one machine"
        raise ValueError(f"fit: {asked[0]!r} needs {needed}; give it, or leave {asked[0]!r} out of require")
    excluded = {*exclude, *(one.name for one in techniques() if one.excluded_with in exclude)}

    def offered(choice: Technique) -> bool:
        return (
            not choice.opt_in
            and choice.with_losses(most.losses).counted <= most.percent
            and (choice.name not in rows[STRATEGY] or choice.name in strategies)
        )

    found = left(rows, require, excluded, offered)
    return {dimension: tuple(row.values()) for dimension, row in found.items()}


class Most(NamedTuple):
    """The ``percent`` of loss that choices may cost together, but for those that are ``required``. ``losses``: by
    choice what a caller has measured in place of the record.
    """

    percent: float
    required: frozenset[str]
    losses: Mapping[str, float] = MappingProxyType({})

    def lost(self, settings: TrainingSettings) -> float:
        """What those of the choices cost that cost something."""
        return sum(one.counted for one in described(settings, self.losses).values() if one.name not in self.required)


def most_of(require: Iterable[str], quality: float | str, losses: Mapping[str, float] | None = None) -> Most:
    """Raises ValueError for what is no quality, and for losses of unknown choices or that are no numbers."""
    required, losses = frozenset(names_in(require)), dict(losses or {})
    known = [choice.name for choice in techniques()]
    for name, change in losses.items():
        if name not in known:
            raise ValueError(f"fit: losses has no choice {name!r}{did_you_mean(name, known)}; there are {known}")
        if isinstance(change, bool) or not isinstance(change, int | float) or not math.isfinite(change):
            raise ValueError(
                f"fit: losses has by choice the relative change of the loss, such as 0.02 for 2% more, got {change!r} "
                f"for {name!r}"
            )
    if quality == "any":
        return Most(math.inf, required, losses)
    if isinstance(quality, bool) or not isinstance(quality, int | float) or not quality >= 0:
        raise ValueError(
            f"fit: quality is 'any' or the percent of loss that choices may cost, such as {QUALITY}, got {quality!r}"
        )
    return Most(quality + _ROUNDING, required, losses)


def combinations(choices: Iterable[tuple[Technique, ...]]) -> list[TrainingSettings]:
    """The settings of each combination of a choice of every dimension, in one part."""
    found = []
    for picked in product(*choices):
        changes: dict[str, Any] = {}
        for choice in picked:
            changes |= choice.changes
        found.append(replace(TrainingSettings(), **changes))
    return list(dict.fromkeys(found))  # 'fp32' and 'as loaded' change nothing


def described(settings: TrainingSettings, losses: Mapping[str, float] = MappingProxyType({})) -> dict[str, Technique]:
    """By dimension the technique that the settings have, with the ``losses`` that a caller has measured."""
    found = {}
    for dimension in TECHNIQUES:
        if dimension == STRATEGY and settings.gpus == 1:
            continue
        technique = technique_of(dimension, settings)
        about = _about(technique, settings)
        found[dimension] = (replace(technique, about=about) if about else technique).with_losses(losses)
    return found


def _about(technique: Technique, settings: TrainingSettings) -> str:
    """What a technique does in the settings, where the table cannot say it."""
    if technique.name == AS_LOADED:
        about = f"weights in {settings.loaded}, as the model comes, and products as it makes them"
        return about + _ABOUT_LOADED.get(settings.loaded, "")
    if technique.name == TrainingSettings.master and settings.bf16_params and settings.loaded == "fp16":
        return "of weights in fp16, the optimizer keeps them in fp32"
    return f"computed again: {_by_block(settings)}" if technique.name == PLANNED else ""


def plainer_by_dimension(settings: TrainingSettings) -> dict[str, TrainingSettings]:
    """By dimension that is not plain the settings with the plain choice in its place."""
    found = {name: replace(settings, **defaults(name)) for name in TECHNIQUES}
    for name, plainer in found.items():
        for dimension in ("masters", LAST):  # which need another choice
            if conflict(found[name]) is not None:
                found[name] = replace(plainer, **defaults(dimension))
    return {name: plainer for name, plainer in found.items() if plainer != settings}


def quality_of(settings: TrainingSettings, losses: Mapping[str, float] = MappingProxyType({})) -> float:
    """What the choices count for together, in percent."""
    return sum(choice.counted for choice in described(settings, losses).values())


def words(settings: TrainingSettings) -> str:
    """The names of all that is not plain."""
    found = in_use(settings)
    names = (
        f"{settings.micro_batches} micro-batches" if dimension == MICRO_BATCHES else one.name
        for dimension, one in found.items()
    )
    return ", ".join(names) or "plain training"


def _by_block(settings: TrainingSettings) -> str:
    counts = Counter(settings.checkpoint if isinstance(settings.checkpoint, tuple) else ())
    return ", ".join(f"{name} of {count}" for name, count in counts.items())
