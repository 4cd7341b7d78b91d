"""``lb.memory.checklist``: the bytes that each technique saves for a model, and the time that it costs.

Techniques that ``lb.estimate`` supports are estimated like the plain step. The savings of the others are computed from
the kinds of bytes at the plain peak.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lowbit.distributed.strategies import STRATEGIES
from lowbit.memory.estimator import Estimate
from lowbit.memory.rss import SystemMemory, system_memory
from lowbit.plan.settings import TrainingSettings, prepare_model_
from lowbit.plan.step_estimate import estimate
from lowbit.plan.subject import Loss, Subject
from lowbit.plan.techniques import Technique, techniques
from lowbit.sizes import amount_changed, share_changed
from lowbit.storage.bandwidth import bandwidth
from lowbit.tables import aligned
from lowbit.train.micro_batches import largest_part, samples

__all__ = ["ADVISED", "Advice", "Advised", "Checklist", "NotHere", "Step", "checklist"]


@dataclass(frozen=True)
class Step:
    """A training step, with arguments of ``lb.estimate``."""

    subject: Subject
    optimizer: Any = "adamw"
    precision: str | None = None
    recipe: str | None = None
    prepare: Callable[[nn.Module], object] | None = None
    micro_batches: int = 1

    def estimated(self) -> Estimate:
        """Return the estimate of the step."""
        return estimate(
            self.subject.model, self.subject.batch, self.subject.loss, self.recipe, self.optimizer,
            precision=self.precision, prepare=self.prepare, micro_batches=self.micro_batches,
        )  # fmt: skip


class NotHere(Exception):
    """Raised with the reason why a technique has no effect."""


class Effect(NamedTuple):
    """The bytes that a technique saves at the peak, and the seconds that it adds to a step."""

    saves: int
    seconds: float


#: ``measure(step, estimate of the plain step)``. Raises NotHere.
Measure = Callable[[Step, Estimate], Effect]


class Advised(NamedTuple):
    """A technique of the checklist.

    Attributes:
        name: Name of the technique.
        call: A line of code that applies it.
        measure: Returns its effect.
        source: Source of its figures: an estimate, or a sum of kinds at the plain peak.
    """

    name: str
    call: str
    measure: Measure
    source: str = "estimated"


class Advice(NamedTuple):
    """The effect of a technique on a model, a row of a ``Checklist``.

    Attributes:
        technique: Name of the technique.
        call: A line of code that applies it.
        saves: Bytes that it saves at the peak; 0 if it has no effect.
        peak_bytes: Peak of the step with it.
        time: Time that it adds, as a fraction of the plain step.
        source: Source of the figures.
        reason: Why it has no effect on this model, or "".
    """

    technique: str
    call: str
    saves: int
    peak_bytes: int
    time: float
    source: str
    reason: str = ""

    @property
    def applies(self) -> bool:
        """Whether it lowers the peak of this model."""
        return not self.reason


class Checklist:
    """The result of ``checklist``. ``print`` shows a table.

    Attributes:
        plain: Estimate of the plain step.
        rows: Advice, sorted by bytes saved per time; rows without an effect are last.
        system: Memory of the device when the checklist was made.
    """

    def __init__(self, plain: Estimate, rows: list[Advice], system: SystemMemory) -> None:
        self.plain, self.rows, self.system = plain, rows, system

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "plain": self.plain.as_dict(), "rows": [row._asdict() for row in self.rows],
            "system": self.system._asdict(),
        }  # fmt: skip

    def __str__(self) -> str:
        table = [("technique", "peak", "in percent", "time", "source", "call or reason")]
        peak = max(self.plain.peak_bytes, 1)
        for row in self.rows:
            figures = ("-", "-", "-") if not row.applies else (
                amount_changed(-row.saves), share_changed(-row.saves / peak), share_changed(row.time)
            )  # fmt: skip
            table.append((row.technique, *figures, row.source, row.reason or row.call))
        return f"{aligned(table, (1, 2, 3))}\n\nmemory of {self.system.device}: {self.system}\n{_UNUSED}"


def checklist(
    model: nn.Module,
    batch: Any,
    loss: Loss = None,
    *,
    optimizer: Any = "adamw",
    precision: str | None = None,
    recipe: str | None = None,
) -> Checklist:
    """Estimate the bytes that each technique saves at the peak of a training step, and the time that it adds.

    The step itself does not run, and ``model`` does not change. Times follow from the arithmetic and traffic rates of
    this machine, and are for comparison only. ``lowbit doctor --memory`` prints the result.

    Args:
        model: Module to train; may be on the meta device.
        batch: Batch, as for ``lb.estimate``.
        loss: Loss, as for ``lb.estimate``.
        optimizer: Optimizer, as for ``lb.estimate``.
        precision: Precision, as for ``lb.estimate``.
        recipe: Recipe, as for ``lb.estimate``.

    Returns:
        The checklist, with one row per technique.

    Raises:
        ValueError: As ``lb.estimate``.
        TypeError: As ``lb.estimate``.
    """
    step = Step(Subject(model, batch, loss), optimizer, precision, recipe)
    plain = step.estimated()
    rows = [_advice(technique, step, plain) for technique in ADVISED]
    useful = sorted((row for row in rows if row.applies), key=_rank)
    return Checklist(plain, [*useful, *(row for row in rows if not row.applies)], system_memory(plain.device))


def _rank(row: Advice) -> float:
    """Return bytes per time, negative. A technique without cost counts as a hundredth of a step."""
    return -row.saves / max(row.time, 0.01)


def _advice(technique: Advised, step: Step, plain: Estimate) -> Advice:
    def row(saves: int, time: float, reason: str = "") -> Advice:
        name, call, _, source = technique
        return Advice(name, call, saves, plain.peak_bytes - saves, time, source, reason)

    try:
        effect = technique.measure(step, plain)
    except NotHere as reason:
        return row(0, 0.0, str(reason))
    time = effect.seconds / max(plain.seconds, 1e-12)
    if effect.saves <= 0:
        return row(0, time, f"it does not lower the peak, which is in {plain.peak_event}")
    return row(effect.saves, time)


# -- sources of the figures -------------------------------------------------------------------------------------------
def _estimated(technique: Technique) -> Measure:
    """Estimate the step with the technique."""

    def measure(step: Step, plain: Estimate) -> Effect:
        reason = technique.why_not(step.subject)
        if reason is not None:
            raise NotHere(reason.split(";")[0])
        changed = step
        for name, value in technique.changes.items():
            changed = _CHANGES.get(name, partial(_prepared, name))(changed, value)
        if changed == step:
            raise NotHere(f"precision is already {step.precision}")
        return _between(changed, plain)

    return measure


def _between(step: Step, plain: Estimate) -> Effect:
    other = step.estimated()
    return Effect(plain.peak_bytes - other.peak_bytes, other.seconds - plain.seconds)


def _prepared(name: str, step: Step, value: Any) -> Step:
    """Prepare the model as a plan with this one setting does."""
    settings = TrainingSettings(**{name: value})
    return replace(step, prepare=lambda model: prepare_model_(model, settings))


def _recipe(step: Step, recipe: str) -> Step:
    if step.recipe is not None:
        raise NotHere(f"recipe is already {step.recipe}")
    return replace(step, recipe=recipe)


def _bits(step: Step, bits: int) -> Step:
    if not isinstance(step.optimizer, str) or step.optimizer.endswith(("8bit", "4bit")):
        raise NotHere("the optimizer is already low-bit, or is not given by name")
    name = step.optimizer.removesuffix("32bit").removesuffix("16bit")
    return replace(step, optimizer=f"{name}{bits}bit")


def _micro_batches(step: Step, count: int) -> Step:
    rows = samples(step.subject.batch)
    if rows < count:
        raise NotHere(f"the batch has {'one row' if rows == 1 else f'{rows} rows'}")
    return replace(step, subject=replace(step.subject, batch=largest_part(step.subject.batch, count)),
                   micro_batches=count)  # fmt: skip


#: Functions that set a field of the settings in a step. Other fields are applied by ``prepare``, as in plans.
_CHANGES: dict[str, Callable[[Step, Any], Step]] = {
    "precision": lambda step, precision: replace(step, precision=precision),
    "recipe": _recipe,
    "bits": _bits,
    "micro_batches": _micro_batches,
}


def _half(step: Step, plain: Estimate) -> Effect:
    return _between(replace(_micro_batches(step, 2), micro_batches=1), plain)


def _offloaded(*kinds: str) -> Measure:
    """Offload these kinds of bytes: each step writes and reads them at the bandwidth of the target."""

    def measure(step: Step, plain: Estimate) -> Effect:
        size = _sum(plain, kinds)
        rates = bandwidth("cpu" if plain.device.type == "cuda" else tempfile.gettempdir())
        return Effect(size, size * (1 / rates.write + 1 / rates.read))

    return measure


def _freed(step: Step, plain: Estimate) -> Effect:
    return Effect(_sum(plain, ("gradients",)), 0.0)


def _sharded(strategy: str) -> Measure:
    """Shard the parameters, gradients and states at the plain peak."""

    def measure(step: Step, plain: Estimate) -> Effect:
        parameters, gradients, states = (
            sum(plain.by_kind.get(kind, 0) for kind in kinds) for kinds in (("parameters",), ("gradients",), _STATES)
        )
        held = STRATEGIES[strategy].bytes(parameters, gradients, states, _PROCESSES)
        return Effect(parameters + gradients + states - held, 0.0)

    return measure


def _sum(plain: Estimate, kinds: tuple[str, ...]) -> int:
    size = sum(plain.by_kind.get(kind, 0) for kind in kinds)
    if not size:
        raise NotHere(f"there are no {' and '.join(kinds)} at the peak")
    return size


_STATES = ("optimizer state", "master copies")

#: A line below the memory of the system; the call is no technique, since it does not change the peak.
_UNUSED = "lb.memory.clear() frees memory that this process no longer uses; it is not part of the peak"

#: Number of processes in the advice on sharding.
_PROCESSES = 8


def _advised(technique: Technique) -> Advised:
    name, code, changes = technique.name, technique.code, technique.changes
    if "offload_states" in changes:
        return Advised(name, code, _offloaded(*_STATES), "sum of states")
    if "offload_activations" in changes:
        return Advised(name, code, _offloaded("activations"), "sum of activations")
    if "strategy" in changes:
        source = f"sum of weights, gradients, states; {_PROCESSES} processes"
        return Advised(name, code, _sharded(changes["strategy"]), source)
    return Advised(name, code, _estimated(technique))


ADVISED = (
    Advised("half the batch", "DataLoader(..., batch_size=B // 2)", _half),
    Advised("steps in backward", "lb.optim.in_backward_(model, lb.optim.AdamW)", _freed, "sum of gradients"),
    *(_advised(technique) for technique in techniques() if technique.code and not technique.needs),
)
