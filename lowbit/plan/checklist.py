"""What to do when memory runs out: the usual techniques, each with what it saves in this model and what it costs.

A technique is a row of ``TECHNIQUES``. Where an estimate can take it, it is estimated like the plain step; else its
bytes follow from the kinds of bytes at the plain peak, which the row says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.memory.estimator import Estimate
from lowbit.plan.step_estimate import estimate
from lowbit.sizes import amount_changed, share_changed
from lowbit.storage.bandwidth import bandwidth
from lowbit.tables import aligned
from lowbit.tiled import attention_, fuse_loss_
from lowbit.tiled.fused_loss import answers_without_logits
from lowbit.tiled.model_attention import attends_without_scores
from lowbit.train import compress_activations_

__all__ = ["TECHNIQUES", "Advice", "Checklist", "Technique", "checklist"]


@dataclass(frozen=True)
class Step:
    """A step of training, as ``lb.estimate`` takes it."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    recipe: str | None = None
    optimizer: Any = "adamw"
    checkpoint: Any = None
    precision: str | None = None
    prepare: Callable[[nn.Module], object] | None = None
    micro_batches: int = 1

    def estimated(self) -> Estimate:
        """The estimate of the step."""
        return estimate(
            self.model, self.batch, self.loss, self.recipe, self.optimizer, self.checkpoint, precision=self.precision,
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


class Technique(NamedTuple):
    """``code``: a line that applies it. ``how``: its figures are estimated, or a sum of kinds at the plain peak."""

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
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = "adamw",
    precision: str | None = None,
    recipe: str | None = None,
) -> Checklist:
    """What each technique of ``TECHNIQUES`` saves of the peak of a step of training ``model`` on ``batch``, in bytes,
    and the time that it adds, by estimates alone: nothing is computed, and ``model`` stays, on meta or not.

    The arguments are those of ``lb.estimate``. Times follow from arithmetic and traffic at the rates of this
    machine, and serve for comparison.
    Raises as ``lb.estimate``.
    """
    step = Step(model, batch, loss, recipe, optimizer, None, precision)
    plain = step.estimated()
    found = [_advice(technique, step, plain) for technique in TECHNIQUES]
    useless = [row for row in found if row.note]
    return Checklist(plain, sorted((row for row in found if not row.note), key=_rank) + useless)


def _rank(row: Advice) -> float:
    """Bytes for time: what costs nothing counts as a hundredth of a step."""
    return -row.saves / max(row.time, 0.01)


def _advice(technique: Technique, step: Step, plain: Estimate) -> Advice:
    name, code, how = technique.name, technique.code, technique.how
    try:
        effect = technique.measure(step, plain)
    except NotHere as reason:
        return Advice(name, 0, 0.0, code, how, str(reason))
    except ValueError as reason:
        return Advice(name, 0, 0.0, code, how, str(reason).split(";")[0])
    time = effect.seconds / max(plain.seconds, 1e-12)
    if effect.saves <= 0:
        return Advice(name, 0, time, code, how, f"it does not lower the peak, which is in {plain.moment}")
    return Advice(name, effect.saves, time, code, how)


# -- how figures come about -------------------------------------------------------------------------------------------
def _changed(**changes: Any) -> Measure:
    """By an estimate of the step with these changes."""

    def measure(step: Step, plain: Estimate) -> Effect:
        for name, value in changes.items():
            if getattr(step, name) == value:
                raise NotHere(f"{name} is {value} already")
        return _between(replace(step, **changes), plain)

    return measure


def _without(apply: Callable[[nn.Module], object], applies: Callable[[Step], bool], instead: str) -> Measure:
    """By an estimate in which ``apply`` has changed the model. ``instead``: why it may do nothing."""

    def measure(step: Step, plain: Estimate) -> Effect:
        if not applies(step):
            raise NotHere(instead)

        def prepare(model: nn.Module) -> None:
            apply(model)
            if step.prepare is not None:
                step.prepare(model)

        return _between(replace(step, prepare=prepare), plain)

    return measure


def _between(step: Step, plain: Estimate) -> Effect:
    other = step.estimated()
    return Effect(plain.peak_bytes - other.peak_bytes, other.seconds - plain.seconds)


