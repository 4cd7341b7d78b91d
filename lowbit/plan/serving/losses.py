"""Estimated losses of generation choices: in nats per token with a batch, relative weight errors without one."""

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

#: Meaning of the losses by their source, as a text with ``loss``, the sum of all choices, and ``percent``, the increase
#: of the perplexity.
BY = {
    "loss": "the loss rises by about {loss:.3g} nats per token and the perplexity by {percent:.1%}, estimated from "
    "gradients of the batch",
    "weights": "relative errors of weights and cache sum to {loss:.3g}; they rank choices but do not predict text "
    "quality, which needs a batch",
    "formats": "relative errors of normal random numbers sum to {loss:.3g}, because the model is on meta; they rank "
    "choices but do not predict text quality",
}


@dataclass(frozen=True)
class Group:
    """Layers that get the same recipe, with bytes and loss by recipe."""

    names: tuple[str, ...]
    bytes: dict[str, int]
    loss: dict[str, float]


@dataclass(frozen=True)
class Losses:
    """Losses of the groups of layers, and of caches by scheme. ``by`` is a key of ``BY``."""

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
    """Estimate the loss of each recipe on each layer, and of each cache.

    Without batches, recipes that quantize inputs are left out, unless there are no others.

    Args:
        model: Model to generate with.
        decoder: Its row of ``DECODERS``.
        choices: Allowed choices.
        batches: Result of ``checked``.
        cache: A quantized cache of the model after a generation, to count its keys and values; None if it cannot be
            quantized.
        progress: Called as ``progress(what, done, total)``.
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
    """Return the relative error energy of a recipe on normal random weights."""
    if name == FLOAT:
        return 0.0
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    _, (signal, noise) = Ruled().weight("", weight, recipe(name))
    return float(noise / signal)


@cache
def _rows_error(scheme: str) -> float:
    """Return the relative error energy of a cache scheme on normal random keys or values."""
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    rows = QuantizedRows(scheme)
    rows.append(x)
    return float((rows.read() - x).square().sum() / x.square().sum())


# -- with batches -----------------------------------------------------------------------------------------------------
def checked(model: nn.Module, batch: Any) -> list[Any] | None:
    """Return the batches of a caller's argument, or None if there is none.

    Raises:
        TypeError: For a batch that is not token ids [B, T].
        ValueError: For a model on meta.
    """
    if batch is None:
        return None
    several = isinstance(batch, Iterable) and not isinstance(batch, Tensor | Mapping)
    batches = batches_in(batch if several else [batch])
    if not batches or any(tokens_of(tokens) is None for tokens in batches):
        raise TypeError(
            f"fit_generation: expected token ids, an integer tensor [B, T], or several such batches; "
            f"{instead_of_tokens(batch)}"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("fit_generation: a model on meta cannot run batches; load its weights, or leave batch out")
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
        measured = sensitivity(model, quantizing, batches, skip=(), progress=progress)
        lost = {name: {key: score.loss for key, score in row.items()} for name, row in measured.scores.items()}
        lost |= _table_losses(work, quantizing, batches)
        alike = measured.groups
    rows = [row for row in weights_of(model, names, measured=False) if set(row.names) <= set(lost)]
    tokens = sum(int(_counted(batch).sum()) for batch in batches)
    groups = [_group(members, names, lost, tokens) for members in _joined(rows, alike)]
    caches = {
        scheme: 0.0 if scheme is None else _cache_loss(work, decoder, scheme, batches) / tokens
        for scheme in choices.caches
    }
    return Losses(groups, caches, "loss")


def _group(rows: Sequence[Weights], recipes: Sequence[str], lost: dict[str, dict[str, float]], tokens: int) -> Group:
    """Join rows to a group. The loss rises by half of the squared product of gradient and error."""
    names = tuple(name for row in rows for name in row.names)
    return Group(
        names,
        {key: sum(row.bytes[key] for row in rows) for key in (FLOAT, *recipes)},
        {key: math.fsum(lost[name].get(key, 0.0) for name in names) / (2 * tokens) for key in recipes},
    )


def _joined(rows: Sequence[Weights], alike: Sequence[Sequence[str]]) -> list[list[Weights]]:
    """Join the rows whose layers are in the same group of ``alike``."""
    owner = {name: number for number, names in enumerate(alike) for name in names}
    joined: dict[int, list[Weights]] = {}
    for number, row in enumerate(rows):
        key = min((owner[name] for name in row.names if name in owner), default=len(alike) + number)
        joined.setdefault(key, []).append(row)
    return list(joined.values())


def _table_losses(model: nn.Module, recipes: Sequence[str], batches: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return for each embedding the sum over tokens of (dL/dy (y_q - y))^2, as ``sensitivity`` for other layers."""
    sums = {name: dict.fromkeys(recipes, 0.0) for name in tables(model)}
    for name, table in tables(model).items():
        weight: Any = table.weight
        errors = {}
        for key in recipes:
            quantized, _ = Ruled().weight(name, weight.detach(), recipe(key))
            errors[key] = quantized.dequantize(torch.float32) - weight.detach().float()
        for batch in batches:
            for ids, grad in _gradients(model, table, batch):
                for key, error in errors.items():
                    sums[name][key] += float((error[ids] * grad.float()).square().sum(dtype=torch.float64))
    return sums


def _gradients(model: nn.Module, table: nn.Module, batch: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the ids of each call of an embedding, with the gradient of its output."""
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
        raise ValueError(f"fit_generation: {type(model).__name__} returns no logits [B, T, vocabulary] for token ids")
    grads = torch.autograd.grad(value, [output for _, output in calls], allow_unused=True)
    return [(ids, grad) for (ids, _), grad in zip(calls, grads, strict=True) if grad is not None]


@torch.no_grad()
def _cache_loss(model: nn.Module, decoder: Decoder, scheme: str, batches: Sequence[Any]) -> float:
    """Return the divergence of next-token distributions with a quantized cache from the plain ones, over all tokens."""
    total = 0.0
    for batch in batches:
        counted = _counted(batch)
        plain, quantized = (
            _logits(model, decoder, batch, cache)[:, :-1][counted].float().log_softmax(-1) for cache in (None, scheme)
        )
        total += float(F.kl_div(quantized, plain, reduction="sum", log_target=True))
    return max(total, 0.0)


def _logits(model: nn.Module, decoder: Decoder, batch: Any, scheme: str | None) -> Tensor:
    tokens = tokens_of(batch)
    assert tokens is not None
    return decoder.logits(model, tokens, decoder.cache(model, len(tokens), scheme))


def _counted(batch: Any) -> Tensor:
    """Return a mask [B, T - 1] of the positions whose next token is not padding."""
    tokens, mask = tokens_of(batch), mask_of(batch)
    assert tokens is not None
    return torch.ones_like(tokens, dtype=torch.bool)[:, 1:] if mask is None else mask[:, 1:]
