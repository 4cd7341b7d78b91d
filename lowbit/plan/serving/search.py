"""The choices of least loss of which a generation fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lowbit.models.check import check_model
from lowbit.plan.bits import FLOAT, Option, allocate
from lowbit.plan.serving.decoders import Decoder, decoder_of
from lowbit.plan.serving.losses import Losses, checked, losses
from lowbit.plan.serving.plan import GenerationPlan, words
from lowbit.plan.serving.predict import Predictor, ServingPrediction
from lowbit.plan.serving.settings import Allowed, ServingSettings, allowed, packs
from lowbit.progress import Progress, reporting
from lowbit.sizes import Budget, amount, budget_in

__all__ = ["fit_generation"]

#: Losses that differ by less are equal: for so much more, inputs are quantized to 8 bits, so that weights are packed.
EQUAL = 0.01

#: How many sizes of weights, from the least to all of them, plans are shown for.
_SIZES = 8


def fit_generation(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    context: int,
    rows: int = 1,
    require: Iterable[str] = (),
    exclude: Iterable[str] = (),
    progress: Progress | bool | None = None,
) -> GenerationPlan:
    """The generation of least loss that holds at most ``budget``, within ``context`` tokens of ``rows`` sequences.

    ``budget``: of weights, cache and all that a forward makes: bytes, a size such as ``"80MB"``, or a share of what the
    model holds as it is, ``"50%"``. The prompt is at most ``context - 1`` tokens. ``model``: a causal language model of
    transformers, or one with ``kv_cache(rows, scheme)`` and ``forward(tokens, cache)``; without a batch it may be on
    meta. ``batch``: token ids [B, T], or several such batches, by which losses are estimated; None: errors of the
    weights stand for them, or on meta those of normal numbers. ``require``, ``exclude``: names of
    ``CHOICES`` of ``lowbit.plan.serving.settings``: of a dimension with a required name these alone, and none that is
    excluded.

    The rule: of all that fits, the least sum of the losses of weights and cache. So a cache is quantized only where the
    bytes that it frees save more loss in weights, or where nothing fits otherwise. Of equal sums the plainer cache, and
    the prompt at once rather than in parts, which take longer. Then, where weights gain by ``prepack_`` on this
    machine, recipes that quantize inputs take the place of those of as many bytes, while that loses less than
    ``EQUAL`` of the sum more; they are tried with batches only, since weights say nothing of inputs.

    Sizes are those of torch's allocator, while the plan generates; ``apply_`` holds plain weights beside new ones.
    Raises ValueError where nothing fits, with the least that would, for unknown names, for models that do not generate
    with a cache of keys and values, and for more tokens than the model has positions; TypeError for other batches.
    """
    check_model(model)
    asked = budget_in(budget, "fit_generation")
    with reporting(progress, "planning") as shown:
        return _fit(model, batch, asked, context, rows, allowed(require, exclude), shown)


def _fit(
    model: nn.Module, batch: Any, budget: Budget, context: int, rows: int, choices: Allowed, progress: Progress
) -> GenerationPlan:
    decoder = decoder_of(model)
    _check(model, decoder, context, rows)
    batches = checked(model, batch)
    choices = _possible(choices, decoder, model, context)
    predictor = Predictor(model, decoder, context, rows)
    plain = predictor.whole(ServingSettings(), 0.0)
    limit = budget.of(plain.peak_bytes)
    as_it_is = FLOAT in choices.weights and None in choices.caches and None in choices.parts
    if as_it_is and plain.peak_bytes <= limit:
        return GenerationPlan(plain, limit, plain, [plain], {}, "", context, rows)
    cells = list(itertools.product(choices.caches, choices.parts))
    for number, cell in enumerate(cells):
        progress("estimating", number, len(cells))
        predictor.plain(*cell)
    quantized = next((scheme for scheme in choices.caches if scheme is not None), None)
    sample = None if quantized is None else predictor.plain(quantized, choices.parts[0]).cache
    found = losses(model, decoder, choices, batches, sample, progress)
    search = _Search(predictor, choices, found, limit)
    chosen = search.best()
    return GenerationPlan(
        chosen, limit, plain, search.frontier(), search.rows(chosen.settings), found.by, context, rows
    )


def _check(model: nn.Module, decoder: Decoder, context: Any, rows: Any) -> None:
    for name, value, least in (("context", context, 2), ("rows", rows, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"fit_generation: {name} is a whole number from {least}, got {value!r}; context is the most "
                f"tokens of a sequence, prompt included, and rows the sequences at a time"
            )
    reason = decoder.refuses(model, context)
    if reason is not None:
        raise ValueError(f"fit_generation: {type(model).__name__} cannot generate within {context} tokens: {reason}")
    tensors = (*model.parameters(), *model.buffers())
    if any(is_lazy(t) or hasattr(t, "placements") for t in tensors):
        raise ValueError(
            f"fit_generation: {type(model).__name__} has lazy or sharded parameters; plan for the whole model, after "
            f"it was called once and before it is sharded"
        )


def _possible(choices: Allowed, decoder: Decoder, model: nn.Module, context: int) -> Allowed:
    """Without what this model has no use for."""
    caches, parts = choices.caches, choices.parts
    reason = decoder.plain_only(model)
    if reason is not None:
        caches = [scheme for scheme in caches if scheme is None]
    if not caches:
        raise ValueError(
            f"fit_generation: the cache of {type(model).__name__} can only be plain: {reason}; leave 'plain cache' in"
        )
    few = [part for part in parts if part is None or (decoder.in_parts(model) and part < context - 1)]
    return choices._replace(caches=caches, parts=few or [None])


class _Cell(NamedTuple):
    """A cache and a way to take the prompt: what is held beside the weights that can be quantized, and the loss."""

    cache: str | None
    part: int | None
    rest: int
    loss: float


@dataclass
class _Search:
    """The choices for one model and budget."""

    predictor: Predictor
    choices: Allowed
    losses: Losses
    limit: int

    def __post_init__(self) -> None:
        self.groups = self.losses.groups
        self.names = [n for n in self.choices.weights if not self.groups or n in self.groups[0].loss]
        self.options = [[Option(g.bytes[n], g.loss[n]) for n in self.names] for g in self.groups]
        self.least = sum(min(option.cost for option in row) for row in self.options)
        self.most = sum(max(option.cost for option in row) for row in self.options)
        self.floats = sum(group.bytes[FLOAT] for group in self.groups)
        self.cells = [
            _Cell(cache, part, self.predictor.plain(cache, part).peak_bytes - self.floats, self.losses.caches[cache])
            for cache, part in itertools.product(self.choices.caches, self.choices.parts)
        ]

    # -- the best ------------------------------------------------------------------------------------------------
    def best(self) -> ServingPrediction:
        """The choice of least loss that fits; of equal ones the one with a plainer cache and prompt."""
        ranked = []
        for order, cell in enumerate(self.cells):
            size = self.limit - cell.rest
            if size >= self.least:
                ranked.append((self._loss(self._weights(size)) + cell.loss, order, cell))
        for _, _, cell in sorted(ranked):
            found = self._fitting(cell)
            if found is not None:
                return found
        raise self._nothing()

    def _fitting(self, cell: _Cell) -> ServingPrediction | None:
        """The best weights beside this cell, by an estimate of the whole; a little smaller where that is too large."""
        size = self.limit - cell.rest
        while size >= self.least:
            weights = self._weights(size)
            found = self._packed(weights, cell) or self._whole(weights, cell, False)
            if found.peak_bytes <= self.limit:
                return found
            size = min(size, self._size(weights)) - (found.peak_bytes - self.limit)
        return None

    def _packed(self, weights: dict[str, str], cell: _Cell) -> ServingPrediction | None:
        """With packed layers, where they fit and lose as little."""
        if True not in self.choices.packed:
            return None
        chosen = self._with_inputs(weights, cell.loss)
        if not any(map(packs, chosen.values())):
            return None
        found = self._whole(chosen, cell, True)
        return found if found.settings.packed and found.peak_bytes <= self.limit else None

    def _with_inputs(self, weights: dict[str, str], beside: float) -> dict[str, str]:
        """Recipes that quantize inputs, in the place of those with as many bytes or more, while losses are equal."""
        chosen = dict(weights)
        left = EQUAL * (self._loss(weights) + beside)
        changes = []
        for group in self.groups:
            has = weights[group.names[0]]
            for name in filter(packs, self.names):
                if has not in (FLOAT, name) and group.bytes[name] <= group.bytes[has]:
                    changes.append((group.loss[name] - group.loss[has], name, group.names))
        for more, name, names in sorted(changes):
            if more <= left and chosen[names[0]] == weights[names[0]]:
                left -= max(more, 0.0)
                chosen |= dict.fromkeys(names, name)
        return chosen

    def _whole(self, weights: dict[str, str], cell: _Cell, packed: bool) -> ServingPrediction:
        settings = ServingSettings(weights, cell.cache, cell.part, packed)
        return self.predictor.whole(settings, self._loss(weights) + cell.loss)

    def _nothing(self) -> ValueError:
        cell = min(self.cells, key=lambda cell: cell.rest)
        least = self._whole(self._weights(self.least), cell, False)
        return ValueError(
            f"fit_generation: no choice fits generation within {self.predictor.context} tokens into "
            f"{amount(self.limit)}; the least is {amount(least.peak_bytes)} ({least.peak_bytes} bytes), with "
            f"{words(least.settings)}. Ask for as much, or give a shorter context, fewer rows, or let smaller "
            f"recipes, caches and parts be chosen"
        )

    # -- weights -------------------------------------------------------------------------------------------------
    def _weights(self, size: int) -> dict[str, str]:
        """The recipes of least loss within so many bytes."""
        picked = allocate(self.options, size)
        return {
            name: self.names[index] for group, index in zip(self.groups, picked, strict=True) for name in group.names
        }

    def _loss(self, weights: dict[str, str]) -> float:
        return math.fsum(group.loss[weights[group.names[0]]] for group in self.groups)

    def _size(self, weights: dict[str, str]) -> int:
        return sum(group.bytes[weights[group.names[0]]] for group in self.groups)

    # -- for people ----------------------------------------------------------------------------------------------
    def frontier(self) -> list[ServingPrediction]:
        """What other budgets would give, by sums."""
        steps = range(_SIZES)
        sizes = [self.least + (self.most - self.least) * step * step // (_SIZES - 1) ** 2 for step in steps]
        found = []
        for weights in map(self._weights, sizes):
            size, loss = self._size(weights), self._loss(weights)
            for cell in self.cells:
                beside = self.predictor.plain(cell.cache, cell.part)
                settings = ServingSettings(weights, cell.cache, cell.part)
                others = beside.weights - self.floats
                found.append(
                    ServingPrediction(settings, cell.rest + size, others + size, beside.cache_bytes, loss + cell.loss)
                )
        return found

    def rows(self, settings: ServingSettings) -> dict[str, tuple[int, int, float]]:
        """By recipe: how many layers have it, the bytes of their weights, and what they lose. Of the cache its loss."""
        found: dict[str, tuple[int, int, float]] = {}
        for group in self.groups:
            name = settings.weights[group.names[0]]
            count, size, loss = found.get(name, (0, 0, 0.0))
            found[name] = (count + len(group.names), size + group.bytes[name], loss + group.loss[name])
        return found
