"""The techniques that reduce the memory of training: one row of ``TECHNIQUES`` each.

The rows define the options of ``lb.fit``, the fallbacks of a run that is out of memory, the settings that may change
during training, the rungs of the ladder, the advice of ``lowbit doctor`` and of ``plan.checklist``, and tables in
docs/memory.md. Checkpointing techniques are the rows of ``lowbit.checkpointing.policies.POLICIES``.
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
from lowbit.optim.names import FAMILIES
from lowbit.plan.adapters import RANK, has_frozen_matrices
from lowbit.plan.settings import TrainingSettings, make_optimizer, policy_of, prepare_model_
from lowbit.plan.subject import Subject
from lowbit.tiled.fused_loss import why_not_fused
from lowbit.tiled.model_attention import attends_without_scores
from lowbit.torch_private import BatchNorm
from lowbit.train.micro_batches import micro_batches, samples

__all__ = [
    "ADAPTERS",
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

#: Fields of ``changes`` whose value follows from the budget or from the call.
_NUMBERS = frozenset({"micro_batches", "adapters"})
#: Fields of ``changes`` that may have any value.
_ANY = frozenset({"resident"})

#: Changes a setting of a model and an optimizer in use: ``live(model, optimizer, value, offload_target)``.
Live = Callable[[nn.Module, torch.optim.Optimizer, Any, str], None]


@dataclass(frozen=True, eq=False)
class Technique:
    """One technique. The first row of a dimension is plain training."""

    name: str
    """Name in ``require`` and ``exclude`` of ``lb.fit``."""
    changes: Mapping[str, Any]
    """The fields of ``TrainingSettings`` that it sets, with their values."""
    about: str
    """Description, for tables and reports."""
    results: Literal["equal", "close", "own"] = "equal"
    """Effect on losses: none (bit-identical), another order of sums, or other arithmetic."""
    loss: float = 0.0
    """Recorded change of the held-out loss of the demo's GPT with this technique alone, in percent: the mean over all
    seeds of convergence.md or optimizers.md in bench/results. 0 without a record."""
    least: float = 0.0
    """Lower bound of ``counted``, in percent: the record of a technique with more bits."""
    why_not: Callable[[Subject], str | None] = lambda subject: None
    """Returns why it has no effect on a subject, as the end of a sentence; None if it has an effect."""
    opt_in: bool = False
    """Whether plans use it only if it is required; otherwise it is not even estimated."""
    excluded_with: str = ""
    """Excluding this other technique also excludes this one."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Values that other fields of the settings must have."""
    conflicts: Mapping[str, Callable[[TrainingSettings], bool]] = field(default_factory=dict)
    """For each row of ``COMBINATIONS`` with this technique: whether settings use the other technique of the row."""
    fallback: int | None = None
    """Rank among the fallbacks of a run that is out of memory; the lowest costs the least time. None: no fallback."""
    more: Callable[[TrainingSettings, Subject], Mapping[str, Any] | None] | None = None
    """For a fallback with several steps: returns the changes of the next step, or None after the last."""
    live: Live | None = None
    """Changes its setting during training. None: it is part of the arithmetic, which never changes."""
    acts: Literal["model", "optimizer", "batch", "step", "placement"] = "model"
    """The part that it changes: the model in place, the optimizer, the splitting of batches, the context of forward and
    backward, or the placement of parameters (which only ``plan.apply_`` can change)."""
    code: str = ""
    """A line of code that applies it alone, for the advice of ``lowbit doctor``."""
    rung: int | None = None
    """Its rung on the ladder. Techniques with the same number share a rung."""

    def is_on(self, settings: TrainingSettings) -> bool:
        """Return whether the settings use it."""
        return all(
            getattr(settings, name) != getattr(TrainingSettings, name)
            if name in _NUMBERS
            else name in _ANY or getattr(settings, name) == value
            for name, value in self.changes.items()
        )

    @property
    def counted(self) -> float:
        """The increase of the loss that plans count, in percent. A recorded decrease is noise and counts as 0."""
        return max(self.loss, self.least, 0.0)

    def with_losses(self, losses: Mapping[str, float]) -> Technique:
        """Return the technique with the loss change that a caller has measured for it, as a fraction.

        If only a technique with a part of its changes is measured, that loss is a lower bound. For instance fp8 also
        computes in bf16, so it counts for at least as much as bf16.
        """
        if self.name in losses:
            return replace(self, loss=100 * losses[self.name], least=0.0)
        measured = [
            100 * losses[technique.name]
            for technique in techniques()
            if technique.name in losses and technique.changes and technique.changes.items() < self.changes.items()
        ]
        return replace(self, least=max(self.least, *measured)) if measured else self


