"""The techniques of training within a memory: one row of ``TECHNIQUES`` is one technique.

From the rows follow the options of ``lb.fit``, what a run falls back on when memory runs out, what may change in the
middle of training, the rungs of the ladder, the advice of ``lowbit doctor``, what other training loops must do
themselves, and tables in docs/memory.md. A policy of checkpointing is a row of
``lowbit.checkpointing.policies.POLICIES``, and a technique by that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import nn

from lowbit.checkpointing.apply import checkpoint_, uncheckpoint_
from lowbit.checkpointing.policies import POLICIES, no_stacks
from lowbit.combinations import COMBINATIONS
from lowbit.distributed.strategies import STRATEGIES
from lowbit.memory.fake import fake_model, fake_tensors
from lowbit.models import find_blocks
from lowbit.optim import offload_, unoffload_
from lowbit.plan.settings import TrainingSettings, make_optimizer, policy_of, prepare_model_
from lowbit.plan.subject import Subject
from lowbit.tiled.fused_loss import answers_without_logits
from lowbit.tiled.model_attention import attends_without_scores
from lowbit.torch_private import BatchNorm
from lowbit.train.micro_batches import micro_batches, samples

__all__ = [
    "AS_LOADED",
    "FALLBACKS",
    "LAST",
    "LIVE",
    "MICRO_BATCHES",
    "PLANNED",
    "STRATEGY",
    "TECHNIQUES",
    "Technique",
    "conflict",
    "defaults",
    "in_use",
    "least_rows",
    "loaded",
    "recompute_",
    "technique_of",
    "techniques",
]  # fmt: skip

logger = logging.getLogger(__name__)

#: Gives a live model and optimizer another value of a setting. The last argument is the offload target.
Live = Callable[[nn.Module, torch.optim.Optimizer, Any, str], None]


@dataclass(frozen=True, eq=False)
class Technique:
    """One technique. The first row of a dimension is plain training."""

    name: str
    """What ``lb.fit`` calls it."""
    changes: Mapping[str, Any]
    """Fields of ``TrainingSettings`` and their values."""
    about: str
    """What it does, for people."""
    results: Literal["equal", "close", "own"] = "equal"
    """What it does to losses: nothing (they are bit-identical), another order of sums, or another arithmetic."""
    loss: float = 0.0
    """By how many percent the held-out loss of the demo's GPT changed with this technique alone: the mean over all
    seeds of the record (convergence.md and optimizers.md of bench/results). 0 where nothing was recorded."""
    least: float = 0.0
    """The percent that it counts for at least: the record of a technique with more bits."""
    why_not: Callable[[Subject], str | None] = lambda subject: None
    """Why it does nothing for a subject, in words that end a sentence; None where it does something."""
    asked: bool = False
    """Whether a plan takes it only where it is required, and so need not estimate it."""
    excluded_with: str = ""
    """Another technique with which it is excluded too."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the settings that it needs to have these values."""
    conflicts: Mapping[str, Callable[[TrainingSettings], bool]] = field(default_factory=dict)
    """By row of ``COMBINATIONS`` whether settings have what it cannot be combined with."""
    fallback: int | None = None
    """Its rank among what a run takes when memory runs out, from what costs least time."""
    more: Callable[[TrainingSettings, Subject], Mapping[str, Any] | None] | None = None
    """As a fallback that can be taken again and again: the next changes, or None where no more is possible."""
    live: Live | None = None
    """Changes it in the middle of training; None: its settings are arithmetic, which stays."""
    acts: Literal["model", "optimizer", "batch", "step", "placement"] = "model"
    """What it changes: the model in place; the optimizer; how a batch is taken; what surrounds forward and backward;
    where parameters are, which only ``plan.apply_`` does."""
    code: str = ""
    """A line that applies it alone, which ``lowbit doctor`` advises."""
    rung: int | None = None
    """Its place on the ladder; techniques of one place are climbed together."""

    def is_on(self, settings: TrainingSettings) -> bool:
        """Whether the settings have it."""
        if "micro_batches" in self.changes:  # the number follows from the budget
            return settings.micro_batches > 1
        return all(getattr(settings, name) == value for name, value in self.changes.items())

    @property
    def counted(self) -> float:
        """The percent of loss that a plan counts: a recorded gain is noise of one run, and no reason for a choice."""
        return max(self.loss, self.least, 0.0)

    def by(self, losses: Mapping[str, float]) -> Technique:
        """With the loss change, a fraction, that a caller has measured for it. A technique with more changes than a
        measured one counts for at least as much: fp8 computes in bf16 what it does not encode.
        """
        if self.name in losses:
            return replace(self, loss=100 * losses[self.name], least=0.0)
        part_of = [one for one in techniques() if one.name in losses and one.changes]
        measured = [100 * losses[one.name] for one in part_of if one.changes.items() < self.changes.items()]
        return replace(self, least=max(self.least, *measured)) if measured else self


