"""Quantized KV cache for Hugging Face models: ``model.generate(ids, past_key_values=quantized_cache(model))``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from lowbit.nn.kv_cache import QuantizedRows
from lowbit.scaling import Scheme

__all__ = ["QuantizedLayer", "quantized_cache"]


def quantized_cache(model: Any, scheme: Scheme | str = "int8:group32") -> Cache:
    """Create a quantized KV cache for one call of ``generate``.

    Keys and values are quantized once, when they are computed; attention reads the decoded values, also for the
    current token. Encoder-decoder models get a quantized cache for cross-attention too.

    Args:
        model: A Hugging Face model or its config.
        scheme: The quantization scheme of keys and values, as for ``QuantizedRows``.

    Raises:
        ValueError: Rows of the scheme share scales, or the model has layers without full attention.
    """
    config = getattr(model, "config", model)
    scheme = QuantizedRows(scheme).scheme
    decoder = config.get_text_config(decoder=True)
    types = sorted({name for name in getattr(decoder, "layer_types", None) or () if name != "full_attention"})
    if types:
        raise ValueError(f"quantized_cache: the model has layers with {', '.join(types)}, which need other caches")
    cache = Cache(layer_class_to_replicate=partial(QuantizedLayer, scheme))
    if not (config.is_encoder_decoder or _has_cross_attention(model)):
        return cache
    return EncoderDecoderCache(cache, Cache(layer_class_to_replicate=partial(QuantizedCrossLayer, scheme)))


def _has_cross_attention(model: Any) -> bool:
    """Whether a decoder without encoder has cross-attention, by the module names in transformers."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return getattr(model, "add_cross_attention", False) or any(
        name.endswith(("encoder_attn", "crossattention")) for name, _ in modules
    )


class QuantizedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, as ``QuantizedRows`` of shape ``[B, heads, S, D]``."""

    def __init__(self, scheme: Scheme | str) -> None:
        super().__init__()
        self.scheme = QuantizedRows(scheme).scheme

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self.rows = (QuantizedRows(self.scheme), QuantizedRows(self.scheme))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new positions; return keys and values of all positions, each ``[B, heads, S, D]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for rows, states in zip(self.rows, (key_states, value_states), strict=True):
            rows.append(states)
        return self.rows[0].read(), self.rows[1].read()

    def get_seq_length(self) -> int:
        return self.rows[0].length if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop expects the negative number of tokens to remove, got {tokens_to_remove}")
        if tokens_to_remove and self.is_initialized:
            for rows in self.rows:
                rows.crop(max(rows.length + tokens_to_remove, 0))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length():
            batch = torch.arange(self.rows[0].shape[0], device=self.device)
            self.batch_select_indices(batch.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.get_seq_length():
            for rows in self.rows:
                rows.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)


class QuantizedCrossLayer(QuantizedLayer):
    """Keys and values of one cross-attention layer; models store them once, and then read the attributes."""

    keys = property(lambda self: self.rows[0].read() if self.is_initialized else None, lambda self, value: None)
    values = property(lambda self: self.rows[1].read() if self.is_initialized else None, lambda self, value: None)