# -- properties of models and batches ---------------------------------------------------------------------------------
_LOADED = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def loaded(model: nn.Module) -> str:
    """Return the precision of the model's matrices; for several, the first of fp16, bf16, fp64, fp32."""
    dtypes = {p.dtype for p in model.parameters() if p.dim() > 1}
    return next((name for dtype, name in _LOADED.items() if dtype in dtypes), TrainingSettings.loaded)


def least_rows(model: nn.Module) -> int:
    """Return the smallest number of rows of a micro-batch. BatchNorm in training needs two values per channel."""
    return 2 if any(isinstance(module, BatchNorm) and module.training for module in model.modules()) else 1


def _not_in_fp32(subject: Subject) -> str | None:
    precision = loaded(subject.model)
    return None if precision == TrainingSettings.loaded else f"its weights are in {precision}"


def _unless(has_effect: Callable[[Subject], bool], why_not: str) -> Callable[[Subject], str | None]:
    return lambda subject: None if has_effect(subject) else why_not


def _preparation_error(changes: Mapping[str, Any]) -> Callable[[Subject], str | None]:
    """Return a ``why_not`` that tries the changes on a fake copy of the model and returns the error, if any."""

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
    """Return whether a Hugging Face model computes a contrastive loss over the rows of the batch, as CLIP does."""
    return isinstance(subject.batch, Mapping) and bool(subject.batch.get("return_loss"))


# -- changes during training ------------------------------------------------------------------------------------------
def recompute_(model: nn.Module, checkpoint: str | tuple[str, ...] | None) -> None:
    """Change the checkpointing policy of ``model`` in place; None removes its checkpoints."""
    if checkpoint is None:
        uncheckpoint_(model)
    else:
        checkpoint_(model, policy_of(model, checkpoint))


def _checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Any, target: str) -> None:
    recompute_(model, checkpoint)


def _place_states(model: nn.Module, optimizer: torch.optim.Optimizer, offloaded: bool, target: str) -> None:
    if offloaded:
        offload_(optimizer, target)
    else:
        unoffload_(optimizer)


def _read_by_step(model: nn.Module, optimizer: torch.optim.Optimizer, value: Any, target: str) -> None:
    """Do nothing, because every step reads the setting."""


