"""Models that generate token by token with a cache of keys and values, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DECODERS", "Decoder", "decoder_of", "instead_of_tokens"]


@dataclass(frozen=True)
class Decoder:
    """A kind of model.

    ``knows(model)``: whether it is of this kind. ``refuses(model, context)``: why one cannot generate so many tokens,
    or None. ``cache(model, rows, scheme)``: an empty cache for one generation, of codes in a scheme or, for None, as
    the model has it. ``forward(model, tokens, cache)``: what one step of generation calls, with the logits that it
    needs. ``logits(model, tokens, cache)``: those of all positions [B, T, V]. ``options(model, cache, part)``: what its
    generation takes of a plan. ``generate(model, tokens, count, options)``: tokens [B, T] with at most ``count`` more.
    ``copies(model, options)``: how many sequences there are of each row. ``plain_only(model)``: why its cache can only
    be plain, or None. ``in_parts(model)``: whether it takes a prompt in parts.
    """

    name: str
    knows: Callable[[nn.Module], bool]
    refuses: Callable[[Any, int], str | None]
    cache: Callable[[Any, int, str | None], Any]
    forward: Callable[[Any, Tensor, Any], Any]
    logits: Callable[[Any, Tensor, Any], Tensor]
    options: Callable[[Any, Any, int | None], dict[str, Any]]
    generate: Callable[[Any, Tensor, int, dict[str, Any]], Tensor]
    copies: Callable[[Any, dict[str, Any]], int] = lambda model, options: 1
    plain_only: Callable[[Any], str | None] = lambda model: None
    in_parts: Callable[[Any], bool] = lambda model: False


@torch.no_grad()
def _greedy(model: Any, tokens: Tensor, count: int, options: dict[str, Any]) -> Tensor:
    """The likeliest token each time."""
    cache = options.pop("cache")
    if options:
        raise ValueError(
            f"generate: {type(model).__name__} takes the likeliest token each time, and no options; got "
            f"{sorted(options)}. Call its forward yourself with run.cache()"
        )
    new = tokens
    for _ in range(count):
        new = model(new, cache)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


#: Kinds of models, most particular first. ``lowbit.integrations`` adds that of transformers once it is imported.
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
    """The row of ``DECODERS`` that knows the model. Raises ValueError where none does."""
    for decoder in DECODERS:
        if decoder.knows(model):
            return decoder
    raise ValueError(
        f"fit_generation: it is for models that write token by token with a cache of keys and values, and "
        f"{type(model).__name__} has none; for a budget of weights call lb.quantize_(model, lb.sensitivity(model, "
        f"recipes, batches).choose(size=BYTES)). A model of your own needs kv_cache(rows, scheme) and "
        f"forward(tokens, cache=None)"
    )


def instead_of_tokens(given: Any) -> str:
    """What a caller gave in the place of token ids, and how they are made."""
    got = type(given).__name__
    if isinstance(given, Tensor):
        got = f"{str(given.dtype).removeprefix('torch.')} of the shape {list(given.shape)}"
    elif isinstance(given, list | tuple) and given:
        got += f" of {type(given[0]).__name__}"
    return (
        f"got {got}. Tokenize text, tokenizer(text, return_tensors='pt').input_ids; of numbers make a tensor, "
        f"torch.tensor([numbers])"
    )
