"""The fastest combination of choices that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lowbit.distributed.strategies import STRATEGIES
from lowbit.memory import heap
from lowbit.memory.fake import outlined
from lowbit.models.batches import given
from lowbit.models.check import check_model
from lowbit.plan.fitting.adapt import TRIES
from lowbit.plan.fitting.choices import (
    QUALITY,
    Most,
    allowed,
    combinations,
    described,
    has_half,
    most_of,
    plainer_by_dimension,
    words,
)
from lowbit.plan.fitting.comparison import Comparison
from lowbit.plan.fitting.identity import check_mode, identity_of
from lowbit.plan.fitting.link import ALONE, Together, together
from lowbit.plan.fitting.plan import TrainingPlan
from lowbit.plan.fitting.predict import Prediction, Predictor
from lowbit.plan.settings import ARITHMETIC, TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import LAST, MICRO_BATCHES, PLANNED, Technique, conflict, loaded
from lowbit.progress import Progress, reporting
from lowbit.sizes import amount, budget_in

__all__ = ["fit", "fits"]

#: Each choice that is not plain has to save this part of the time.
_WORTH = 0.005
#: States of 4 bits have to save this part of the time beside the fastest plan with 8.
_FEWER_BITS = 0.1
#: The way that holds least, and how often the number of processes is doubled to say how many would do.
_LEAST, _DOUBLINGS = "zero3", 10


def fit(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    require: Iterable[str] = (),
    exclude: Iterable[str] = (),
    quality: float | str = QUALITY,
    gpus: int = 1,
    link: str | float | None = None,
    group_size: int | None = None,
    losses: Mapping[str, float] | None = None,
    progress: Progress | bool | None = None,
) -> TrainingPlan:
    """The fastest way to train ``model`` on ``batch`` of which a step holds at most ``budget``.

    ``budget``: of the whole step, parameters and states included: bytes, a size such as ``"6GiB"``, or a share of the
    peak of plain training, ``"50%"``. ``batch`` and ``loss``: as ``lb.estimate`` takes them; the batch may be
    taken in parts, whose gradients add up to those of the whole. ``require``: names that the plan has to have, of its
    precision (``fp32``, ``bf16``, a recipe such as ``fp8``), optimizer (``adamw``, ``adamw8bit``), checkpoint policy
    and so on, see ``lowbit.plan.TECHNIQUES``; ``exclude``: names that it must not have, such as ``disk``.
    ``quality``: by how many percent the choices together may raise the loss: the sum of what was recorded of the demo's
    GPT for each that raises it and is not in ``require``; ``"any"`` lifts that. ``losses``: by name of a choice the
    relative change of the loss that you have measured, such as ``{"bf16": 0.02}`` for 2% more, in place of the record.
    A gain counts as zero. ``progress(what, done, total)`` is called
    on the way; None: a bar where standard error is a terminal; False: nothing.

    ``plan.apply_(model)`` does it; here ``model`` stays as it is, and on meta it may be too. Sizes are those of
    torch's allocator, by estimates. Times are sums of what the ops of a step take on this machine: the first plan for
    a model runs each of its ops on made-up tensors, and keeps the times in ``LOWBIT_CACHE``, or ``~/.cache/lowbit``.

    ``gpus``: so many processes of ``torch.distributed`` train together, on GPUs or CPUs, by the fastest way of
    ``lb.distributed.STRATEGIES`` that fits. ``budget``, sizes and ``batch`` are then those of one process, whose batch
    is a part of ``gpus`` times as many rows. ``plan.strategies`` says what each way takes. ``link``: what a process
    sends a second, such as ``"25GB/s"``; without it a sum among the processes is timed where there are any, else it is
    that of 10 Gb/s Ethernet on CPUs and of PCIe 4.0 on GPUs. ``group_size``: processes of one machine, within which
    ``hsdp`` shards. Where ``torch.distributed`` runs, all processes call ``fit``, the first plans, and all have its
    plan.

    Raises ValueError where nothing fits, with the least that would, and for unknown names; and as ``estimate``.
    """
    check_model(model)
    budget_in(budget, "fit")  # in every process, before any of them measures or plans
    group = together(gpus, link, group_size, Subject(model, batch, loss).device)

    def made() -> TrainingPlan:
        with reporting(progress, "planning") as shown:
            planned = fits(
                model, batch, [budget], loss, require=require, exclude=exclude, quality=quality, losses=losses,
                group=group, progress=shown,
            )  # fmt: skip
            return next(planned)

    return made() if gpus == 1 else TrainingPlan.everywhere(made, loss)


def fits(
    model: nn.Module,
    batch: Any,
    budgets: Sequence[str | int],
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    require: Iterable[str] = (),
    exclude: Iterable[str] = (),
    quality: float | str = QUALITY,
    losses: Mapping[str, float] | None = None,
    group: Together = ALONE,
    progress: Progress = lambda what, done, total: None,
) -> Iterator[TrainingPlan]:
    """``fit`` for several budgets, one after the other, which share their estimates."""
    asked = [budget_in(budget, "fit") for budget in budgets]
    check_mode(model, "fit")
    given(batch)
    subject = Subject(model, batch, loss)
    most = most_of(require, quality, losses)
    choices = allowed(require, exclude, most, group.gpus, group.group_size)
    choices = dict(_applicable(choices, subject))
    parts = any(choice.name == "micro-batches" for choice in choices[MICRO_BATCHES])
    predictor = Predictor(subject, group.bandwidth, parts=parts)
    progress("plain training", 0, 1)
    plain = predictor.whole(TrainingSettings(gpus=group.gpus))
    limits = [budget.of(plain.peak_bytes) for budget in asked]
    scarce = predictor.on_cpu and heap.is_scarce(min(limits), plain.peak_bytes)
    if scarce and not heap.returns_freed() and heap.return_freed():
        # As it will be while a plan runs: times of ops, of plain training too, are those with its page faults.
        predictor = Predictor(subject, group.bandwidth, parts=parts)
        plain = predictor.whole(TrainingSettings(gpus=group.gpus))
    for limit in limits:
        for tried in _tried(choices, group.gpus):
            search = _Search(predictor, tried, limit, group, most, progress, asked=bool(require or exclude))
            chosen = search.fastest()
            if chosen is not None:
                break
        yield _plan(search, chosen, plain, most.losses)


def _applicable(
    choices: Mapping[str, tuple[Technique, ...]], subject: Subject
) -> Iterator[tuple[str, tuple[Technique, ...]]]:
    """Of each dimension the choices that do something here. Raises ValueError where none does."""
    kind = type(subject.model).__name__
    for dimension, row in choices.items():
        reasons = {choice: choice.why_not(subject) for choice in row}
        found = tuple(choice for choice, reason in reasons.items() if reason is None)
        if not found:
            names = ", ".join(repr(choice.name) for choice in row)
            if row[0].name == "fp32":
                raise ValueError(
                    f"fit: {names} is of a model in fp32, and this {kind} has weights in {loaded(subject.model)}; "
                    f"require 'as loaded', or call model.float() before you plan"
                )
            raise ValueError(
                f"fit: {names} does nothing for this {kind}, its batch and its loss; leave it out of require: "
                f"{reasons[row[0]]}"
            )
        yield dimension, found


def _tried(choices: Mapping[str, tuple[Technique, ...]], gpus: int) -> Iterator[Mapping[str, tuple[Technique, ...]]]:
    """The choices of a search, and those of another one where nothing fits."""
    first, *others = choices[LAST]
    yield {**choices, LAST: (first,)}
    found = combinations([tuple(others), choices["states"]]) if others else []
    if any(conflict(replace(one, gpus=gpus)) is None for one in found):
        yield {**choices, LAST: tuple(others)}


def _plan(search: _Search, chosen: Prediction | None, plain: Prediction, losses: Mapping[str, float]) -> TrainingPlan:
    predictor, subject = search.predictor, search.predictor.subject
    if chosen is None:
        raise ValueError(search.refusal())
    beside = {name: predictor.predicted(plainer) for name, plainer in plainer_by_dimension(chosen.settings).items()}
    return TrainingPlan(
        chosen, search.limit, plain, list(search.predictions.values()), subject.loss, beside, search.strategies(),
        identity=identity_of(subject), batch=outlined(subject.batch),
        losses=losses, compared=search.compared(chosen.settings),
    )  # fmt: skip


class _Search:
    """Arithmetics are taken by the least time that they need, as long as that is less than what has been found."""

    def __init__(
        self,
        predictor: Predictor,
        choices: Mapping[str, tuple[Technique, ...]],
        limit: int,
        group: Together,
        most: Most,
        progress: Progress,
        asked: bool = False,
    ) -> None:
        self.predictor, self.limit, self.predictions = predictor, limit, dict[TrainingSettings, Prediction]()
        self._progress, self._group = progress, group
        rows = dict(choices)
        checkpoints, parts = rows.pop("checkpoint"), {choice.name for choice in rows.pop(MICRO_BATCHES)}
        self._counts = [n for n in predictor.counts() if ("whole batch" if n == 1 else "micro-batches") in parts]
        if not self._counts:
            raise ValueError(
                "fit: the batch has no 'micro-batches': it has one row, or the model or the loss fails on a part "
                "of it; leave them out of require, or give more rows"
            )
        self._by_block = any(choice.name == PLANNED for choice in checkpoints) and bool(predictor.blocks)
        self._policies = [
            policy
            for policy in (choice.changes.get("checkpoint") for choice in checkpoints if choice.name != PLANNED)
            if predictor.applies(policy)
        ]
        found = combinations([rows.pop(dimension) for dimension in ("precision", "attention", "loss")])
        arithmetics = [
            replace(one, bf16_params=has_half(predictor.model), loaded=loaded(predictor.model)) for one in found
        ]
        self._others = [group.of(one) for one in combinations(rows.values())]
        self._given = most.losses
        self._asked, self._has_8_bits = asked, any(one.bits == 8 for one in self._others)
        self._most, self._losses = most.percent, {one: most.lost(one) for one in (*arithmetics, *self._others)}
        self._arithmetics = [one for one in arithmetics if self._all(one)]
        if not self._arithmetics:
            raise ValueError(
                f"fit: the choices that require, exclude and quality leave do not go together: "
                f"{self._conflicts(arithmetics)}"
            )

    def fastest(self) -> Prediction | None:
        """The fastest that fits; None where nothing does."""
        found: Prediction | None = None
        bounds = []
        for number, arithmetic in enumerate(self._arithmetics):
            self._progress(words(arithmetic), number, 2 * len(self._arithmetics))
            bounds.append(min(map(self.predictor.least_seconds, self._all(arithmetic))))
        order = sorted(range(len(bounds)), key=bounds.__getitem__)
        for number, index in enumerate(order):
            if found is not None and found.seconds <= bounds[index]:
                break
            self._progress(words(self._arithmetics[index]), len(order) + number, 2 * len(order))
            other = self._fastest_of(self._arithmetics[index])
            if other is not None and (found is None or self._rank(other) < self._rank(found)):
                found = other
        self._progress("done", 1, 1)
        if found is None and self.least.peak_bytes <= self.limit:  # sums took it for larger
            found = self.predictions[self.least.settings] = self.least
        return found

    @cached_property
    def least(self) -> Prediction:
        """What holds least, as a whole."""
        return self.predictor.whole(min(self.predictions.values(), key=lambda one: one.peak_bytes).settings)

    def _all(self, arithmetic: TrainingSettings) -> list[TrainingSettings]:
        """All settings of an arithmetic without checkpoints."""
        fixed = {name: getattr(arithmetic, name) for name in ARITHMETIC}
        left = self._most - self._losses[arithmetic]
        others = [other for other in self._others if self._losses[other] <= left]
        found = [replace(other, micro_batches=count, **fixed) for other in others for count in self._counts]
        return [settings for settings in found if conflict(settings) is None]

    def _conflicts(self, arithmetics: Iterable[TrainingSettings]) -> str:
        """Why no combination is possible, in words."""
        fixed = [{name: getattr(one, name) for name in ARITHMETIC} for one in arithmetics]
        found = (conflict(replace(other, **values)) for values in fixed for other in self._others)
        reasons = dict.fromkeys(reason for reason in found if reason is not None)
        return "; ".join(reasons) or "what is not in require may cost no more loss than quality says"

    def _fastest_of(self, arithmetic: TrainingSettings) -> Prediction | None:
        settings = self._all(arithmetic)
        uniform = [
            self.predictor.predicted(replace(one, checkpoint=policy)) for one in settings for policy in self._policies
        ]
        self.predictions.update((one.settings, one) for one in uniform)
        candidates = sorted((one for one in uniform if one.peak_bytes <= self.limit), key=self._rank)
        if self._by_block:
            candidates = sorted([*candidates, *self._planned(settings, candidates)], key=self._rank)
        found: Prediction | None = None
        # Where none of the fastest fits as a whole, those that hold least may.
        smallest = sorted(candidates[TRIES:], key=lambda one: one.peak_bytes)[:TRIES]
        for number, candidate in enumerate([*candidates[:TRIES], *smallest]):
            if found is not None and (number >= TRIES or self._rank(found) <= self._rank(candidate)):
                break
            whole = self._within(candidate)
            if whole is not None and (found is None or self._rank(whole) < self._rank(found)):
                found = whole
        return found

    def _planned(self, settings: list[TrainingSettings], others: list[Prediction]) -> list[Prediction]:
        """Options by block, where they may be faster than all ``others``."""
        least = min((self._cost(one.settings, one.seconds) for one in others), default=None)
        found = []
        for one in sorted(settings, key=self._least_cost):
            if one.offload_activations:
                continue
            if least is not None and self._least_cost(one) >= least:
                break
            planned = self.predictor.by_block(one, self.limit)
            if planned is not None:
                found.append(planned)
                cost = self._cost(planned.settings, planned.seconds)
                least = cost if least is None else min(least, cost)
        return found

    def _rank(self, one: Prediction) -> tuple[float, int]:
        """Time, with what each choice has to be worth."""
        choices = len(plainer_by_dimension(one.settings))
        return self._cost(one.settings, one.seconds) * (1 + _WORTH * choices), one.peak_bytes

    def _least_cost(self, settings: TrainingSettings) -> float:
        return self._cost(settings, self.predictor.least_seconds(settings))

    def _cost(self, settings: TrainingSettings, seconds: float) -> float:
        """The time by which plans are compared. States of 4 bits are taken for the room that they leave, not for the
        time of their step: where 8 bits fit as well, 8 bits are taken.
        """
        if settings.bits != 4 or not self._has_8_bits:
            return seconds
        step, of_8_bits = (self.predictor.step_seconds(one) for one in (settings, replace(settings, bits=8)))
        return (seconds + max(of_8_bits - step, 0.0)) * (1 + _FEWER_BITS)

    def _within(self, candidate: Prediction) -> Prediction | None:
        """The estimate of the whole step; where that is above the budget, with less asked of the blocks."""
        target = self.limit
        for _ in range(TRIES):
            whole = self.predictor.whole(candidate.settings)
            self.predictions[whole.settings] = whole
            if whole.peak_bytes <= self.limit:
                return whole
            if not isinstance(candidate.settings.checkpoint, tuple):
                return None
            target -= whole.peak_bytes - self.limit
            again = self.predictor.by_block(replace(candidate.settings, checkpoint=None), target)
            if again is None:
                return None
            candidate = again
        return None

    def compared(self, chosen: TrainingSettings) -> Comparison | None:
        """Of a loss that nothing was recorded of: one forward in fp32 and in the lower precision that is chosen, or
        else the first that could have been. None where the records are of such a loss, or the caller gave the change.
        """
        is_lower = chosen.precision is not None or chosen.bf16_params
        lower = chosen if is_lower else next((one for one in self._arithmetics if one.precision is not None), None)
        if self.predictor.is_recorded or lower is None:
            return None
        name = described(lower)["precision"].name
        if name in self._given:
            return None
        most = self.predictions[chosen].peak_bytes
        return self.predictor.compared(replace(lower, micro_batches=chosen.micro_batches), name, most)

    def strategies(self) -> list[Prediction]:
        """Of several processes, by way the fastest that fits, or the one that holds least."""
        found: dict[str, list[Prediction]] = {}
        for one in self.predictions.values() if self._group.gpus > 1 else ():
            found.setdefault(one.settings.strategy, []).append(one)
        return [self._best_of(found[strategy]) for strategy in STRATEGIES if strategy in found]

    def _best_of(self, predictions: Sequence[Prediction]) -> Prediction:
        fit = [one for one in predictions if one.peak_bytes <= self.limit]
        return min(fit, key=self._rank) if fit else min(predictions, key=lambda one: one.peak_bytes)

    def refusal(self) -> str:
        """Why nothing fits, and what would."""
        least = self.least
        asked = "leave names out of require and exclude, " if self._asked else ""
        return (
            f"fit: no choice fits a step into {amount(self.limit)}; the least is {amount(least.peak_bytes)}, with "
            f"{words(least.settings)}. Ask for as much, {asked}give shorter rows or a smaller model, or "
            f"{self._more(least) if self._group.gpus > 1 else 'a smaller batch'}"
        )

    def _more(self, least: Prediction) -> str:
        """How many processes would do, with other settings as they are."""
        settings = least.settings
        settings = replace(settings, offload_states=False, offload_activations=False, offload_weights=False)
        for count in (self._group.gpus << power for power in range(1, _DOUBLINGS + 1)):
            sharded = replace(settings, gpus=count, strategy=_LEAST, group_size=None, master=TrainingSettings.master)
            if self.predictor.predicted(sharded).peak_bytes <= self.limit:
                return f"train on {count} processes: gpus={count}, which fits with {words(sharded)}"
        return f"a smaller batch: {count} processes with {_LEAST!r} do not do either"
