"""The config of a directory in the layout of compressed-tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowbit.interop.compressed_tensors.schemes import cache_config
from lowbit.interop.compressed_tensors.storing import store
from lowbit.interop.compressed_tensors.vllm import differences
from lowbit.interop.directories.layers import StoredLayer
from lowbit.interop.directories.names import Names
from lowbit.interop.directories.writing import Layout
from lowbit.models import cache_scales
from lowbit.models.names import plain_name
from lowbit.nn.base import kind

__all__ = ["LAYOUT"]

#: Formats that readers decode to bf16 whatever the dtype of the model, so that other dtypes fail at the first matmul.
_BF16_ONLY = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")


def _dtype(model: Any, layers: dict[str, StoredLayer]) -> str | None:
    """bf16 if readers run a format in bf16 only."""
    return "bfloat16" if any(layer.stored.about.format.name in _BF16_ONLY for layer in layers.values()) else None


def _quantization_config(model: Any, layers: dict[str, StoredLayer], names: Names) -> dict[str, Any]:
    """The config of all layers. One group names the class Linear, several their layers.

    Layers are named as in checkpoints, for vLLM, and also as in memory, for transformers.
    """
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, layer in layers.items():
        targets = groups.setdefault(
            json.dumps(layer.stored.about.group, sort_keys=True), (layer.stored.about.group, [])
        )[1]
        targets += dict.fromkeys((name, layer.path))
    formats = {layer.stored.about.format.name for layer in layers.values()}
    scales = next(iter(cache_scales.scales_of(model).values()), None)
    output: Any = model.get_output_embeddings()  # for vLLM, whose output layer is not a Linear
    outputs = [name for name, layer in layers.items() if layer.layer is output]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{index}": {"targets": ["Linear", *outputs] if len(groups) == 1 else targets, **group}
            for index, (group, targets) in enumerate(groups.values())
        },
        "ignore": _ignored(model, names),
        "kv_cache_scheme": cache_config(scales[0].numel()) if scales else None,
    }


def _ignored(model: nn.Module, names: Names) -> list[str]:
    """The modules with a float matrix, which readers may take for Linears: Linears, routers, and stacked experts."""
    ignored = []
    for path, module in model.named_modules(remove_duplicate=False):
        dims = {0 if value is None else value.dim() for value in module._parameters.values()}
        if kind(module) is not None or isinstance(module, nn.Embedding) or not dims & {2, 3}:
            continue
        for name in dict.fromkeys((names.layer(plain_name(path)), plain_name(path))):
            ignored.append(name if 2 in dims else f"re:{re.escape(name)}\\..*")
    return ignored


def _notes(model: Any, layers: dict[str, StoredLayer]) -> Iterator[str]:
    if _dtype(model, layers) is not None and getattr(model, "dtype", None) not in (None, torch.bfloat16):
        yield "config.json has dtype bfloat16, because readers run this format in bf16 only"
    yield from differences(layers)


#: The layout, for ``directories.write``.
LAYOUT = Layout("compressed-tensors", store, _quantization_config, _dtype, _notes, cache=True)
