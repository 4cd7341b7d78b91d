"""``lb.fit_generation``: the search for the settings with the least loss that fit a memory budget."""

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

#: Relative increase of the loss that is accepted for 8-bit inputs, which allow the faster packed layout.
EQUAL = 0.01

#: Number of weight sizes on the frontier, from the smallest to the largest.
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
    """Find the settings for generation with the least loss that fit a memory budget. ``model`` does not change.

    Of all settings that fit, the plan has the least sum of the losses of weights and cache. A cache is quantized only
    if the freed bytes save more loss in the weights, or if nothing fits otherwise. For equal sums the plan prefers the
    plainer cache, and the whole prompt in one forward, which is faster.

    If weights gain from ``prepack_`` on this machine, recipes that quantize inputs may replace recipes of the same
    size, as long as the loss rises by less than ``EQUAL`` of the sum. This needs a batch.

    Sizes are bytes of torch's allocator during generation. ``apply_`` also holds the original weights.

    Args:
        model: Causal Hugging Face model, or one with ``kv_cache(rows, scheme)`` and ``forward(tokens, cache)``. May be
            on the meta device if there is no batch.
        batch: Token ids [B, T], or several such batches, to estimate losses. None uses the errors of the weights; for
            a model on meta, the errors of normal random numbers.
        budget: Limit on the peak, with weights, cache and activations: bytes, a size such as ``"80MB"``, or a share of
            the unchanged model's peak such as ``"50%"``.
        context: Most tokens of a sequence. The prompt has at most ``context - 1``.
        rows: Most sequences at a time.
        require: Choices that the plan must use, by name; ``lowbit.plan.serving.CHOICES`` lists them. Of a dimension
            with required names it uses one of these.
        exclude: Choices that the plan must not use.
        progress: Called as ``progress(what, done, total)``. None shows a bar on a terminal; False shows nothing.

    Returns:
        The plan. ``plan.apply_(model)`` applies it.

    Raises:
        ValueError: If nothing fits (the error names the smallest peak); for unknown names, models without a key-value
            cache, or a context above the model's number of positions.
        TypeError: For a batch that is not token ids.
    """
    check_model(model)
    limit = budget_in(budget, "fit_generation")
    with reporting(progress, "planning") as shown:
        return _fit(model, batch, limit, context, rows, allowed(require, exclude), shown)


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
    allows_plain = FLOAT in choices.weights and None in choices.caches and None in choices.parts
    if allows_plain and plain.peak_bytes <= limit:
        return GenerationPlan(plain, limit, plain, [plain], {}, "", context, rows)
    cells = list(itertools.product(choices.caches, choices.parts))
    for number, cell in enumerate(cells):
        progress("estimating", number, len(cells))
        predictor.plain(*cell)
    quantized = next((scheme for scheme in choices.caches if scheme is not None), None)
    sample = None if quantized is None else predictor.plain(quantized, choices.parts[0]).cache
    estimated = losses(model, decoder, choices, batches, sample, progress)
    search = _Search(predictor, choices, estimated, limit)
    chosen = search.best()
    return GenerationPlan(
        chosen, limit, plain, search.frontier(), search.rows(chosen.settings), estimated.by, context, rows
    )