# -- what models and batches have -------------------------------------------------------------------------------------
#: Precisions that weights come in.
_LOADED = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def loaded(model: nn.Module) -> str:
    """The precision that weights come in; of several the first of fp16, bf16, fp64, fp32."""
    dtypes = {p.dtype for p in model.parameters() if p.dim() > 1}
    return next((name for dtype, name in _LOADED.items() if dtype in dtypes), TrainingSettings.loaded)


def least_rows(model: nn.Module) -> int:
    """The rows that a part has at least: in training BatchNorm refuses a single value a channel."""
    return 2 if any(isinstance(one, BatchNorm) and one.training for one in model.modules()) else 1


def _not_in_fp32(subject: Subject) -> str | None:
    precision = loaded(subject.model)
    return None if precision == TrainingSettings.loaded else f"its weights are in {precision}"


def _unless(is_of_use: Callable[[Subject], bool], why_not: str) -> Callable[[Subject], str | None]:
    return lambda subject: None if is_of_use(subject) else why_not


def _refusal(changes: Mapping[str, Any]) -> Callable[[Subject], str | None]:
    """Why a model has not what the changes look for, such as matrices in fp32, in the words of what prepares it."""

    def why_not(subject: Subject) -> str | None:
        with torch.inference_mode(False), fake_tensors() as mode:
            copied, settings = fake_model(subject.model, mode, None), TrainingSettings(**changes)
            try:
                prepare_model_(copied, settings)
                make_optimizer(copied.parameters(), settings)
            except (ValueError, TypeError) as error:
                logger.debug("%s does nothing for %s", changes, type(subject.model).__name__, exc_info=True)
                return str(error).splitlines()[0]
        return None

    return why_not


def _is_contrastive(subject: Subject) -> bool:
    """Whether a model of transformers is asked for a loss among the rows of a batch, as CLIP is."""
    return isinstance(subject.batch, Mapping) and bool(subject.batch.get("return_loss"))


# -- what changes in the middle of training ---------------------------------------------------------------------------
def recompute_(model: nn.Module, checkpoint: str | tuple[str, ...] | None) -> None:
    """Let backward of ``model`` recompute by another policy than it does, in place."""
    if checkpoint is None:
        uncheckpoint_(model)
    else:
        checkpoint_(model, policy_of(model, checkpoint))


def _checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Any, where: str) -> None:
    recompute_(model, checkpoint)


def _place_states(model: nn.Module, optimizer: torch.optim.Optimizer, away: bool, where: str) -> None:
    if away:
        offload_(optimizer, where)
    else:
        unoffload_(optimizer)


def _read_at_each_step(model: nn.Module, optimizer: torch.optim.Optimizer, value: Any, where: str) -> None:
    """A step reads the setting itself."""


