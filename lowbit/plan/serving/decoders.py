"""Adapters for models that generate token by token with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DECODERS", "Decoder", "decoder_of", "instead_of_tokens"]


@dataclass(frozen=True)
class Decoder:
    """An interface to one family of models."""

    name: str
    """Description of the family."""
    knows: Callable[[nn.Module], bool]
    """``knows(model)``: whether a model belongs to the family."""
    refuses: Callable[[Any, int], str | None]
    """``refuses(model, context)``: why a model cannot generate that many tokens, or None."""
    cache: Callable[[Any, int, str | None], Any]
    """``cache(model, rows, scheme)``: a new cache for one generation, quantized in a scheme; None: the model's own."""
    forward: Callable[[Any, Tensor, Any], Any]
    """``forward(model, tokens, cache)``: the call of one generation step, with the logits that it needs."""
    logits: Callable[[Any, Tensor, Any], Tensor]
    """``logits(model, tokens, cache)``: the logits of all positions, [B, T, V]."""
    options: Callable[[Any, Any, int | None], dict[str, Any]]
    """``options(model, cache, part)``: keyword arguments that apply a plan to the model's generation."""
    generate: Callable[[Any, Tensor, int, dict[str, Any]], Tensor]
    """``generate(model, tokens, count, options)``: tokens [B, T] followed by at most ``count`` new ones."""
    copies: Callable[[Any, dict[str, Any]], int] = lambda model, options: 1
    """``copies(model, options)``: the number of sequences per row, such as beams."""
    plain_only: Callable[[Any], str | None] = lambda model: None
    """``plain_only(model)``: why its cache cannot be quantized, or None."""
    in_parts: Callable[[Any], bool] = lambda model: False
    """``in_parts(model)``: whether it can process a prompt in parts."""


@torch.no_grad()
def _greedy(model: Any, tokens: Tensor, count: int, options: dict[str, Any]) -> Tensor:
    """Generate greedily."""
    cache = options.pop("cache")
    if options:
        raise ValueError(
            f"generate: {type(model).__name__} supports only greedy generation, without options; got "
            f"{sorted(options)}. To sample, call its forward with run.cache()"
        )
    new = tokens
    for _ in range(count):
        new = model(new, cache)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


#: Families of models, the most specific first. Importing ``lowbit.integrations`` adds Hugging Face models.
DECODERS: list[Decoder] = [
    Decoder(
        "a model with kv_cache(rows, scheme) and forward(tokens, cache)",
        knows=lambda model: callable(getattr(model, "kv_cache", None)),
        refuses=lambda model, context: None,
        cache=lambda model, rows, scheme: model.kv_cache(rows, scheme),
        forward=lambda model, tokens, cache: model(tokens, cache),
        logits=lambda model, tokens, cache: model(tokens, cache),
        options=lambda model, cache, part: {"cache": cache},
        generate=_greedy,
    )
]


def decoder_of(model: nn.Module) -> Decoder:
    """Return the row of ``DECODERS`` for the model. Raises ValueError if there is none."""
    for decoder in DECODERS:
        if decoder.knows(model):
            return decoder
    raise ValueError(
        f"fit_generation: expected a model that generates token by token with a key-value cache, got "
        f"{type(model).__name__} without one; for a weight budget call lb.quantize_(model, lb.sensitivity(model, "
        f"recipes, batches).choose(size=BYTES)). A custom model needs kv_cache(rows, scheme) and "
        f"forward(tokens, cache=None)"
    )


def instead_of_tokens(value: Any) -> str:
    """Return the part of an error that describes a value that is not token ids, and how to create these."""
    got = type(value).__name__
    if isinstance(value, Tensor):
        got = f"{str(value.dtype).removeprefix('torch.')} of the shape {list(value.shape)}"
    elif isinstance(value, list | tuple) and value:
        got += f" of {type(value[0]).__name__}"
    return (
        f"got {got}. Tokenize text with tokenizer(text, return_tensors='pt').input_ids; convert numbers with "
        f"torch.tensor([numbers])"
    )
