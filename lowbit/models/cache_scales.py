"""Static scales of keys and values, buffers ``k_scale`` and ``v_scale`` of Hugging Face attention modules.

The config of the model says that it has them, so that a model built from its config has them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ATTRIBUTE", "FORMAT", "NAMES", "add_", "attention_of", "expect_", "scales_of"]

#: The buffers.
NAMES = ("k_scale", "v_scale")

#: The format of keys and values.
FORMAT = "fp8_e4m3"

#: The attribute of the config: the number of scales for keys and for values of a layer, 1 or the number of heads.
ATTRIBUTE = "kv_cache_scales"


def attention_of(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """The attention modules that use a cache, by the number of the cache's layer, with their names.

    Raises:
        ValueError: two modules use one layer.
    """
    places: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        place = getattr(module, "layer_idx", None)
        if not isinstance(place, int) or "attention" not in type(module).__name__.lower():
            continue
        if place in places:
            raise ValueError(f"{places[place][0]} and {name} use layer {place} of the KV cache; expected one module")
        places[place] = (name, module)
    return places


def add_(model: Any, scales: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Register the scales of keys and values of each layer, and describe them in the config."""
    modules = attention_of(model)
    for place, pair in scales.items():
        for name, scale in zip(NAMES, pair, strict=True):
            modules[place][1].register_buffer(name, scale)
    setattr(model.config, ATTRIBUTE, max(pair[0].numel() for pair in scales.values()))


def expect_(model: Any) -> None:
    """Register scales without values if the config says that the model has them.

    Raises:
        ValueError: the config has something else than a number of scales.
    """
    count = getattr(model.config, ATTRIBUTE, None)
    if count is None:
        return
    heads = model.config.get_text_config(decoder=True)
    most = getattr(heads, "num_key_value_heads", None) or getattr(heads, "num_attention_heads", 1)
    if isinstance(count, bool) or count not in (1, most):
        raise ValueError(f"the config has {ATTRIBUTE} = {str(count)[:50]!r}, expected 1 or the number of heads {most}")
    shape = (1,) if count == 1 else (count, 1, 1)
    add_(model, {place: (torch.ones(shape), torch.ones(shape)) for place in attention_of(model)})


def scales_of(model: nn.Module) -> dict[int, tuple[Tensor, Tensor]]:
    """The scales of keys and values by layer, each ``[1, 1, 1]`` or ``[heads, 1, 1]``; empty if there are none."""
    found = {}
    for place, (_, module) in attention_of(model).items():
        pair = [module._buffers.get(name) for name in NAMES]
        if pair[0] is not None and pair[1] is not None:
            found[place] = (pair[0].reshape(-1, 1, 1), pair[1].reshape(-1, 1, 1))
    return found