def _more_micro_batches(settings: TrainingSettings, subject: Subject) -> dict[str, int] | None:
    try:
        rows = samples(subject.batch)
        more = min(2 * settings.micro_batches, max(rows // least_rows(subject.model), 1))
        micro_batches(subject.batch, more)
    except ValueError:  # a batch that cannot be split
        return None
    return {"micro_batches": more} if more > settings.micro_batches else None


# -- kinds of rows ----------------------------------------------------------------------------------------------------
def _recipe(name: str, loss: float, *, activation_codes: bool = False, asked: bool = False, **more: Any) -> Technique:
    recipe = name.partition("-compressed")[0]
    about = f"products of Linear layers by the recipe {recipe}, the rest in bf16"
    about += ", and codes of activations for backward" if activation_codes else ""
    changes = {"precision": "bf16", "recipe": recipe} | ({"activation_codes": True} if activation_codes else {})
    return Technique(name, changes, about, "own", loss, why_not=_refusal(changes), asked=asked, **more)


def _optimizer(bits: int, loss: float, least: float = 0.0, **more: Any) -> Technique:
    changes = {"bits": bits}
    return Technique(
        f"adamw{bits}bit", changes, f"both states of AdamW as {bits}-bit codes", "own", loss, least, _refusal(changes),
        acts="optimizer", code=f"lb.optim.AdamW(params, bits={bits})", **more,
    )  # fmt: skip


#: Fallbacks are in this order; those of policies are between.
_MICRO_BATCHES_FIRST, _POLICIES, _ACTIVATIONS, _STATES = 0, 1, 1000, 1001

#: The policy that is a rung of the ladder.
_CLIMBED = "block"


def _policies() -> Iterator[Technique]:
    """The policies of checkpointing that plans choose."""
    for name, policy in POLICIES.items():
        if policy.block is None and policy.fallback is None:
            continue

        def why_not(subject: Subject, policy: Any = policy) -> str | None:
            found = policy.choose(subject.model)
            return None if found else policy.missing(subject.model) or no_stacks(subject.model)

        yield Technique(
            name, {"checkpoint": name}, f"backward recomputes {policy.about}", why_not=why_not,
            fallback=None if policy.fallback is None else _POLICIES + policy.fallback, live=_checkpoint,
            code=f'lb.memory.checkpoint_(model, "{name}")', rung=1 if name == _CLIMBED else None,
        )  # fmt: skip


#: Dimensions that others ask for: how processes share the model; the parts of a batch; and one whose techniques after
#: the first take so long that they are tried where nothing else fits.
STRATEGY, MICRO_BATCHES, LAST = "strategy", "micro-batches", "weights"

#: The plain precision of a model whose weights are not in fp32.
AS_LOADED = "as loaded"

#: Per-block checkpoints, which follow from the budget.
PLANNED = "planned"

#: By dimension, the plain one first.
TECHNIQUES: dict[str, tuple[Technique, ...]] = {
    "precision": (
        Technique("fp32", {}, "weights, products and activations in fp32", why_not=_not_in_fp32, rung=0),
        Technique(AS_LOADED, {}, "weights stay in the precision that the model was loaded in"),
        Technique("bf16", {"precision": "bf16"}, "products and their weights in bf16, the rest in fp32", "own",
                  why_not=_refusal({"precision": "bf16"}), code='lb.train.mixed_(model, "bf16")', rung=2),
        _recipe("fp8", 0.12),
        _recipe("fp8-compressed", 0.45, activation_codes=True, rung=4,
                code='lb.train.prepare_(model, "fp8"); lb.train.compress_activations_(model)'),
        _recipe("fp8-tensor", 0.0, asked=True),
        _recipe("fp8-block", 0.35, asked=True),
        _recipe("mxfp8", 0.57, asked=True),
        _recipe("int8-stochastic", 0.19, asked=True),
        _recipe("nvfp4", 0.61, asked=True),
    ),
    "attention": (
        Technique("own attention", {}, "attention is computed as the model does"),
        Technique("attention without scores", {"attention": True}, "attention never holds all scores", "close",
                  why_not=_unless(lambda subject: attends_without_scores(subject.model, subject.batch),
                                  "no attention here holds scores that it could spare"),
                  code="lb.memory.attention_(model)"),
    ),
    "loss": (
        Technique("own loss", {}, "the loss is computed as the model does"),
        Technique("fused loss", {"fused_loss": True},
                  "the loss and the last layer are one, which never holds all logits", "close",
                  why_not=_unless(
                      lambda subject: subject.loss is None and answers_without_logits(subject.model, subject.batch),
                      "it is of causal language models of transformers that are given labels"),
                  code="lb.memory.fuse_loss_(model)"),
    ),
    "optimizer": (
        Technique("adamw", {}, "both states of AdamW in fp32"),
        _optimizer(8, 0.30, rung=3),
        _optimizer(4, -0.44, least=0.30),
    ),
    "masters": (
        Technique("residual", {}, "of weights in bf16, the optimizer keeps the 8 bits that they lack of fp32"),
        Technique("stochastic", {"master": "stochastic"}, "weights in bf16 are rounded by random bits alone", "own",
                  0.15, acts="optimizer", conflicts={
                      "stochastic fp32": lambda settings: not settings.working_copies,
                      "stochastic fp16": lambda settings: settings.bf16_params and settings.loaded == "fp16",
                  }),
    ),
    "checkpoint": (
        Technique("everything kept", {}, "backward finds all that it needs"),
        *_policies(),
        Technique(PLANNED, {}, "of each block what the budget asks for is computed again"),
    ),
    "states": (
        Technique("memory", {}, "states of the optimizer are beside the weights"),
        Technique("disk", {"offload_states": True}, "states of the optimizer are in files, on a GPU in host memory",
                  conflicts={"offload shard": lambda settings: settings.gpus > 1 and
                  STRATEGIES[settings.strategy].states}, fallback=_STATES, live=_place_states, acts="optimizer",
                  code="lb.optim.offload_(optimizer, directory)", rung=5),
    ),
    "activations": (
        Technique("activations in memory", {}, "what backward needs stays where it is"),
        Technique("activations on disk", {"offload_activations": True},
                  "what backward needs goes to files, on a GPU to host memory, and comes back", excluded_with="disk",
                  conflicts={"offload activations shard": lambda settings: settings.fully},
                  fallback=_ACTIVATIONS, live=_read_at_each_step, acts="step",
                  code="with lb.memory.offload_activations(directory): ...", rung=5),
    ),
    LAST: (
        Technique("weights in memory", {}, "weights and gradients stay where they are"),
        Technique("weights on disk", {"offload_weights": True},
                  "weights of blocks are in files while others compute, and gradients; on a GPU in host memory",
                  why_not=lambda subject: None if find_blocks(subject.model) else no_stacks(subject.model),
                  excluded_with="disk", needs={"offload_states": True},
                  conflicts={"stream processes": lambda settings: settings.gpus > 1}, acts="placement",
                  code="lb.memory.stream_blocks_(model, directory)", rung=7),
    ),
    STRATEGY: tuple(
        Technique(strategy.name, {} if strategy.name == TrainingSettings.strategy else {"strategy": strategy.name},
                  strategy.about, "close", acts="placement",
                  code=f'lb.distributed.shard_(model, optimizer, "{strategy.name}")' if strategy.states else "")
        for strategy in STRATEGIES.values() if not strategy.one_process
    ),
    MICRO_BATCHES: (
        Technique("whole batch", {}, "the whole batch at once"),
        # As many as the budget asks for, and on the ladder four.
        Technique("micro-batches", {"micro_batches": 4},
                  "gradients add up over micro-batches; BatchNorm, and losses among rows, see one micro-batch", "close",
                  why_not=_unless(lambda subject: not _is_contrastive(subject), "its loss is among rows"),
                  fallback=_MICRO_BATCHES_FIRST, more=_more_micro_batches, live=_read_at_each_step, acts="batch",
                  code="lb.memory.micro_batches(batch, 4)", rung=6),
    ),
}  # fmt: skip


# -- views ------------------------------------------------------------------------------------------------------------
def techniques() -> list[Technique]:
    """All rows."""
    return [technique for row in TECHNIQUES.values() for technique in row]


def _ranked() -> Iterator[tuple[int, str, Technique]]:
    for dimension, row in TECHNIQUES.items():
        yield from ((one.fallback, dimension, one) for one in row if one.fallback is not None)


#: What a run takes when memory runs out, in this order, each with its dimension.
FALLBACKS = [(dimension, one) for _, dimension, one in sorted(_ranked(), key=lambda ranked: ranked[0])]

#: By field of the settings, what gives a live model and optimizer another value of it.
LIVE: dict[str, Live] = {name: one.live for one in techniques() if one.live is not None for name in one.changes}


def defaults(dimension: str) -> dict[str, Any]:
    """The fields of the settings that techniques of a dimension change, with the values of the plain one."""
    touched = {name for technique in TECHNIQUES[dimension] for name in technique.changes}
    return {one.name: one.default for one in fields(TrainingSettings) if one.name in touched}


def technique_of(dimension: str, settings: TrainingSettings) -> Technique:
    """The technique of a dimension that the settings have."""
    row, plain = TECHNIQUES[dimension], defaults(dimension)
    mine = {name: getattr(settings, name) for name in plain}
    if dimension == "precision" and settings.loaded != TrainingSettings.loaded and settings.precision is None:
        return next(one for one in row if one.name == AS_LOADED)
    return next((one for one in row if {**plain, **one.changes} == mine), row[-1])


def in_use(settings: TrainingSettings) -> dict[str, Technique]:
    """By dimension the techniques that the settings have beside plain training."""
    found = {dimension: technique_of(dimension, settings) for dimension in TECHNIQUES}
    plain = {row[0] for dimension, row in TECHNIQUES.items() if dimension != STRATEGY or settings.gpus == 1}
    return {dimension: one for dimension, one in found.items() if one not in plain and one.name != AS_LOADED}


def conflict(settings: TrainingSettings) -> str | None:
    """Why the techniques of the settings cannot be combined; None where they can."""
    for technique in _CONSTRAINED:
        if not technique.is_on(settings):
            continue
        for name, value in technique.needs.items():
            if getattr(settings, name) != value:
                other = next(one.name for one in techniques() if one.changes.get(name) == value)
                return f"{technique.name!r} needs {other!r}"
        for name, is_on in technique.conflicts.items():
            if is_on(settings):
                return COMBINATIONS[name].words
    return None


_CONSTRAINED = [technique for technique in techniques() if technique.needs or technique.conflicts]
