"""Quantized KV cache for Hugging Face models: ``model.generate(ids, past_key_values=quantized_cache(model))``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from lowbit import formats
from lowbit.models import cache_scales
from lowbit.models.batches import batches_in, feed
from lowbit.nn.kv_cache import QuantizedRows
from lowbit.scaling import Scheme

__all__ = ["QuantizedLayer", "cache_name", "calibrate_cache_", "quantized_cache"]

#: The scheme of a cache without static scales, and that of one with them.
DYNAMIC, STATIC = "int8:group32", f"{cache_scales.FORMAT}:row"


@torch.no_grad()
def calibrate_cache_(model: Any, batches: Iterable[Any], per: str = "tensor") -> dict[str, tuple[Tensor, Tensor]]:
    """Give a model static FP8 scales for keys and values, in place, from their largest magnitudes on ``batches``.

    They are buffers ``k_scale`` and ``v_scale`` of the attention modules. ``quantized_cache(model)`` uses them, and
    ``export`` writes them for vLLM.

    Args:
        model: A causal Hugging Face model.
        batches: Batches, as for ``lb.calibrate``.
        per: ``"tensor"``, one scale for the keys and one for the values of a layer, or ``"head"``.

    Returns:
        The scales of keys and values of each attention module.

    Raises:
        ValueError: There are no batches, ``per`` is unknown, keys or values are not finite, or the model has layers
            without full attention.
    """
    if per not in ("tensor", "head"):
        raise ValueError(f"calibrate_cache_: per is 'tensor' or 'head', got {per!r}")
    rows, modules = batches_in(batches), cache_scales.attention_of(model)
    _require_plain(model)
    if not rows or not modules:
        raise ValueError(
            f"calibrate_cache_: expected batches, and a model with attention that uses a cache; got {len(rows)} "
            f"batches and {len(modules)} such modules in a {type(model).__name__}"
        )
    layers: dict[int, _Observed] = {}
    training = model.training
    model.eval()
    try:
        for batch in rows:
            cache = Cache(layers=[layers.setdefault(place, _Observed()) for place in range(max(modules) + 1)])
            arguments = dict(batch) if hasattr(batch, "keys") else {"input_ids": batch}
            feed(model, {**arguments, cache_name(model): cache, "use_cache": True})
            for layer in layers.values():
                layer.reset()
    finally:
        model.train(training)
    scales = {}
    for place, (name, _) in modules.items():
        largest = [amax if per == "head" else amax.amax().reshape(1) for amax in layers[place].largest]
        if not largest or not all(amax.isfinite().all() for amax in largest):
            raise ValueError(f"calibrate_cache_: {name} wrote no keys and values, or not finite ones")
        first, second = (torch.where(amax > 0, amax / formats.find(cache_scales.FORMAT).max, 1.0) for amax in largest)
        scales[place] = (first, second)
    cache_scales.add_(model, scales)
    return {name: scales[place] for place, (name, _) in modules.items()}


class _Observed(DynamicLayer):  # type: ignore[misc]
    """A layer of an ordinary cache that keeps the largest magnitudes of its keys and values, ``[heads, 1, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [states.float().abs().amax((0, 2, 3))[:, None, None] for states in (key_states, value_states)]
        self.largest = [torch.maximum(*pair) for pair in zip(new, self.largest or new, strict=True)]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def reset(self) -> None:
        self.is_initialized, self.keys, self.values = False, None, None


def quantized_cache(model: Any, scheme: Scheme | str | None = None) -> Cache:
    """Create a quantized KV cache for one call of ``generate``.

    Keys and values are quantized once, when they are computed; attention reads the decoded values, also for the
    current token. Encoder-decoder models get a quantized cache for cross-attention too.

    Args:
        model: A Hugging Face model or its config.
        scheme: The quantization scheme of keys and values, as for ``QuantizedRows``. Default: FP8 with the static
            scales of the model (``calibrate_cache_``), or ``"int8:group32"`` if it has none.

    Raises:
        ValueError: Rows of the scheme share scales, or the model has layers without full attention.
    """
    config = getattr(model, "config", model)
    _require_plain(model)
    static = cache_scales.scales_of(model) if scheme is None and isinstance(model, nn.Module) else {}
    if static:
        return Cache(layers=[QuantizedLayer(STATIC, static.get(place)) for place in range(max(static) + 1)])
    scheme = QuantizedRows(scheme or DYNAMIC).scheme
    cache = Cache(layer_class_to_replicate=partial(QuantizedLayer, scheme))
    if not (config.is_encoder_decoder or _has_cross_attention(model)):
        return cache
    return EncoderDecoderCache(cache, Cache(layer_class_to_replicate=partial(QuantizedCrossLayer, scheme)))


def cache_name(model: Any) -> str:
    """The name of the forward's parameter for the cache, which newer versions of transformers call ``cache``."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _require_plain(model: Any) -> None:
    """Raise ValueError if the model, or the model of a config, has layers without full attention."""
    decoder = getattr(model, "config", model).get_text_config(decoder=True)
    types = sorted({name for name in getattr(decoder, "layer_types", None) or () if name != "full_attention"})
    if types:
        raise ValueError(f"quantized_cache: the model has layers with {', '.join(types)}, which need other caches")


def _has_cross_attention(model: Any) -> bool:
    """Whether a decoder without encoder has cross-attention, by the module names in transformers."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return getattr(model, "add_cross_attention", False) or any(
        name.endswith(("encoder_attn", "crossattention")) for name, _ in modules
    )


class QuantizedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, as ``QuantizedRows`` of shape ``[B, heads, S, D]``.

    Args:
        scheme: The scheme.
        scales: Static scales of keys and values, or None.
    """

    def __init__(self, scheme: Scheme | str, scales: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.scheme, self.scales = QuantizedRows(scheme).scheme, scales or (None, None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self.rows = tuple(QuantizedRows(self.scheme, scale) for scale in self.scales)
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
