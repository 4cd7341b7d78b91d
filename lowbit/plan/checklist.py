"""What to do when memory runs out: the techniques of ``TECHNIQUES``, each with what it saves in this model and what it
costs.

Where an estimate can take a technique, it is estimated like the plain step; else its bytes follow from the kinds of
bytes at the plain peak.
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
    """A step of training, as ``lb.estimate`` takes it."""

    subject: Subject
    optimizer: Any = "adamw"
    precision: str | None = None
    recipe: str | None = None
    prepare: Callable[[nn.Module], object] | None = None
    micro_batches: int = 1

    def estimated(self) -> Estimate:
        """The estimate of the step."""
        one = self.subject
        return estimate(
            one.model, one.batch, one.loss, self.recipe, self.optimizer, precision=self.precision,
            prepare=self.prepare, micro_batches=self.micro_batches,
        )  # fmt: skip


class NotHere(Exception):
    """A technique does not apply, for the reason that is given."""


class Effect(NamedTuple):
    """``saves``: bytes of the peak. ``seconds``: more that a step takes."""

    saves: int
    seconds: float


#: Of the plain step and its estimate. Raises NotHere.
Measure = Callable[[Step, Estimate], Effect]


class Advised(NamedTuple):
    """A technique that is advised. ``code``: a line that applies it. ``how``: its figures are estimated, or a sum of
    kinds at the plain peak.
    """

    name: str
    code: str
    measure: Measure
    how: str = "estimated"


class Advice(NamedTuple):
    """What a technique does for a model: ``saves`` bytes of the peak, for ``time``, a share of a step that it adds.
    ``note``: why it does nothing here, if it does not.
    """

    name: str
    saves: int
    time: float
    code: str
    how: str
    note: str = ""


class Checklist:
    """The techniques, best first: those that save most for their time. ``plain`` is the estimate without them."""

    def __init__(self, plain: Estimate, advice: list[Advice]) -> None:
        self.plain, self.advice = plain, advice

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {"plain": self.plain.as_dict(), "advice": [row._asdict() for row in self.advice]}

    def __str__(self) -> str:
        rows = [("technique", "peak", "in percent", "time", "how known", "code or reason")]
        peak = max(self.plain.peak_bytes, 1)
        for row in self.advice:
            figures = ("-", "-", "-") if row.note else (
                amount_changed(-row.saves), share_changed(-row.saves / peak), share_changed(row.time)
            )  # fmt: skip
            rows.append((row.name, *figures, row.how, row.note or row.code))
        return aligned(rows, (1, 2, 3))


def checklist(
    model: nn.Module,
    batch: Any,
    loss: Loss = None,
    optimizer: Any = "adamw",
    precision: str | None = None,
    recipe: str | None = None,
) -> Checklist:
    """What each technique of ``ADVISED`` saves of the peak of a step of training ``model`` on ``batch``, in bytes, and
    the time that it adds, by estimates alone: nothing is computed, and ``model`` stays, on meta or not.

    The arguments are those of ``lb.estimate``. Times follow from arithmetic and traffic at the rates of this
    machine, and serve for comparison.
    Raises as ``lb.estimate``.
    """
    step = Step(Subject(model, batch, loss), optimizer, precision, recipe)
    plain = step.estimated()
    found = [_advice(technique, step, plain) for technique in ADVISED]
    useless = [row for row in found if row.note]
    return Checklist(plain, sorted((row for row in found if not row.note), key=_rank) + useless)


def _rank(row: Advice) -> float:
    """Bytes for time: what costs nothing counts as a hundredth of a step."""
    return -row.saves / max(row.time, 0.01)


def _advice(technique: Advised, step: Step, plain: Estimate) -> Advice:
    name, code, how = technique.name, technique.code, technique.how
    try:
        effect = technique.measure(step, plain)
    except NotHere as reason:
        return Advice(name, 0, 0.0, code, how, str(reason))
    time = effect.seconds / max(plain.seconds, 1e-12)
    if effect.saves <= 0:
        return Advice(name, 0, time, code, how, f"it does not lower the peak, which is in {plain.peak_event}")
    return Advice(name, effect.saves, time, code, how)


# -- how figures come about -------------------------------------------------------------------------------------------
def _estimated(technique: Technique) -> Measure:
    """By an estimate of the step with the technique."""

    def measure(step: Step, plain: Estimate) -> Effect:
        reason = technique.why_not(step.subject)
        if reason is not None:
            raise NotHere(reason.split(";")[0])
        changed = step
        for name, value in technique.changes.items():
            changed = _CHANGES.get(name, partial(_prepared, name))(changed, value)
        if changed == step:
            raise NotHere(f"precision is {step.precision} already")
        return _between(changed, plain)

    return measure


def _between(step: Step, plain: Estimate) -> Effect:
    other = step.estimated()
    return Effect(plain.peak_bytes - other.peak_bytes, other.seconds - plain.seconds)


def _prepared(name: str, step: Step, value: Any) -> Step:
    """As plans prepare a model whose settings have this value alone."""
    settings = TrainingSettings(**{name: value})
    return replace(step, prepare=lambda model: prepare_model_(model, settings))


def _recipe(step: Step, recipe: str) -> Step:
    if step.recipe is not None:
        raise NotHere(f"recipe is {step.recipe} already")
    return replace(step, recipe=recipe)


def _bits(step: Step, bits: int) -> Step:
    if not isinstance(step.optimizer, str) or step.optimizer.endswith(("8bit", "4bit")):
        raise NotHere("the optimizer is one of few bits, or no name")
    name = step.optimizer.removesuffix("32bit").removesuffix("16bit")
    return replace(step, optimizer=f"{name}{bits}bit")


def _parts(step: Step, parts: int) -> Step:
    rows = samples(step.subject.batch)
    if rows < parts:
        raise NotHere(f"the batch has {'one row' if rows == 1 else f'{rows} rows'}")
    return replace(step, subject=replace(step.subject, batch=largest_part(step.subject.batch, parts)),
                   micro_batches=parts)  # fmt: skip


#: By field of the settings, how a step has a value; the rest is as plans prepare models.
_CHANGES: dict[str, Callable[[Step, Any], Step]] = {
    "precision": lambda step, precision: replace(step, precision=precision),
    "recipe": _recipe,
    "bits": _bits,
    "micro_batches": _parts,
}


def _half(step: Step, plain: Estimate) -> Effect:
    return _between(replace(_parts(step, 2), micro_batches=1), plain)


def _moved(*kinds: str) -> Measure:
    """By the bytes of these kinds at the plain peak, which are written and read in each step at the bandwidth of a
    directory.
    """

    def measure(step: Step, plain: Estimate) -> Effect:
        size = _sum(plain, kinds)
        at = bandwidth("cpu" if plain.device.type == "cuda" else tempfile.gettempdir())
        return Effect(size, size * (1 / at.write + 1 / at.read))

    return measure


def _freed(step: Step, plain: Estimate) -> Effect:
    return Effect(_sum(plain, ("gradients",)), 0.0)


def _shared(strategy: str) -> Measure:
    """By what one process holds of the parameters, gradients and states at the plain peak."""

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
        raise NotHere(f"the peak has no {' and '.join(kinds)}")
    return size


_STATES = ("optimizer state", "master copies")

#: How many processes share a model in the advice.
_PROCESSES = 8


def _advised(technique: Technique) -> Advised:
    name, code, changes = technique.name, technique.code, technique.changes
    if "offload_states" in changes:
        return Advised(name, code, _moved(*_STATES), "sum of states")
    if "offload_activations" in changes:
        return Advised(name, code, _moved("activations"), "sum of activations")
    if "strategy" in changes:
        how = f"sum of weights, gradients, states; {_PROCESSES} processes"
        return Advised(name, code, _shared(changes["strategy"]), how)
    return Advised(name, code, _estimated(technique))


ADVISED = (
    Advised("half the batch", "DataLoader(..., batch_size=B // 2)", _half),
    Advised("steps in backward", "lb.optim.in_backward_(model, lb.optim.AdamW)", _freed, "sum of gradients"),
    *(_advised(technique) for technique in techniques() if technique.code and not technique.needs),
)
