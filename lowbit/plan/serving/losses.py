"""What a model loses by each choice: in nats a token where there are tokens to look at, else by errors of numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.convert.maker import Ruled
from lowbit.memory.inference import found_in
from lowbit.models.batches import batches_in, feed, mask_of, tokens_of
from lowbit.models.losses import token_loss
from lowbit.nn.kv_cache import QuantizedRows
from lowbit.plan.bits import FLOAT
from lowbit.plan.sensitivities import sensitivity
from lowbit.plan.serving.decoders import Decoder, instead_of_tokens
from lowbit.plan.serving.layers import Weights, tables, weights_of
from lowbit.plan.serving.settings import Allowed, packs
from lowbit.progress import Progress
from lowbit.recipes import recipe

__all__ = ["BY", "Group", "Losses", "checked", "losses"]

#: By how a loss was made, what it says of quality: ``loss`` is the sum of what is chosen, ``percent`` what perplexity
#: rises by.
BY = {
    "loss": "the loss rises by about {loss:.3g} nats a token, perplexity by {percent:.1%}, as the gradients of the "
    "batch say",
    "weights": "errors of weights and cache beside their size add up to {loss:.3g}; they rank choices and say nothing "
    "of text, for which a batch is needed",
    "formats": "errors of normal numbers add up to {loss:.3g}, since the model is on meta; they rank choices and say "
    "nothing of text",
}


@dataclass(frozen=True)
class Group:
    """Layers that share a choice. ``bytes`` and ``loss``: by recipe."""

    names: tuple[str, ...]
    bytes: dict[str, int]
    loss: dict[str, float]


@dataclass(frozen=True)
class Losses:
    """``groups`` of layers, ``caches`` by scheme; ``by``: a key of ``BY``."""

    groups: list[Group]
    caches: dict[str | None, float]
    by: str


def losses(
    model: nn.Module,
    decoder: Decoder,
    choices: Allowed,
    batches: Sequence[Any] | None,
    cache: Any,
    progress: Progress,
) -> Losses:
    """Of each recipe on each layer, and of each cache. ``batches``: as ``checked`` returns them. ``cache``: a quantized
    one of the model after a generation, from which its number of keys and values follows; None where it can only be
    plain.

    Without batches, recipes that quantize inputs are none to choose from, unless nothing else is.
    """
    names = choices.weights
    if batches is not None:
        return _by_batches(model, decoder, choices, batches, progress)
    known = [name for name in names if not packs(name)] or names
    meta = any(p.is_meta for p in model.parameters())
    rows = weights_of(model, known, measured=not meta)
    groups = [Group(row.names, row.bytes, row.errors or {name: _error(name) for name in known}) for row in rows]
    count = len(found_in(cache, QuantizedRows))
    caches = {scheme: 0.0 if scheme is None else count * _rows_error(scheme) for scheme in choices.caches}
    return Losses(groups, caches, "formats" if meta else "weights")


@cache
def _error(name: str) -> float:
    """The energy of what a recipe makes of normal weights, over theirs."""
    if name == FLOAT:
        return 0.0
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    _, (signal, noise) = Ruled().weight("", weight, recipe(name))
    return float(noise / signal)


@cache
def _rows_error(scheme: str) -> float:
    """The same of keys or values in a cache."""
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    rows = QuantizedRows(scheme)
    rows.append(x)
    return float((rows.read() - x).square().sum() / x.square().sum())


# -- with batches -----------------------------------------------------------------------------------------------------
def checked(model: nn.Module, batch: Any) -> list[Any] | None:
    """The batches in what a caller gives, None for none. Raises TypeError for what is no token ids [B, T], ValueError
    for a model on meta.
    """
    if batch is None:
        return None
    several = isinstance(batch, Iterable) and not isinstance(batch, Tensor | Mapping)
    batches = batches_in(batch if several else [batch])
    if not batches or any(tokens_of(one) is None for one in batches):
        raise TypeError(
            f"fit_generation: batch is token ids, a tensor of whole numbers [B, T], or several such "
            f"batches; {instead_of_tokens(batch)}"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "fit_generation: a model on meta has no weights to see batches with; load it, or leave batch out"
        )
    return batches


def _by_batches(
    model: nn.Module, decoder: Decoder, choices: Allowed, batches: Sequence[Any], progress: Progress
) -> Losses:
    names = choices.weights
    quantizing = [name for name in names if name != FLOAT]
    work = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())}).eval()
    lost: dict[str, dict[str, float]] = {}
    alike: Sequence[Sequence[str]] = ()
    if quantizing:
        found = sensitivity(model, quantizing, batches, skip=(), progress=progress)
        lost = {name: {one: score.loss for one, score in row.items()} for name, row in found.scores.items()}
        lost |= _of_tables(work, quantizing, batches)
        alike = found.groups
    rows = [row for row in weights_of(model, names, measured=False) if set(row.names) <= set(lost)]
    tokens = sum(int(_counted(one).sum()) for one in batches)
    groups = [_group(own, names, lost, tokens) for own in _joined(rows, alike)]
    caches = {
        scheme: 0.0 if scheme is None else _of_cache(work, decoder, scheme, batches) / tokens
        for scheme in choices.caches
    }
    return Losses(groups, caches, "loss")


def _group(rows: Sequence[Weights], recipes: Sequence[str], lost: dict[str, dict[str, float]], tokens: int) -> Group:
    """A loss rises by half of the square of its gradient times a step."""
    names = tuple(name for row in rows for name in row.names)
    return Group(
        names,
        {one: sum(row.bytes[one] for row in rows) for one in (FLOAT, *recipes)},
        {one: math.fsum(lost[name].get(one, 0.0) for name in names) / (2 * tokens) for one in recipes},
    )


def _joined(rows: Sequence[Weights], alike: Sequence[Sequence[str]]) -> list[list[Weights]]:
    """The rows that have layers in one group of ``alike`` together."""
    owner = {name: number for number, names in enumerate(alike) for name in names}
    found: dict[int, list[Weights]] = {}
    for number, row in enumerate(rows):
        key = min((owner[name] for name in row.names if name in owner), default=len(alike) + number)
        found.setdefault(key, []).append(row)
    return list(found.values())


def _of_tables(model: nn.Module, recipes: Sequence[str], batches: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Of each embedding, the sum over tokens of (dL/dy (y_q - y))^2, as ``sensitivity`` takes it for other layers."""
    sums = {name: dict.fromkeys(recipes, 0.0) for name in tables(model)}
    for name, table in tables(model).items():
        weight: Any = table.weight
        errors = {}
        for one in recipes:
            made, _ = Ruled().weight(name, weight.detach(), recipe(one))
            errors[one] = made.dequantize(torch.float32) - weight.detach().float()
        for batch in batches:
            for ids, grad in _gradients(model, table, batch):
                for one, error in errors.items():
                    sums[name][one] += float((error[ids] * grad.float()).square().sum(dtype=torch.float64))
    return sums


