"""The techniques that a plan may choose, the losses that they may cost, and their descriptions.

Per-block checkpoints and the number of micro-batches follow from the budget; see ``search``.
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
from lowbit.plan.adapters import rank_of
from lowbit.plan.allowed import left, names_in
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.techniques import (
    AS_LOADED,
    LAST,
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
from lowbit.sizes import share_changed

__all__ = [
    "NOISE", "QUALITY", "RECORD", "Most", "allowed", "combinations", "described", "has_half", "loss_words", "most_of",
    "name_in", "plainer_by_dimension", "quality_of", "words",
]  # fmt: skip

#: Default limit on the increase of the loss by all choices, in percent, and the tolerance for rounding of their sum.
QUALITY, _ROUNDING = 0.3, 1e-9

#: Difference of the loss between plain fp32 and bf16 in percent (bench/results/convergence.md): the effect of rounding.
NOISE = 0.42

#: The model of the recorded losses.
RECORD = "language model cross-entropy of the demo's GPT of 1.1M parameters, mean over 2 seeds"

#: Advice for models whose weights are not in fp32, by precision.
_ABOUT_LOADED = {"fp16": "; small gradients become zero, so call model.bfloat16() or model.float() first"}


def has_half(model: nn.Module) -> bool:
    """Return whether the model comes with trainable 16-bit matrices."""
    parameters = (p for p in model.parameters() if p.requires_grad)
    return any(p.is_floating_point() and p.itemsize == 2 and p.dim() > 1 for p in parameters)


def allowed(
    require: Iterable[str], exclude: Iterable[str], most: Most, gpus: int = 1, group_size: int | None = None
) -> dict[str, tuple[Technique, ...]]:
    """Return the techniques that ``require`` and ``exclude`` allow, by dimension.

    A dimension without a required name keeps the techniques that cost at most ``most`` on their own. A single process
    has one sharding strategy, and ``hsdp`` needs a ``group_size``.

    Raises:
        ValueError: As ``left``, and for a required strategy that is not possible.
    """
    require, exclude = names_in(require), names_in(exclude)
    rows = {dimension: {choice.name: choice for choice in row} for dimension, row in TECHNIQUES.items()}
    strategies = {name for name in rows[STRATEGY] if gpus > 1 or name == TrainingSettings.strategy}
    strategies -= set() if group_size else {name for name, strategy in STRATEGIES.items() if strategy.grouped}
    impossible = [name for name in require if name in rows[STRATEGY] and name not in strategies]
    if impossible:
        needed = "gpus=2 or more" if gpus == 1 else "group_size=, the number of processes per machine"
        raise ValueError(f"fit: {impossible[0]!r} needs {needed}; pass it, or leave {impossible[0]!r} out of require")
    excluded = {*exclude, *(choice.name for choice in techniques() if choice.excluded_with in exclude)}

    def offered(choice: Technique) -> bool:
        return (
            not choice.opt_in
            and choice.with_losses(most.losses).counted <= most.percent
            and (choice.name not in rows[STRATEGY] or choice.name in strategies)
        )

    choices = left(rows, require, excluded, offered)
    return {dimension: tuple(row.values()) for dimension, row in choices.items()}


class Most(NamedTuple):
    """The limit on the loss of all choices together.

    Attributes:
        percent: Largest increase of the loss.
        required: Names of the choices that do not count.
        losses: Loss changes that a caller has measured, in place of the record, by choice.
    """

    percent: float
    required: frozenset[str]
    losses: Mapping[str, float] = MappingProxyType({})

    def lost(self, settings: TrainingSettings) -> float:
        """Return the increase of the loss by all choices that are not required, in percent."""
        chosen = described(settings, self.losses).values()
        return sum(choice.counted for choice in chosen if choice.name not in self.required)


def most_of(require: Iterable[str], quality: float | str, losses: Mapping[str, float] | None = None) -> Most:
    """Return the limit for arguments of ``lb.fit``.

    Raises:
        ValueError: For an invalid quality, for losses of unknown choices, and for losses that are not finite.
    """
    required, losses = frozenset(names_in(require)), dict(losses or {})
    known = [choice.name for choice in techniques()]
    for name, change in losses.items():
        if name not in known:
            raise ValueError(f"fit: losses has no choice {name!r}{did_you_mean(name, known)}; there are {known}")
        if isinstance(change, bool) or not isinstance(change, int | float) or not math.isfinite(change):
            raise ValueError(
                f"fit: losses must be relative changes of the loss by choice, such as 0.02 for 2% more, got {change!r} "
                f"for {name!r}"
            )
    if quality == "any":
        return Most(math.inf, required, losses)
    if isinstance(quality, bool) or not isinstance(quality, int | float) or not quality >= 0:
        raise ValueError(
            f"fit: quality must be 'any' or the largest increase of the loss in percent, such as {QUALITY}, got "
            f"{quality!r}"
        )
    return Most(quality + _ROUNDING, required, losses)


def combinations(choices: Iterable[tuple[Technique, ...]]) -> list[TrainingSettings]:
    """Return the settings of each combination of one choice per dimension, without micro-batches."""
    settings = []
    for picked in product(*choices):
        changes: dict[str, Any] = {}
        for choice in picked:
            changes |= choice.changes
        settings.append(replace(TrainingSettings(), **changes))
    return list(dict.fromkeys(settings))  # 'fp32' and 'as loaded' change nothing


def described(settings: TrainingSettings, losses: Mapping[str, float] = MappingProxyType({})) -> dict[str, Technique]:
    """Return the technique of the settings in each dimension, with the ``losses`` that a caller has measured."""
    by_dimension = {}
    for dimension in TECHNIQUES:
        if dimension == STRATEGY and settings.gpus == 1:
            continue
        technique = technique_of(dimension, settings)
        about = _about(technique, settings)
        by_dimension[dimension] = (replace(technique, about=about) if about else technique).with_losses(losses)
    return by_dimension


def _about(technique: Technique, settings: TrainingSettings) -> str:
    """Return a description that depends on the settings; "" if the table's is enough."""
    if technique.name == AS_LOADED:
        return f"weights in {settings.loaded}, the model's own precision{_ABOUT_LOADED.get(settings.loaded, '')}"
    if technique.name == TrainingSettings.master and settings.trains_half and settings.loaded == "fp16":
        return "for fp16 weights, the optimizer stores fp32 masters"
    return f"backward recomputes by block: {_by_block(settings)}" if technique.name == PLANNED else ""