def _check(model: nn.Module, decoder: Decoder, context: Any, rows: Any) -> None:
    for name, value, least in (("context", context, 2), ("rows", rows, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"fit_generation: {name} must be an integer from {least}, got {value!r}; context is the most "
                f"tokens of a sequence, prompt included, and rows the most sequences at a time"
            )
    reason = decoder.refuses(model, context)
    if reason is not None:
        raise ValueError(f"fit_generation: {type(model).__name__} cannot generate within {context} tokens: {reason}")
    tensors = (*model.parameters(), *model.buffers())
    if any(is_lazy(t) or hasattr(t, "placements") for t in tensors):
        raise ValueError(
            f"fit_generation: {type(model).__name__} has lazy or sharded parameters; call a lazy model once, and plan "
            f"before sharding"
        )


def _possible(choices: Allowed, decoder: Decoder, model: nn.Module, context: int) -> Allowed:
    """Remove the choices that this model does not support."""
    caches, parts = choices.caches, choices.parts
    reason = decoder.plain_only(model)
    if reason is not None:
        caches = [scheme for scheme in caches if scheme is None]
    if not caches:
        raise ValueError(
            f"fit_generation: the cache of {type(model).__name__} cannot be quantized: {reason}; allow 'plain cache'"
        )
    parts = [part for part in parts if part is None or (decoder.in_parts(model) and part < context - 1)]
    return choices._replace(caches=caches, parts=parts or [None])


class _Cell(NamedTuple):
    """A cache and a prompt size, with the loss and the bytes besides the weights that can be quantized (``rest``)."""

    cache: str | None
    part: int | None
    rest: int
    loss: float


@dataclass
class _Search:
    """The search for one model and budget."""

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
        """Return the fitting settings with the least loss; for equal losses, with the plainer cache and prompt."""
        ranked = []
        for order, cell in enumerate(self.cells):
            size = self.limit - cell.rest
            if size >= self.least:
                ranked.append((self._loss(self._weights(size)) + cell.loss, order, cell))
        for _, _, cell in sorted(ranked):
            prediction = self._fitting(cell)
            if prediction is not None:
                return prediction
        raise self._nothing()

    def _fitting(self, cell: _Cell) -> ServingPrediction | None:
        """Return the best weights for this cell that a whole estimate confirms, or None."""
        size = self.limit - cell.rest
        while size >= self.least:
            weights = self._weights(size)
            prediction = self._packed(weights, cell) or self._whole(weights, cell, False)
            if prediction.peak_bytes <= self.limit:
                return prediction
            size = min(size, self._size(weights)) - (prediction.peak_bytes - self.limit)
        return None

    def _packed(self, weights: dict[str, str], cell: _Cell) -> ServingPrediction | None:
        """Return the prediction with packed layers, if they fit without a larger loss."""
        if True not in self.choices.packed:
            return None
        chosen = self._with_inputs(weights, cell.loss)
        if not any(map(packs, chosen.values())):
            return None
        prediction = self._whole(chosen, cell, True)
        return prediction if prediction.settings.packed and prediction.peak_bytes <= self.limit else None

    def _with_inputs(self, weights: dict[str, str], cache_loss: float) -> dict[str, str]:
        """Replace recipes by recipes that quantize inputs and are not larger, as long as the loss is about equal."""
        chosen = dict(weights)
        left = EQUAL * (self._loss(weights) + cache_loss)
        changes = []
        for group in self.groups:
            current = weights[group.names[0]]
            for name in filter(packs, self.names):
                if current not in (FLOAT, name) and group.bytes[name] <= group.bytes[current]:
                    changes.append((group.loss[name] - group.loss[current], name, group.names))
        for increase, name, names in sorted(changes):
            if increase <= left and chosen[names[0]] == weights[names[0]]:
                left -= max(increase, 0.0)
                chosen |= dict.fromkeys(names, name)
        return chosen

    def _whole(self, weights: dict[str, str], cell: _Cell, packed: bool) -> ServingPrediction:
        settings = ServingSettings(weights, cell.cache, cell.part, packed)
        return self.predictor.whole(settings, self._loss(weights) + cell.loss)

    def _nothing(self) -> ValueError:
        cell = min(self.cells, key=lambda cell: cell.rest)
        least = self._whole(self._weights(self.least), cell, False)
        return ValueError(
            f"fit_generation: no choice fits generation of {self.predictor.context} tokens into "
            f"{amount(self.limit)}; the smallest needs {amount(least.peak_bytes)} ({least.peak_bytes} bytes), with "
            f"{words(least.settings)}. Raise the budget, use a shorter context or fewer rows, or allow smaller "
            f"recipes, caches and parts"
        )

    # -- weights -------------------------------------------------------------------------------------------------
    def _weights(self, size: int) -> dict[str, str]:
        """Return the recipes with the least loss in at most ``size`` bytes."""
        picked = allocate(self.options, size)
        return {
            name: self.names[index] for group, index in zip(self.groups, picked, strict=True) for name in group.names
        }

    def _loss(self, weights: dict[str, str]) -> float:
        return math.fsum(group.loss[weights[group.names[0]]] for group in self.groups)

    def _size(self, weights: dict[str, str]) -> int:
        return sum(group.bytes[weights[group.names[0]]] for group in self.groups)

    # -- tables --------------------------------------------------------------------------------------------------
    def frontier(self) -> list[ServingPrediction]:
        """Return predictions for other budgets, from sums."""
        steps = range(_SIZES)
        sizes = [self.least + (self.most - self.least) * step * step // (_SIZES - 1) ** 2 for step in steps]
        predictions = []
        for weights in map(self._weights, sizes):
            size, loss = self._size(weights), self._loss(weights)
            for cell in self.cells:
                usage = self.predictor.plain(cell.cache, cell.part)
                settings = ServingSettings(weights, cell.cache, cell.part)
                unquantized = usage.weights - self.floats
                predictions.append(
                    ServingPrediction(
                        settings, cell.rest + size, unquantized + size, usage.cache_bytes, loss + cell.loss
                    )
                )
        return predictions

    def rows(self, settings: ServingSettings) -> dict[str, tuple[int, int, float]]:
        """Return for each recipe the number of its layers, the bytes of their weights, and their loss."""
        rows: dict[str, tuple[int, int, float]] = {}
        for group in self.groups:
            name = settings.weights[group.names[0]]
            count, size, loss = rows.get(name, (0, 0, 0.0))
            rows[name] = (count + len(group.names), size + group.bytes[name], loss + group.loss[name])
        return rows
