"""A quantized KV cache for models of transformers: ``model.generate(ids, past_key_values=quantized_cache(model))``."""

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
    """A cache for one generation with ``model``, a model of transformers or its config.

    ``scheme``: of keys and values, as ``QuantizedRows`` takes it. Attention sees what is stored: a token's keys and
    values are quantized when they are computed, and keep their codes. Of an encoder-decoder model, keys and values of
    cross-attention are quantized too.
    Raises ValueError for a scheme whose rows share scales, and for models with layers that are not full attention.
    """
    config = getattr(model, "config", model)
    scheme = QuantizedRows(scheme).scheme
    decoder = config.get_text_config(decoder=True)
    others = sorted({kind for kind in getattr(decoder, "layer_types", None) or () if kind != "full_attention"})
    if others:
        raise ValueError(f"quantized_cache: the model has layers with {', '.join(others)}, which need other caches")
    cache = Cache(layer_class_to_replicate=partial(QuantizedLayer, scheme))
    if not (config.is_encoder_decoder or _crosses(model)):
        return cache
    return EncoderDecoderCache(cache, Cache(layer_class_to_replicate=partial(QuantizedCrossLayer, scheme)))


def _crosses(model: Any) -> bool:
    """Whether a decoder of its own has cross-attention: models of transformers call these modules so."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return getattr(model, "add_cross_attention", False) or any(
        name.endswith(("encoder_attn", "crossattention")) for name, _ in modules
    )


class QuantizedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, as QuantizedRows ``[B, heads, S, D]``."""

    def __init__(self, scheme: Scheme | str) -> None:
        super().__init__()
        self.scheme = QuantizedRows(scheme).scheme

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self.rows = (QuantizedRows(self.scheme), QuantizedRows(self.scheme))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new positions, and answer all: ``[B, heads, S, D]`` each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for rows, states in zip(self.rows, (key_states, value_states), strict=True):
            rows.append(states)
        return self.rows[0].read(), self.rows[1].read()

    def get_seq_length(self) -> int:
        return self.rows[0].length if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
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
    """Keys and values of one layer of cross-attention, which models store once and then read: decoded."""

    keys = property(lambda self: self.rows[0].read() if self.is_initialized else None, lambda self, value: None)
    values = property(lambda self: self.rows[1].read() if self.is_initialized else None, lambda self, value: None)
