"""transformers: how its causal language models generate, for ``lb.fit_generation``."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerationMixin

from lowbit.integrations.kv_cache import quantized_cache
from lowbit.plan.serving.decoders import DECODERS, Decoder

__all__ = ["TRANSFORMERS"]


def _refuses(model: Any, context: int) -> str | None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if model.config.is_encoder_decoder:
        return "it has an encoder, whose input is no part of the context; quantize_ it, and give it quantized_cache"
    if not model._supports_default_dynamic_cache():
        return "its cache is not one of keys and values of every token"
    if most is not None and context > most:
        return f"it has {most} positions; give context={most} or less"
    return None


def _cache(model: Any, rows: int, scheme: str | None) -> Any:
    """The cache that ``generate`` makes itself, or the quantized one."""
    if scheme is not None:
        return quantized_cache(model, scheme)
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _cache_name(model: Any) -> str:
    """What the version of transformers calls the argument."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _forward(model: Any, tokens: Tensor, cache: Any) -> Any:
    """As ``generate`` calls it: of the last position alone where the model can."""
    only = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    return model(input_ids=tokens, use_cache=True, **{_cache_name(model): cache}, **only)


def _logits(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=True, **{_cache_name(model): cache}).logits
    return logits


def _options(model: Any, cache: Any, part: int | None) -> dict[str, Any]:
    return {_cache_name(model): cache, **({} if part is None else {"prefill_chunk_size": part})}


def _generate(model: Any, tokens: Tensor, count: int, options: dict[str, Any]) -> Tensor:
    made: Tensor = model.generate(tokens, max_new_tokens=count, **options)
    return made


def _copies(model: Any, options: dict[str, Any]) -> int:
    """Sequences of a row: its beams, or those to return."""
    config = options.get("generation_config") or model.generation_config
    found = (options.get(name, getattr(config, name, None)) for name in ("num_beams", "num_return_sequences"))
    return max(count or 1 for count in found)


def _plain_only(model: Any) -> str | None:
    try:
        quantized_cache(model)
    except ValueError as error:
        return str(error)
    return None


def _knows(model: nn.Module) -> bool:
    return isinstance(model, GenerationMixin) and model.can_generate()


#: Causal language models of transformers.
TRANSFORMERS = Decoder(
    "a causal language model of transformers", _knows, _refuses, _cache, _forward, _logits, _options, _generate,
    _copies, _plain_only, in_parts=lambda model: not getattr(model, "_is_stateful", False),
)  # fmt: skip
DECODERS.append(TRANSFORMERS)
