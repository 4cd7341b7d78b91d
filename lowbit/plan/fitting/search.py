"""``lb.fit``: the search for the fastest combination of techniques within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lowbit.checkpointing.policies import POLICIES
from lowbit.distributed.strategies import STRATEGIES
from lowbit.memory import heap
from lowbit.memory.devices import Device, device_in
from lowbit.memory.fake import outlined
from lowbit.models.batches import given
from lowbit.models.check import check_model
from lowbit.plan.adapters import RANK, adapters_in, has_frozen_matrices
from lowbit.plan.allowed import names_in
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
from lowbit.plan.techniques import ADAPTERS, LAST, MICRO_BATCHES, PLANNED, Technique, conflict, defaults, loaded
from lowbit.progress import Progress, reporting
from lowbit.sizes import amount, budget_in
from lowbit.tiled.fused_loss import takes_labels

__all__ = ["fit", "fits"]

#: Each technique has to save this fraction of the step time, so that noise of the timing adds none.
_WORTH = 0.005
#: A rough time is not longer than the measured one by more than the inverse of this factor.
_ROUGH = 0.6
#: 4-bit states have to save this fraction of the step time compared with the fastest plan with 8-bit states.
_FEWER_BITS = 0.1
#: The strategy that uses the least memory, and the number of doublings of the process count that an error tries.
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
    adapters: Any = None,
    device: str | Device | None = None,
    progress: Progress | bool | None = None,
) -> TrainingPlan:
    """Find the fastest way to train ``model`` on ``batch`` within a memory budget. ``model`` itself does not change.

    Memory is estimated in bytes of torch's allocator. Time is the sum over the ops of a step, each timed on this
    machine. The first plan for a model runs each op on random tensors and caches the times in ``LOWBIT_CACHE``, by
    default ``~/.cache/lowbit``.

    Args:
        model: Module in training mode; may be on the meta device.
        batch: One training batch, as for ``lb.estimate``. A plan may split it into micro-batches.
        budget: Limit on the peak memory of a step, including parameters and optimizer states. A number of bytes, a size
            such as ``"6GiB"``, or a share of the peak of plain training such as ``"50%"``.
        loss: ``loss(output, batch)``, a scalar. None: the model's own loss, as for ``lb.estimate``.
        require: Techniques that the plan must use, by name: a precision (``"bf16"``, a recipe such as ``"fp8"``), an
            optimizer (``"adamw8bit"``), a checkpoint policy and so on. ``lowbit.plan.TECHNIQUES`` lists them.
        exclude: Techniques that the plan must not use, such as ``"disk"``.
        quality: Largest increase of the loss in percent: the sum of the recorded increases of all techniques that are
            not in ``require``. A recorded decrease counts as zero. ``"any"`` removes the limit.
        losses: Relative changes of the loss that you measured, by technique, such as ``{"bf16": 0.02}`` for 2% more.
            They replace the records, which are of the demo's GPT.
        gpus: Number of processes of ``torch.distributed``, on GPUs or CPUs. The plan uses the fastest of
            ``lb.distributed.STRATEGIES`` that fits. ``budget`` and ``batch`` are then per process. If
            ``torch.distributed`` is running, call ``fit`` in all processes: the first one plans, and all return its
            plan.
        link: Bandwidth between processes in bytes per second, such as ``"25GB/s"``. By default an all-reduce is timed
            if processes run; otherwise 10 Gb/s Ethernet is assumed for CPUs and PCIe 4.0 for GPUs.
        group_size: Number of processes per machine, within which ``hsdp`` shards.
        adapters: Rank of LoRA adapters, or a ``peft.LoraConfig``: they are trained, and the model's weights are frozen.
            The plan may quantize the frozen weights (``"int8 base"``, ``"nf4 base"`` and so on); only int8 is
            within the default ``quality``. ``require=("adapters",)`` is short for rank 16.
        device: GPU to plan for, by its name in ``lb.plan.DEVICES``, such as ``"rtx-4090"``; this machine needs none.
            Sizes are those of CUDA. Times are rooflines of the data sheet, which a real step does not reach.
        progress: Called as ``progress(what, done, total)``. None shows a bar on a terminal; False shows nothing.

    Returns:
        The plan. ``plan.apply_(model)`` applies it.

    Raises:
        ValueError: Nothing fits (the error names the smallest budget that would), a name is unknown, or as
            ``lb.estimate``.
    """
    check_model(model)
    budget_in(budget, "fit")  # in every process, before any of them measures or plans
    target = device_in(device, "fit")
    group = together(gpus, link, group_size, target or Subject(model, batch, loss).device)

    def make() -> TrainingPlan:
        with reporting(progress, "planning") as shown:
            planned = fits(
                model, batch, [budget], loss, require=require, exclude=exclude, quality=quality, losses=losses,
                adapters=adapters, group=group, device=target, progress=shown,
            )  # fmt: skip
            return next(planned)

    return make() if gpus == 1 else TrainingPlan.broadcast(make, loss)


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
    adapters: Any = None,
    group: Together = ALONE,
    device: Device | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Iterator[TrainingPlan]:
    """``fit`` for several budgets in turn, with shared estimates."""
    asked = [budget_in(budget, "fit") for budget in budgets]
    check_mode(model, "fit")
    given(batch)
    require = names_in(require)
    if adapters is not None:
        require = (*require, ADAPTERS)
    elif ADAPTERS in require:
        adapters = RANK
    subject = Subject(model, batch, loss, adapters_in(adapters, "fit"), device)
    most = most_of(require, quality, losses)
    choices = allowed(require, exclude, most, group.gpus, group.group_size)
    choices = dict(_applicable(choices, subject))
    if subject.adapters is not None:
        choices["training"] = tuple(
            replace(row, changes={"adapters": subject.adapters}) if row.name == ADAPTERS else row
            for row in choices["training"]
        )
    parts = any(choice.name == "micro-batches" for choice in choices[MICRO_BATCHES])
    predictor = Predictor(subject, group.bandwidth, parts=parts)
    progress("plain training", 0, 1)
    peak = predictor.whole_peak(TrainingSettings(gpus=group.gpus))
    limits = [budget.of(peak) for budget in asked]
    if device is not None and max(limits) > device.memory:
        raise ValueError(
            f"fit: the device has {amount(device.memory)}, which is less than the budget of {amount(max(limits))}; "
            f"the CUDA context and libraries take another 0.5 to 1 GiB of it"
        )
    if predictor.on_cpu and heap.is_scarce(min(limits), peak):
        heap.return_freed()  # so that ops are timed with the page faults that they will have while the plan runs
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
    """The applicable techniques of each dimension. Raises ValueError for a dimension without any."""
    model_class = type(subject.model).__name__
    for dimension, row in choices.items():
        reasons = {choice: choice.why_not(subject) for choice in row}
        applicable = tuple(choice for choice, reason in reasons.items() if reason is None)
        if not applicable:
            names = ", ".join(repr(choice.name) for choice in row)
            if row[0].name == "fp32":
                raise ValueError(
                    f"fit: {names} needs a model in fp32, and this {model_class} has weights in "
                    f"{loaded(subject.model)}; require 'as loaded', or call model.float() before you plan"
                )
            raise ValueError(
                f"fit: {names} does nothing for this {model_class}, its batch and its loss; leave it out of require: "
                f"{reasons[row[0]]}"
            )
        yield dimension, applicable


def _tried(choices: Mapping[str, tuple[Technique, ...]], gpus: int) -> Iterator[Mapping[str, tuple[Technique, ...]]]:
    """The choices of a first search, and those of a second one in case nothing fits."""
    first, *slower = choices[LAST]
    yield {**choices, LAST: (first,)}
    candidates = combinations([tuple(slower), choices["states"]]) if slower else []
    if any(conflict(replace(settings, gpus=gpus)) is None for settings in candidates):
        yield {**choices, LAST: tuple(slower)}


def _plan(search: _Search, chosen: Prediction | None, plain: Prediction, losses: Mapping[str, float]) -> TrainingPlan:
    predictor, subject = search.predictor, search.predictor.subject
    if chosen is None:
        raise ValueError(search.refusal())
    chosen = predictor.most_resident(chosen, search.limit)
    beside = {name: predictor.predicted(plainer) for name, plainer in plainer_by_dimension(chosen.settings).items()}
    return TrainingPlan(
        chosen, search.limit, plain, list(search.predictions.values()), subject.loss, beside, search.strategies(),
        identity=identity_of(subject), batch=outlined(subject.batch),
        losses=losses, compared=search.compared(chosen.settings),
        device=None if subject.target is None else subject.target.name,
    )  # fmt: skip


def _over_blocks(policy: str | None) -> bool:
    """Whether a checkpointing policy recomputes several blocks together. Its estimates take the longest."""
    return policy is not None and POLICIES[policy].block is None


def _peak(prediction: Prediction) -> int:
    return prediction.peak_bytes


class _Search:
    """Branch and bound over arithmetics, in the order of the least time that each needs."""

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
        weights: dict[str, Any] = {
            "bf16_params": has_half(predictor.model), "loaded": loaded(predictor.model),
            "frozen": has_frozen_matrices(predictor.model), "loss_outside": not takes_labels(predictor.model),
        }  # fmt: skip
        computing = [rows.pop(name) for name in list(rows) if not defaults(name).keys().isdisjoint(ARITHMETIC)]
        arithmetics = [replace(settings, **weights) for settings in combinations(computing)]
        self._placements = [group.of(settings) for settings in combinations(rows.values())]
        self._measured_losses = most.losses
        self._asked, self._has_8_bits = asked, any(settings.bits == 8 for settings in self._placements)
        self._most = most.percent
        self._losses = {settings: most.lost(settings) for settings in (*arithmetics, *self._placements)}
        self._arithmetics = [arithmetic for arithmetic in arithmetics if self._all(arithmetic)]
        if not self._arithmetics:
            raise ValueError(
                f"fit: the choices that require, exclude and quality leave do not go together: "
                f"{self._conflicts(arithmetics)}"
            )

    def fastest(self) -> Prediction | None:
        """The fastest prediction that fits; None if none does."""
        best: Prediction | None = None
        rough = {one: (self.predictor.rough_seconds(one), -len(plainer_by_dimension(one))) for one in self._arithmetics}
        order = sorted(rough, key=rough.__getitem__)
        for number, arithmetic in enumerate(order):
            self._progress(words(arithmetic), number, len(order))
            if best is not None and self._is_slower(arithmetic, best):
                continue
            candidate = self._fastest_of(arithmetic)
            if candidate is not None and (best is None or self._rank(candidate) < self._rank(best)):
                best = candidate
        self._progress("done", 1, 1)
        if best is None and self.least.peak_bytes <= self.limit:  # its estimate by sums was too large
            best = self.predictions[self.least.settings] = self.least
        return best

    def _is_slower(self, arithmetic: TrainingSettings, best: Prediction) -> bool:
        """Return whether no step with this arithmetic is faster than the best so far.

        That is so if its rough time is much longer, if the least time that it needs is longer, or if it needs at least
        as much memory and time as the arithmetic of the best.
        """
        if self.predictor.rough_seconds(arithmetic) * _ROUGH > best.seconds:
            return True
        if min(map(self.predictor.least_seconds, self._all(arithmetic))) >= best.seconds:
            return True
        if self._group.gpus > 1:  # strategies differ in the arithmetics that they allow
            return False
        peak, seconds = self.predictor.of_plain(arithmetic)
        of_best = TrainingSettings(**{name: getattr(best.settings, name) for name in ARITHMETIC})
        best_peak, best_seconds = self.predictor.of_plain(of_best)
        return peak >= best_peak and seconds >= best_seconds

    @cached_property
    def least(self) -> Prediction:
        """The estimate of a whole step for the settings that use the least memory."""
        return self.predictor.whole(min(self.predictions.values(), key=_peak).settings)

    def _all(self, arithmetic: TrainingSettings) -> list[TrainingSettings]:
        """All settings with this arithmetic, without checkpoints."""
        fixed = {name: getattr(arithmetic, name) for name in ARITHMETIC}
        left = self._most - self._losses[arithmetic]
        placements = [placement for placement in self._placements if self._losses[placement] <= left]
        candidates = [replace(one, micro_batches=count, **fixed) for one in placements for count in self._counts]
        return [settings for settings in candidates if conflict(settings) is None]

    def _conflicts(self, arithmetics: Iterable[TrainingSettings]) -> str:
        """Why no combination is possible."""
        fixed = [{name: getattr(arithmetic, name) for name in ARITHMETIC} for arithmetic in arithmetics]
        conflicts = (conflict(replace(one, **values)) for values in fixed for one in self._placements)
        reasons = dict.fromkeys(reason for reason in conflicts if reason is not None)
        return "; ".join(reasons) or "techniques that are not required raise the loss by more than quality allows"

    def _fastest_of(self, arithmetic: TrainingSettings) -> Prediction | None:
        settings = self._all(arithmetic)
        candidates = self._uniform(settings, [policy for policy in self._policies if not _over_blocks(policy)])
        if self._by_block:
            candidates = sorted([*candidates, *self._planned(settings, candidates)], key=self._rank)
        if not candidates:
            candidates = self._uniform(settings, [policy for policy in self._policies if _over_blocks(policy)])
        best: Prediction | None = None
        # If no fast candidate fits by the estimate of its whole step, one of the smallest may.
        smallest = sorted(candidates[TRIES:], key=_peak)[:TRIES]
        for number, candidate in enumerate([*candidates[:TRIES], *smallest]):
            if best is not None and (number >= TRIES or self._rank(best) <= self._rank(candidate)):
                break
            prediction = self._within(candidate)
            if prediction is not None and (best is None or self._rank(prediction) < self._rank(best)):
                best = prediction
        return best

    def _uniform(self, settings: list[TrainingSettings], policies: list[str | None]) -> list[Prediction]:
        """The predictions with each of the policies for all blocks that fit."""
        uniform = [self.predictor.predicted(replace(one, checkpoint=policy)) for one in settings for policy in policies]
        self.predictions.update((one.settings, one) for one in uniform)
        return sorted((one for one in uniform if one.peak_bytes <= self.limit), key=self._rank)

    def _planned(self, settings: list[TrainingSettings], uniform: list[Prediction]) -> list[Prediction]:
        """Per-block checkpoints that may be faster than all uniform policies."""
        least = min((self._cost(one.settings, one.seconds) for one in uniform), default=None)
        predictions = []
        for candidate in sorted(settings, key=self._least_cost):
            if candidate.offload_activations:
                continue
            if least is not None and self._least_cost(candidate) >= least:
                break
            planned = self.predictor.by_block(candidate, self.limit)
            if planned is not None:
                predictions.append(planned)
                cost = self._cost(planned.settings, planned.seconds)
                least = cost if least is None else min(least, cost)
        return predictions

    def _rank(self, prediction: Prediction) -> tuple[float, int]:
        """Time, plus a penalty per technique; then memory."""
        choices = len(plainer_by_dimension(prediction.settings))
        return self._cost(prediction.settings, prediction.seconds) * (1 + _WORTH * choices), prediction.peak_bytes

    def _least_cost(self, settings: TrainingSettings) -> float:
        return self._cost(settings, self.predictor.least_seconds(settings))

    def _cost(self, settings: TrainingSettings, seconds: float) -> float:
        """The time by which plans are compared. 4-bit states are chosen to save memory, not optimizer time: if 8-bit
        states fit as well, the plan uses those.
        """
        if settings.bits != 4 or not self._has_8_bits:
            return seconds
        step, with_8_bits = map(self.predictor.step_seconds, (settings, replace(settings, bits=8)))
        return (seconds + max(with_8_bits - step, 0.0)) * (1 + _FEWER_BITS)

    def _within(self, candidate: Prediction) -> Prediction | None:
        """The estimate of the whole step; if it exceeds the budget, with per-block checkpoints for less memory."""
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
        """For a loss without a record: one forward pass in fp32 and one in the chosen lower precision, or in the first
        that could be chosen. None if there is a record, or if the caller passed the change of the loss.
        """
        is_lower = chosen.precision is not None or chosen.bf16_params
        lowered = (arithmetic for arithmetic in self._arithmetics if arithmetic.precision is not None)
        lower = chosen if is_lower else next(lowered, None)
        if self.predictor.is_recorded or lower is None:
            return None
        name = described(lower)["precision"].name
        if name in self._measured_losses:
            return None
        most = self.predictions[chosen].peak_bytes
        return self.predictor.compared(replace(lower, micro_batches=chosen.micro_batches), name, most)

    def strategies(self) -> list[Prediction]:
        """For several processes, per strategy the fastest prediction that fits, or the smallest if none fits."""
        by_strategy: dict[str, list[Prediction]] = {}
        for prediction in self.predictions.values() if self._group.gpus > 1 else ():
            by_strategy.setdefault(prediction.settings.strategy, []).append(prediction)
        return [self._best_of(by_strategy[strategy]) for strategy in STRATEGIES if strategy in by_strategy]

    def _best_of(self, predictions: Sequence[Prediction]) -> Prediction:
        fitting = [one for one in predictions if one.peak_bytes <= self.limit]
        return min(fitting, key=self._rank) if fitting else min(predictions, key=_peak)

    def refusal(self) -> str:
        """The error if nothing fits: the smallest budget that would, and a remedy."""
        least = self.least
        asked = "leave names out of require and exclude, " if self._asked else ""
        return (
            f"fit: no choice fits a step into {amount(self.limit)}; the least is {amount(least.peak_bytes)}, with "
            f"{words(least.settings)}. Ask for as much, {asked}give shorter rows or a smaller model, or "
            f"{self._more(least) if self._group.gpus > 1 else 'a smaller batch'}"
        )

    def _more(self, least: Prediction) -> str:
        """The number of processes with which the same settings would fit."""
        settings = least.settings
        settings = replace(settings, offload_states=False, offload_activations=False, offload_weights=False)
        for count in (self._group.gpus << power for power in range(1, _DOUBLINGS + 1)):
            sharded = replace(settings, gpus=count, strategy=_LEAST, group_size=None, master=TrainingSettings.master)
            if self.predictor.predicted(sharded).peak_bytes <= self.limit:
                return f"train on {count} processes: gpus={count}, which fits with {words(sharded)}"
        return f"a smaller batch: {count} processes with {_LEAST!r} do not do either"
