"""What a plan chooses from: in each dimension one row of ``CHOICES``, as what it changes of ``Settings``.

Checkpoints of blocks and the number of parts follow from the budget; see ``search``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from lowbit.distributed.ways import WAYS
from lowbit.memory.fake import fake_model, fake_tensors
from lowbit.models import find_blocks
from lowbit.named import did_you_mean
from lowbit.plan.allowed import left, names_in
from lowbit.plan.settings import Settings, make_optimizer, prepare_model_
from lowbit.tiled.fused_loss import answers_without_logits
from lowbit.tiled.model_attention import attends_without_scores

__all__ = [
    "CHOICES", "LAST", "NOISE", "PARTS", "PLANNED", "QUALITY", "WAY", "Choice", "Most", "allowed", "combinations",
    "described", "has_half", "loaded", "most_of", "plainer_by_dimension", "possible", "quality_of", "words",
]  # fmt: skip

#: The most that choices may add to the loss together, in percent, where the caller says nothing, and what their sum may
#: be above it by rounding.
QUALITY, _ROUNDING = 0.3, 1e-9

#: By how many percent plain fp32 differs from bf16 in the record of recipes, and so what rounding alone may do.
NOISE = 0.42

#: Precisions that weights come in.
_LOADED = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class Choice(NamedTuple):
    """``changes``: of the settings. ``about``: what it does, for people. ``loss``: by how many percent the held-out
    loss of the demo's GPT changed with this choice alone, the mean over all seeds of the record (convergence.md and
    optimizers.md of bench/results); 0 where no number differs, or nothing but the order of sums. ``applies``: whether
    it does anything for a model, batch and loss. ``least``: what it counts for at least, the record of a choice with
    more bits.
    """

    name: str
    changes: Mapping[str, Any]
    about: str
    loss: float = 0.0
    applies: Callable[[nn.Module, Any, Any], bool] = lambda model, batch, loss: True
    least: float = 0.0

    def reason(self, model: nn.Module) -> str:
        """Why it does nothing for ``model``, to end a sentence; nothing where no words are known."""
        why = self.applies.reason(model) if isinstance(self.applies, _Prepares) else None
        return "" if why is None else f": {why.splitlines()[0]}"

    @property
    def counted(self) -> float:
        """The percent of loss that a plan counts: a recorded gain is noise of one run, and no reason for a choice."""
        return max(self.loss, self.least, 0.0)

    def by(self, losses: Mapping[str, float]) -> Choice:
        """This choice with the loss change, a fraction, that a caller has measured for it. A choice with more changes
        than a measured one counts for at least as much: fp8 computes in bf16 what it does not encode.
        """
        if self.name in losses:
            return self._replace(loss=100 * losses[self.name], least=0.0)
        part_of = [one for row in CHOICES.values() for one in row if one.name in losses and one.changes]
        measured = [100 * losses[one.name] for one in part_of if one.changes.items() < self.changes.items()]
        return self._replace(least=max(self.least, *measured)) if measured else self


@dataclass(frozen=True)
class _Prepares:
    """Whether a model has what ``changes`` of the settings look for, such as matrices in fp32."""

    changes: Mapping[str, Any]

    def __call__(self, model: nn.Module, batch: Any, loss: Any) -> bool:
        return self.reason(model) is None

    def reason(self, model: nn.Module) -> str | None:
        """Why not, in the words of the function that would prepare it."""
        with torch.inference_mode(False), fake_tensors() as mode:
            copied = fake_model(model, mode, None)
            settings = Settings(**self.changes)
            try:
                prepare_model_(copied, settings)
                make_optimizer(copied.parameters(), settings)
            except (ValueError, TypeError) as error:
                return str(error)
        return None


def _prepares(**changes: Any) -> _Prepares:
    return _Prepares(changes)


def has_half(model: nn.Module) -> bool:
    """Whether weights that train are in 16 bits as the model comes."""
    return any(p.dtype in _LOADED and p.itemsize == 2 and p.dim() > 1 and p.requires_grad for p in model.parameters())


def loaded(model: nn.Module) -> str:
    """The precision that weights come in; of several the first of fp16, bf16, fp64, fp32."""
    dtypes = {p.dtype for p in model.parameters() if p.dim() > 1}
    return next((name for dtype, name in _LOADED.items() if dtype in dtypes), Settings.loaded)


def _is_contrastive(batch: Any) -> bool:
    """Whether a model of transformers is asked for a loss among the rows of a batch, as CLIP is."""
    return isinstance(batch, Mapping) and bool(batch.get("return_loss"))


def _recipe(name: str, loss: float, compress: bool = False) -> Choice:
    recipe = name.partition("-compressed")[0]
    about = f"products of Linear layers by the recipe {recipe}, the rest in bf16"
    more = ", and codes of activations for backward" if compress else ""
    changes = {"mixed": "bf16", "recipe": recipe} | ({"compress": True} if compress else {})
    return Choice(name, changes, about + more, loss, applies=_prepares(**changes))


#: How processes share the model, a dimension of plans of several.
WAY = "way"

#: The plain precision of a model whose weights are not in fp32, and what more is to be said of it.
AS_LOADED = "as loaded"
_ABOUT_LOADED = {"fp16": "; small gradients become zero, so call model.bfloat16() or model.float() first"}

#: Per-block checkpoints, which follow from the budget.
PLANNED = "planned"

#: A dimension whose choices after the first take so long that they are tried where nothing else fits.
LAST = "weights"

#: A dimension of its own in searches: the number of parts of a batch.
PARTS = "parts of a batch"

#: By dimension, the plain choice first.
CHOICES: dict[str, tuple[Choice, ...]] = {
    "precision": (
        Choice("fp32", {}, "weights, products and activations in fp32",
               applies=lambda model, batch, loss: loaded(model) == Settings.loaded),
        Choice(AS_LOADED, {}, "weights stay in the precision that the model was loaded in"),
        Choice("bf16", {"mixed": "bf16"}, "products and their weights in bf16, the rest in fp32",
               applies=_prepares(mixed="bf16")),
        _recipe("fp8", 0.12),
        _recipe("fp8-compressed", 0.45, compress=True),
        _recipe("fp8-tensor", 0.0),
        _recipe("fp8-block", 0.35),
        _recipe("mxfp8", 0.57),
        _recipe("int8-stochastic", 0.19),
        _recipe("nvfp4", 0.61),
    ),
    "attention": (
        Choice("own attention", {}, "attention is computed as the model does"),
        Choice("attention without scores", {"attention": True}, "attention never holds all scores",
               applies=lambda model, batch, loss: attends_without_scores(model, batch)),
    ),
    "loss": (
        Choice("own loss", {}, "the loss is computed as the model does"),
        Choice("fused loss", {"fused_loss": True}, "the loss and the last layer are one, which never holds all logits",
               applies=lambda model, batch, loss: loss is None and answers_without_logits(model, batch)),
    ),
    "optimizer": (
        Choice("adamw", {}, "both states of AdamW in fp32"),
        Choice("adamw8bit", {"bits": 8}, "both states of AdamW as 8-bit codes", 0.30, applies=_prepares(bits=8)),
        Choice("adamw4bit", {"bits": 4}, "both states of AdamW as 4-bit codes", -0.44, applies=_prepares(bits=4),
               least=0.30),
    ),
    "masters": (
        Choice("residual", {}, "of weights in bf16, the optimizer keeps the 8 bits that they lack of fp32"),
        Choice("stochastic", {"master": "stochastic"}, "weights in bf16 are rounded by random bits alone", 0.15),
    ),
    "checkpoint": (
        Choice("everything kept", {}, "backward finds all that it needs"),
        Choice("attention", {"checkpoint": "attention"}, "the attention of each block is computed again"),
        Choice("mlp", {"checkpoint": "mlp"}, "the feed-forward part of each block is computed again"),
        Choice("save_matmuls", {"checkpoint": "save_matmuls"}, "all but the results of products is computed again"),
        Choice("block", {"checkpoint": "block"}, "each block is computed again"),
        Choice("sqrt", {"checkpoint": "sqrt"}, "segments of about sqrt(N) blocks are computed again"),
        Choice(PLANNED, {}, "of each block what the budget asks for is computed again"),
    ),
    "states": (
        Choice("memory", {}, "states of the optimizer are beside the weights"),
        Choice("disk", {"offload_states": True}, "states of the optimizer are in files, on a GPU in host memory"),
    ),
    "activations": (
        Choice("activations in memory", {}, "what backward needs stays where it is"),
        Choice("activations on disk", {"offload_activations": True},
               "what backward needs goes to files, on a GPU to host memory, and comes back"),
    ),
    LAST: (
        Choice("weights in memory", {}, "weights and gradients stay where they are"),
        Choice("weights on disk", {"offload_weights": True},
               "weights of blocks are in files while others compute, and gradients; on a GPU in host memory",
               applies=lambda model, batch, loss: bool(find_blocks(model))),
    ),
    WAY: tuple(
        Choice(way.name, {} if way.name == Settings.way else {"way": way.name}, way.about)
        for way in WAYS.values() if way.name != "dp"
    ),
    PARTS: (
        Choice("whole batch", {}, "the whole batch at once"),
        # As many as the budget asks for.
        Choice("parts", {"micro": 2}, "gradients of the parts add up; BatchNorm, and losses among rows, see a part",
               applies=lambda model, batch, loss: not _is_contrastive(batch)),
    ),
}  # fmt: skip

#: Recipes that are taken only where they are kept: a plan need not estimate them all.
_ASKED = frozenset({"fp8-tensor", "fp8-block", "mxfp8", "int8-stochastic", "nvfp4"})

#: What a name in ``no`` leaves out too.
_TOO = {"disk": ("activations on disk", "weights on disk")}


def allowed(
    keep: Iterable[str], no: Iterable[str], most: Most, gpus: int = 1, group_size: int | None = None
) -> dict[str, tuple[Choice, ...]]:
    """What ``keep`` and ``no`` leave; of a dimension without a name in ``keep`` those that cost at most ``most`` alone.
    Of a single process there is one way, and ``hsdp`` needs a ``group_size``.
    Raises as ``left``, and ValueError for a way that cannot be.
    """
    keep, no = names_in(keep), names_in(no)
    rows = {dimension: {choice.name: choice for choice in row} for dimension, row in CHOICES.items()}
    ways = {name for name in rows[WAY] if gpus > 1 or name == Settings.way}
    ways -= set() if group_size else {"hsdp"}
    asked = [name for name in keep if name in rows[WAY] and name not in ways]
    if asked:
        needed = "gpus=2 or more" if gpus == 1 else "group_size=, the processes of one machine"
        raise ValueError(f"fit: {asked[0]!r} needs {needed}; give it, or leave {asked[0]!r} out of keep")
    left_out = {name for one in no for name in (one, *_TOO.get(one, ()))}

    def offered(choice: Choice) -> bool:
        return (
            choice.name not in _ASKED
            and choice.by(most.losses).counted <= most.percent
            and (choice.name not in rows[WAY] or choice.name in ways)
        )

    found = left(rows, keep, left_out, offered)
    return {dimension: tuple(row.values()) for dimension, row in found.items()}


class Most(NamedTuple):
    """The ``percent`` of loss that choices may cost together, but for those that are ``kept`` by name. ``losses``: by
    choice what a caller has measured in place of the record.
    """

    percent: float
    kept: frozenset[str]
    losses: Mapping[str, float] = MappingProxyType({})

    def lost(self, settings: Settings) -> float:
        """What those of the choices cost that cost something."""
        return sum(one.counted for one in described(settings, self.losses).values() if one.name not in self.kept)


def most_of(keep: Iterable[str], quality: float | str, losses: Mapping[str, float] | None = None) -> Most:
    """Raises ValueError for what is no quality, and for losses of unknown choices or that are no numbers."""
    kept, losses = frozenset(names_in(keep)), dict(losses or {})
    known = [choice.name for row in CHOICES.values() for choice in row]
    for name, change in losses.items():
        if name not in known:
            raise ValueError(f"fit: losses has no choice {name!r}{did_you_mean(name, known)}; there are {known}")
        if isinstance(change, bool) or not isinstance(change, int | float) or not math.isfinite(change):
            raise ValueError(
                f"fit: losses has by choice the relative change of the loss, such as 0.02 for 2% more, got {change!r} "
                f"for {name!r}"
            )
    if quality == "any":
        return Most(math.inf, kept, losses)
    if isinstance(quality, bool) or not isinstance(quality, int | float) or not quality >= 0:
        raise ValueError(
            f"fit: quality is 'any' or the percent of loss that choices may cost, such as {QUALITY}, got {quality!r}"
        )
    return Most(quality + _ROUNDING, kept, losses)


def combinations(choices: Iterable[tuple[Choice, ...]]) -> list[Settings]:
    """The settings of each combination of a choice of every dimension, in one part."""
    found = []
    for picked in product(*choices):
        changes: dict[str, Any] = {}
        for choice in picked:
            changes |= choice.changes
        found.append(replace(Settings(), **changes))
    return list(dict.fromkeys(found))  # 'fp32' and 'as loaded' change nothing


def possible(settings: Settings) -> bool:
    """Whether the choices go together: masters are of weights in 16 bits; states and activations that are elsewhere are
    of parameters that one process has whole; weights are elsewhere only where states are.
    """
    if settings.offload_weights and (settings.gpus > 1 or not settings.offload_states):
        return False
    shared = settings.gpus > 1 and WAYS[settings.way].states
    if (shared and settings.offload_states) or (settings.fully and settings.offload_activations):
        return False
    if settings.half and settings.loaded == "fp16" and settings.master != Settings.master:
        return False  # there are masters of it in fp32 alone
    return settings.working_copies or settings.master == Settings.master


def described(settings: Settings, losses: Mapping[str, float] = MappingProxyType({})) -> dict[str, Choice]:
    """By dimension the choice that the settings have, with the ``losses`` that a caller has measured."""
    found = {}
    for dimension, row in CHOICES.items():
        if dimension == WAY and settings.gpus == 1:
            continue
        defaults = _defaults(dimension)
        mine = {name: getattr(settings, name) for name in defaults}
        choice = next((choice for choice in row if {**defaults, **choice.changes} == mine), row[-1])
        if dimension == "precision" and settings.loaded != Settings.loaded and settings.mixed is None:
            choice = next(one for one in row if one.name == AS_LOADED)
            about = f"weights in {settings.loaded}, as the model comes, and products as it makes them"
            choice = choice._replace(about=about + _ABOUT_LOADED.get(settings.loaded, ""))
        if dimension == "masters" and settings.half and settings.loaded == "fp16":
            choice = choice._replace(about="of weights in fp16, the optimizer keeps them in fp32")
        if choice.name == PLANNED:
            choice = choice._replace(about=f"computed again: {_by_block(settings)}")
        found[dimension] = choice.by(losses)
    return found


def plainer_by_dimension(settings: Settings) -> dict[str, Settings]:
    """By dimension that is not plain the settings with the plain choice in its place."""
    found = {name: replace(settings, **_defaults(name)) for name in CHOICES}
    for name, plainer in found.items():
        for dimension in ("masters", LAST):  # which need another choice
            if not possible(found[name]):
                found[name] = replace(plainer, **_defaults(dimension))
    return {name: plainer for name, plainer in found.items() if plainer != settings}


def _defaults(dimension: str) -> dict[str, Any]:
    touched = {name for choice in CHOICES[dimension] for name in choice.changes}
    return {field.name: field.default for field in fields(Settings) if field.name in touched}


def quality_of(settings: Settings, losses: Mapping[str, float] = MappingProxyType({})) -> float:
    """What the choices count for together, in percent."""
    return sum(choice.counted for choice in described(settings, losses).values())


def words(settings: Settings) -> str:
    """The names of all that is not plain."""
    names = []
    for dimension, choice in described(settings).items():
        if choice.name not in (CHOICES[dimension][0].name, AS_LOADED) or dimension == WAY:
            names.append(f"{settings.micro} parts" if dimension == PARTS else choice.name)
    return ", ".join(names) or "plain training"


def _by_block(settings: Settings) -> str:
    counts = Counter(settings.checkpoint if isinstance(settings.checkpoint, tuple) else ())
    return ", ".join(f"{name} of {count}" for name, count in counts.items())