def plainer_by_dimension(settings: TrainingSettings) -> dict[str, TrainingSettings]:
    """Return, for each dimension with another choice than the plain one, the settings with the plain one."""
    alternatives = {name: replace(settings, **defaults(name)) for name in TECHNIQUES}
    for name, plainer in alternatives.items():
        for dimension in ("masters", "base", LAST):  # these need choices of other dimensions
            if conflict(alternatives[name]) is not None:
                alternatives[name] = replace(plainer, **defaults(dimension))
    return {name: plainer for name, plainer in alternatives.items() if plainer != settings}


def quality_of(settings: TrainingSettings, losses: Mapping[str, float] = MappingProxyType({})) -> float:
    """Return the counted increase of the loss by all choices, in percent."""
    return sum(choice.counted for choice in described(settings, losses).values())


def loss_words(technique: Technique, losses: Mapping[str, float] = MappingProxyType({})) -> str:
    """Return the change of the loss by a technique in words; "" if nothing is recorded or given."""
    change = share_changed(technique.loss / 100, 2)
    if technique.name in losses:
        return f"{change} (given)"
    if technique.loss > 0:
        return f"{change}, within noise" if technique.loss <= NOISE else change
    return "no measurable change" if technique.loss else ""


def words(settings: TrainingSettings) -> str:
    """Return the names of the techniques in use."""
    return ", ".join(name_in(settings, technique) for technique in in_use(settings).values()) or "plain training"


def name_in(settings: TrainingSettings, technique: Technique) -> str:
    """Return the name of a technique of the settings, with its number."""
    if "micro_batches" in technique.changes:
        return f"{settings.micro_batches} micro-batches"
    if "adapters" in technique.changes and settings.adapters is not None:
        return f"adapters of rank {rank_of(settings.adapters)}"
    if "resident" in technique.changes and settings.resident:
        return f"{technique.name}, {settings.resident} blocks in memory"
    return technique.name


def _by_block(settings: TrainingSettings) -> str:
    counts = Counter(settings.checkpoint if isinstance(settings.checkpoint, tuple) else ())
    return ", ".join(f"{name} of {count}" for name, count in counts.items())