def _smaller(micro_batches: int) -> Measure:
    """By an estimate of half the batch, once or twice a step."""

    def measure(step: Step, plain: Estimate) -> Effect:
        return _between(replace(step, batch=_half(step.batch), micro_batches=micro_batches), plain)

    return measure


def _half(batch: Any) -> Any:
    rows = max((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), default=0)
    if rows < 2:
        raise NotHere("the batch has one row")

    def cut(leaf: Any) -> Any:
        return leaf[: rows // 2] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows else leaf

    return tree_map(cut, batch)


def _bits(step: Step, plain: Estimate) -> Effect:
    if not isinstance(step.optimizer, str) or step.optimizer.endswith(("8bit", "4bit")):
        raise NotHere("the optimizer is one of few bits, or no name")
    name = step.optimizer.removesuffix("32bit").removesuffix("16bit")
    return _between(replace(step, optimizer=f"{name}8bit"), plain)


def _compressed(step: Step, plain: Estimate) -> Effect:
    if step.recipe is not None:
        raise NotHere(f"recipe is {step.recipe} already")
    return _between(replace(step, recipe="fp8", precision="bf16", prepare=compress_activations_), plain)


def _share(kinds: tuple[str, ...], share: float, moved: float = 0.0) -> Measure:
    """By the bytes of these kinds at the plain peak, of which ``share`` goes; each is written and read ``moved`` times
    in a step at the bandwidth of a directory.
    """

    def measure(step: Step, plain: Estimate) -> Effect:
        size = sum(plain.by_kind.get(kind, 0) for kind in kinds)
        if not size:
            raise NotHere(f"the peak has no {' and '.join(kinds)}")
        if not moved:
            return Effect(int(share * size), 0.0)
        at = bandwidth("cpu" if plain.device.type == "cuda" else tempfile.gettempdir())
        return Effect(int(share * size), moved * size * (1 / at.write + 1 / at.read))

    return measure


_STATES = ("optimizer state", "master copies")

TECHNIQUES = (
    Technique("a smaller batch: half", "DataLoader(..., batch_size=B // 2)", _smaller(1)),
    Technique("accumulation: two halves a step", "lb.memory.micro_batches(batch, 2)", _smaller(2)),
    Technique("mixed precision", 'lb.train.mixed_(model, "bf16")', _changed(precision="bf16")),
    Technique(
        "loss without logits", "lb.memory.fuse_loss_(model)",
        _without(fuse_loss_, lambda step: step.loss is None and answers_without_logits(step.model, step.batch),
                 "it is of causal language models of transformers that are given labels"),
    ),
    Technique(
        "attention without scores", "lb.memory.attention_(model)",
        _without(attention_, lambda step: attends_without_scores(step.model, step.batch),
                 "no attention here holds scores that it could spare"),
    ),
    Technique("optimizer of 8 bits", "lb.optim.AdamW(params, bits=8)", _bits),
    Technique("checkpoints: blocks", "lb.memory.checkpoint_(model)", _changed(checkpoint="block")),
    Technique("checkpoints: attention", 'lb.memory.checkpoint_(model, "attention")', _changed(checkpoint="attention")),
    Technique(
        "checkpoints: all but products",
        'lb.memory.checkpoint_(model, "save_matmuls")',
        _changed(checkpoint="save_matmuls"),
    ),
    Technique("checkpoints: sqrt(N) segments", 'lb.memory.checkpoint_(model, "sqrt")', _changed(checkpoint="sqrt")),
    Technique(
        "FP8 with compressed activations",
        'lb.train.prepare_(model, "fp8"); lb.train.compress_activations_(model)',
        _compressed,
    ),
    Technique(
        "steps in backward: gradients go at once", "lb.optim.in_backward_(model, lb.optim.AdamW)",
        _share(("gradients",), 1.0), "sum of gradients",
    ),
    Technique(
        "states of the optimizer elsewhere", "lb.optim.offload_(optimizer, directory)",
        _share(_STATES, 1.0, 1.0), "sum of states",
    ),
    Technique(
        "activations elsewhere", "with lb.memory.offload_activations(directory): ...",
        _share(("activations",), 1.0, 1.0), "sum of activations",
    ),
    Technique(
        "sharding over 8 processes (FSDP2)", "torch.distributed.fsdp.fully_shard(model)",
        _share(("parameters", "gradients", *_STATES), 7 / 8), "sum of 7/8 of weights, gradients, states",
    ),
)  # fmt: skip
