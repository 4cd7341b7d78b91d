"""Detection of key-value caches among a checkpointed module's arguments: recomputation would append to them again."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["is_cache", "is_filled", "place_of"]


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache, such as those of Hugging Face models."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def place_of(module: nn.Module) -> int | None:
    """Return the index of the cache layer that a module uses, or None if it uses none."""
    places = (getattr(m, "layer_idx", None) for m in module.modules())
    return next((place for place in places if isinstance(place, int)), None)


def is_filled(cache: Any, place: int) -> bool:
    """Return whether a module that uses layer ``place`` would read tokens or states from the cache.

    The layer is asked, because the cache itself raises for layers without keys and values: linear attention,
    convolutions, layers that share keys with another layer, and layers without attention.
    """
    sides = [getattr(cache, side, None) for side in ("self_attention_cache", "cross_attention_cache")]
    if any(side is not None for side in sides):  # an encoder-decoder
        return any(side is not None and is_filled(side, place) for side in sides)
    layers = getattr(cache, "layers", None)
    if layers is None:
        return bool(cache.get_seq_length(place))
    if place >= len(layers):
        return False
    layer = layers[place]
    tokens = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    states = getattr(layer, "has_previous_state", False)
    return bool(tokens) or (any(states.values()) if isinstance(states, dict) else bool(states))