def _gradients(model: nn.Module, table: nn.Module, batch: Any) -> list[tuple[Tensor, Tensor]]:
    """The ids of each call of an embedding, with the gradient of the loss by what it answered."""
    calls: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        output = output.detach().requires_grad_()
        calls.append((args[0] if args else kwargs["input"], output))
        return output

    hook = table.register_forward_hook(note, with_kwargs=True)
    try:
        with torch.enable_grad():
            value = token_loss(feed(model, batch), batch)
    finally:
        hook.remove()
    if value is None:
        raise ValueError(f"fit_generation: {type(model).__name__} answers no logits [B, T, vocabulary] to token ids")
    grads = torch.autograd.grad(value, [output for _, output in calls], allow_unused=True)
    return [(ids, grad) for (ids, _), grad in zip(calls, grads, strict=True) if grad is not None]


@torch.no_grad()
def _of_cache(model: nn.Module, decoder: Decoder, scheme: str, batches: Sequence[Any]) -> float:
    """The sum over tokens of the divergence of the next token's distribution with a quantized cache from the plain."""
    total = 0.0
    for batch in batches:
        counted = _counted(batch)
        plain, other = (
            _logits(model, decoder, batch, one)[:, :-1][counted].float().log_softmax(-1) for one in (None, scheme)
        )
        total += float(F.kl_div(other, plain, reduction="sum", log_target=True))
    return max(total, 0.0)


def _logits(model: nn.Module, decoder: Decoder, batch: Any, scheme: str | None) -> Tensor:
    tokens = tokens_of(batch)
    assert tokens is not None
    return decoder.logits(model, tokens, decoder.cache(model, len(tokens), scheme))


def _counted(batch: Any) -> Tensor:
    """Of which positions [B, T - 1] the next token is no padding."""
    tokens, mask = tokens_of(batch), mask_of(batch)
    assert tokens is not None
    return torch.ones_like(tokens, dtype=torch.bool)[:, 1:] if mask is None else mask[:, 1:]