def _more_micro_batches(settings: TrainingSettings, subject: Subject) -> dict[str, int] | None:
    try:
        rows = samples(subject.batch)
        count = min(2 * settings.micro_batches, max(rows // least_rows(subject.model), 1))
        micro_batches(subject.batch, count)
    except ValueError:  # a batch that cannot be split
        return None
    return {"micro_batches": count} if count > settings.micro_batches else None


# -- kinds of rows ----------------------------------------------------------------------------------------------------
def _recipe(name: str, loss: float, *, activation_codes: bool = False, **options: Any) -> Technique:
    recipe = name.partition("-compressed")[0]
    about = f"matmuls of Linear layers in {recipe}, the rest in bf16"
    about += ", and activations saved for backward in 8 bits" if activation_codes else ""
    changes = {"precision": "bf16", "recipe": recipe} | ({"activation_codes": True} if activation_codes else {})
    return Technique(name, changes, about, "own", loss, why_not=_preparation_error(changes), **options)


def _base(name: str, recipe: str, loss: float) -> Technique:
    return Technique(
        name, {"base": recipe}, f"frozen linear layers in {recipe}", "own", loss,
        why_not=_unless(lambda subject: subject.adapters is not None or has_frozen_matrices(subject.model),
                        "no linear layer is frozen; pass adapters="),
        conflicts={
            "base weights": lambda settings: settings.adapters is None and not settings.frozen,
            "base recipe": lambda settings: settings.recipe is not None,
        },
        code=f'lb.quantize_(model, "{recipe}")',
    )  # fmt: skip


def _optimizer(bits: int, loss: float, least: float = 0.0, **options: Any) -> Technique:
    changes = {"bits": bits}
    return Technique(
        f"adamw{bits}bit", changes, f"both states of AdamW in {bits} bits", "own", loss, least,
        _preparation_error(changes), acts="optimizer", code=f"lb.optim.AdamW(params, bits={bits})", **options,
    )  # fmt: skip


#: Recorded losses of other optimizers; GaLore and APOLLO with a rank of a quarter of the width.
_OTHER_LOSSES = {"lion8bit": 1.41, "lion4bit": 1.38, "galore8bit": 3.47, "apollo8bit": 1.19, "apollomini8bit": 2.04}


def _other_optimizers() -> Iterator[Technique]:
    """Yield the optimizers other than AdamW, which plans use only if they are required."""
    for family in (row.family for row in FAMILIES if row.family != TrainingSettings.optimizer):
        for bits in (8, 4):
            changes, name = {"optimizer": family, "bits": bits}, f"{family}{bits}bit"
            yield Technique(
                name, changes, f"{family} instead of AdamW, with states in {bits} bits", "own",
                _OTHER_LOSSES.get(name, 0.0), why_not=_preparation_error(changes), opt_in=True, acts="optimizer",
            )  # fmt: skip


#: Quantized bases: name, recipe, and change of the loss of SmolLM2-135M before training, in percent: bench/results/
#: evaluate.
BASES = (
    ("int8 base", "int8-weight-only", -0.06),
    ("fp8 base", "fp8-weight-only", 0.6),
    ("nf4 base", "nf4", 6.79),
    ("nvfp4 base", "nvfp4-weight-only", 5.51),
    ("int4 base", "int4-weight-only:group32", 6.76),
)

#: Ranks of the fallbacks. Checkpointing policies use the ranks from ``_POLICIES`` on.
_MICRO_BATCHES_FIRST, _POLICIES, _ACTIVATIONS, _STATES = 0, 1, 1000, 1001

#: The policy that is a rung of the ladder.
_RUNG_POLICY = "block"


def _policies() -> Iterator[Technique]:
    """Yield the checkpointing policies that plans and fallbacks use."""
    for name, policy in POLICIES.items():
        if policy.block is None and policy.fallback is None:
            continue

        def why_not(subject: Subject, policy: Any = policy) -> str | None:
            modules = policy.choose(subject.model)
            return None if modules else policy.missing(subject.model) or no_stacks(subject.model)

        yield Technique(
            name, {"checkpoint": name}, f"backward recomputes {policy.about}", why_not=why_not,
            fallback=None if policy.fallback is None else _POLICIES + policy.fallback, live=_checkpoint,
            code=f'lb.memory.checkpoint_(model, "{name}")', rung=1 if name == _RUNG_POLICY else None,
        )  # fmt: skip


#: Dimensions that other files name: the sharding strategy, micro-batches, and offloaded weights, which are so slow that
#: plans try them only if nothing else fits.
STRATEGY, MICRO_BATCHES, LAST = "strategy", "micro-batches", "weights"

#: Adapters instead of weights.
ADAPTERS = "adapters"

#: The plain precision of a model whose weights are not in fp32.
AS_LOADED = "as loaded"

#: Checkpointing chosen for each block from the budget.
PLANNED = "planned"

#: The techniques of each dimension, plain training first.
TECHNIQUES: dict[str, tuple[Technique, ...]] = {
    "training": (
        Technique("all weights", {}, "all weights are trained"),
        Technique(ADAPTERS, {"adapters": RANK}, "LoRA adapters are trained, in fp32; all weights are frozen", "own",
                  why_not=_preparation_error({"adapters": RANK}), opt_in=True),
    ),
    "base": (
        Technique("plain base", {}, "frozen weights are not quantized"),
        *(_base(name, recipe, loss) for name, recipe, loss in BASES),
    ),
    "precision": (
        Technique("fp32", {}, "weights, matmuls and activations in fp32", why_not=_not_in_fp32, rung=0),
        Technique(AS_LOADED, {}, "weights stay in the model's own precision"),
        Technique("bf16", {"precision": "bf16"}, "matmuls and their weights in bf16, the rest in fp32", "own",
                  why_not=_preparation_error({"precision": "bf16"}), code='lb.train.mixed_(model, "bf16")', rung=2),
        _recipe("fp8", 0.12),
        _recipe("fp8-compressed", 0.45, activation_codes=True, rung=4,
                code='lb.train.prepare_(model, "fp8"); lb.train.compress_activations_(model)'),
        _recipe("fp8-tensor", 0.0, opt_in=True),
        _recipe("fp8-block", 0.35, opt_in=True),
        _recipe("mxfp8", 0.57, opt_in=True),
        _recipe("int8-stochastic", 0.19, opt_in=True),
        _recipe("nvfp4", 0.61, opt_in=True),
    ),
    "attention": (
        Technique("own attention", {}, "attention as the model implements it"),
        Technique("attention without scores", {"attention": True}, "attention without allocating the scores",
                  "close",
                  why_not=_unless(lambda subject: attends_without_scores(subject.model, subject.batch),
                                  "no attention of the model allocates scores"),
                  code="lb.memory.attention_(model)"),
    ),
    "feed-forward": (
        Technique("whole feed-forward", {}, "feed-forward parts run on all tokens at once"),
        Technique("tiled feed-forward", {"tiles": 2048}, "feed-forward parts run on 2048 tokens at a time", "close",
                  why_not=_preparation_error({"tiles": 2048}), opt_in=True, code="lb.memory.tile_(model, rows=2048)"),
    ),
    "loss": (
        Technique("own loss", {}, "the loss as the model implements it"),
        Technique("fused loss", {"fused_loss": True},
                  "fused last layer and loss, without allocating the logits", "close",
                  why_not=lambda subject: why_not_fused(subject.model, subject.batch, subject.loss),
                  conflicts={"fused loss fully_shard": lambda settings: settings.fully and settings.loss_outside},
                  code="lb.memory.fuse_loss_(model)"),
    ),
    "optimizer": (
        Technique("adamw", {}, "both states of AdamW in fp32"),
        _optimizer(8, 0.30, rung=3),
        _optimizer(4, -0.44, least=0.30),
        *_other_optimizers(),
    ),
    "masters": (
        Technique("residual", {}, "for bf16 weights, the optimizer stores the next 8 bits of the fp32 weight"),
        Technique("stochastic", {"master": "stochastic"},
                  "bf16 weights are rounded stochastically, without masters", "own", 0.15, acts="optimizer", conflicts={
                      "stochastic fp32": lambda settings: not settings.working_copies,
                      "stochastic fp16": lambda settings: settings.trains_half and settings.loaded == "fp16",
                  }),
    ),
    "checkpoint": (
        Technique("everything kept", {}, "all activations are saved"),
        *_policies(),
        Technique(PLANNED, {}, "each block recomputes as much as the budget requires"),
    ),
    "states": (
        Technique("memory", {}, "optimizer states on the weights' device"),
        Technique("disk", {"offload_states": True}, "optimizer states offloaded to disk, on a GPU to host memory",
                  conflicts={"offload shard": lambda settings: settings.gpus > 1 and
                  STRATEGIES[settings.strategy].states}, fallback=_STATES, live=_place_states, acts="optimizer",
                  code="lb.optim.offload_(optimizer, directory)", rung=5),
    ),
    "activations": (
        Technique("activations in memory", {}, "saved activations stay in memory"),
        Technique("activations on disk", {"offload_activations": True},
                  "saved activations are offloaded to disk, on a GPU to host memory", excluded_with="disk",
                  conflicts={"offload activations shard": lambda settings: settings.fully},
                  fallback=_ACTIVATIONS, live=_read_by_step, acts="step",
                  code="with lb.memory.offload_activations(directory): ...", rung=5),
    ),
    LAST: (
        Technique("weights in memory", {}, "weights and gradients stay in memory"),
        Technique("weights on disk", {"offload_weights": True, "resident": 0},
                  "gradients and the weights of idle blocks are offloaded to disk, on a GPU to host memory",
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
        # Plans choose the number from the budget; the ladder uses 4.
        Technique("micro-batches", {"micro_batches": 4},
                  "gradients accumulate over micro-batches; BatchNorm, and losses across rows, see one micro-batch",
                  "close",
                  why_not=_unless(lambda subject: not _is_contrastive(subject), "its loss compares rows of the batch"),
                  fallback=_MICRO_BATCHES_FIRST, more=_more_micro_batches, live=_read_by_step, acts="batch",
                  code="lb.memory.micro_batches(batch, 4)", rung=6),
    ),
}  # fmt: skip


# -- views ------------------------------------------------------------------------------------------------------------
def techniques() -> list[Technique]:
    """Return the techniques of all dimensions."""
    return [technique for row in TECHNIQUES.values() for technique in row]


def _ranked() -> Iterator[tuple[int, str, Technique]]:
    for dimension, row in TECHNIQUES.items():
        yield from ((technique.fallback, dimension, technique) for technique in row if technique.fallback is not None)


#: The fallbacks of a run that is out of memory, each with its dimension, in the order in which they are tried.
FALLBACKS = [(dimension, technique) for _, dimension, technique in sorted(_ranked(), key=lambda ranked: ranked[0])]

#: The functions that change a field of the settings during training, by field.
LIVE: dict[str, Live] = {
    name: technique.live for technique in techniques() if technique.live is not None for name in technique.changes
}


def defaults(dimension: str) -> dict[str, Any]:
    """Return the fields of the settings that techniques of a dimension set, with the values of plain training."""
    names = {name for technique in TECHNIQUES[dimension] for name in technique.changes}
    return {field.name: field.default for field in fields(TrainingSettings) if field.name in names}


def technique_of(dimension: str, settings: TrainingSettings) -> Technique:
    """Return the technique of a dimension that the settings use."""
    row, plain = TECHNIQUES[dimension], defaults(dimension)
    values = {name: getattr(settings, name) for name in plain}
    if dimension == "precision" and settings.loaded != TrainingSettings.loaded and settings.precision is None:
        return next(technique for technique in row if technique.name == AS_LOADED)
    return next((technique for technique in row if {**plain, **technique.changes} == values), row[-1])


def in_use(settings: TrainingSettings) -> dict[str, Technique]:
    """Return the techniques of the settings by dimension, without plain training."""
    plain = {row[0] for dimension, row in TECHNIQUES.items() if dimension != STRATEGY or settings.gpus == 1}
    by_dimension = ((dimension, technique_of(dimension, settings)) for dimension in TECHNIQUES)
    return {
        dimension: technique
        for dimension, technique in by_dimension
        if technique not in plain and technique.name != AS_LOADED
    }


def conflict(settings: TrainingSettings) -> str | None:
    """Return why the techniques of the settings cannot be combined, or None if they can."""
    for technique in _CONSTRAINED:
        if not technique.is_on(settings):
            continue
        for name, value in technique.needs.items():
            if getattr(settings, name) != value:
                other = next(row.name for row in techniques() if row.changes.get(name) == value)
                return f"{technique.name!r} needs {other!r}"
        for name, is_on in technique.conflicts.items():
            if is_on(settings):
                return COMBINATIONS[name].words
    return None


_CONSTRAINED = [technique for technique in techniques() if technique.needs or technique.conflicts]
