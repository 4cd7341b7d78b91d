"""Generation with Hugging Face causal language models, for ``lb.fit_generation``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerationMixin

from lowbit.integrations.kv_cache import cache_name, quantized_cache
from lowbit.plan.serving.decoders import DECODERS, Decoder

__all__ = ["TRANSFORMERS"]


def _refuses(model: Any, context: int) -> str | None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if model.config.is_encoder_decoder:
        return "it has an encoder, whose input is not part of the context; use quantize_ and quantized_cache instead"
    if not model._supports_default_dynamic_cache():
        return "its cache does not store keys and values of every token"
    if most is not None and context > most:
        return f"it has {most} positions; pass context={most} or less"
    return None


def _cache(model: Any, rows: int, scheme: str | None) -> Any:
    """The default cache of ``generate``, or a quantized one."""
    if scheme is not None:
        return quantized_cache(model, scheme)
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _forward(model: Any, tokens: Tensor, cache: Any) -> Any:
    """Call the model as ``generate`` does: logits of the last position only, if the model supports it."""
    last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    return model(input_ids=tokens, use_cache=True, **{cache_name(model): cache}, **last)


def _logits(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=True, **{cache_name(model): cache}).logits
    return logits


def _options(model: Any, cache: Any, part: int | None) -> dict[str, Any]:
    return {cache_name(model): cache, **({} if part is None else {"prefill_chunk_size": part})}


def _generate(model: Any, tokens: Tensor, count: int, options: dict[str, Any]) -> Tensor:
    sequences: Tensor = model.generate(tokens, max_new_tokens=count, **options)
    return sequences


def _copies(model: Any, options: dict[str, Any]) -> int:
    """Sequences per row: beams, or sequences to return."""
    config = options.get("generation_config") or model.generation_config
    counts = (options.get(name, getattr(config, name, None)) for name in ("num_beams", "num_return_sequences"))
    return max(count or 1 for count in counts)


def _plain_only(model: Any) -> str | None:
    try:
        quantized_cache(model)
    except ValueError as error:
        return str(error)
    return None


def _knows(model: nn.Module) -> bool:
    return isinstance(model, GenerationMixin) and model.can_generate()


#: Hugging Face causal language models.
TRANSFORMERS = Decoder(
    "a Hugging Face causal language model", _knows, _refuses, _cache, _forward, _logits, _options, _generate,
    _copies, _plain_only, in_parts=lambda model: not getattr(model, "_is_stateful", False),
)  # fmt: skip
DECODERS.append(TRANSFORMERS)
