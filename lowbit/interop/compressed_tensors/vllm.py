"""Differences between a written checkpoint and the model that vLLM would run, from the source of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.interop.directories.layers import StoredLayer

__all__ = ["differences"]

#: Layers whose outputs vLLM computes by one matmul.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Unread(NamedTuple):
    """Weights that vLLM has no class for.

    Attributes:
        format: The format.
        strategies: The strategies of weights.
        inputs: The strategies of inputs; None: all.
        words: The weights in words.
    """

    format: str
    strategies: tuple[str, ...]
    inputs: tuple[str, ...] | None
    words: str


_UNREAD = (
    _Unread("mxfp6-pack-quantized", ("group",), None, "mxfp6 weights"),
    _Unread("pack-quantized", ("tensor",), None, "packed integers with one scale per tensor"),
    _Unread("int-quantized", ("group", "channel", "tensor"), ("group",), "inputs in groups"),
    _Unread("float-quantized", ("group",), None, "FP8 weights in groups"),
    _Unread("naive-quantized", ("group",), None, "8-bit weights in groups without quantized inputs"),
)


def differences(layers: dict[str, StoredLayer]) -> Iterator[str]:
    """Notes on what vLLM cannot load, or computes with other numbers; one example of each kind.

    Args:
        layers: The quantized Linears by their names in the checkpoint.
    """
    for row in _UNREAD:
        name = next((name for name, layer in layers.items() if _is_unread(layer, row)), None)
        if name is not None:
            yield f"vLLM does not read {row.words}, such as those of {name}; transformers does"
    rounded = next((name for name, layer in layers.items() if _rounds_scales(layer)), None)
    if rounded is not None:
        yield f"vLLM rounds the scales of packed integers to the dtype of the model, such as those of {rounded}"
    parents = sorted({name.rpartition(".")[0] for name in layers})
    rows = [(parent, fused) for parent in parents for fused in _FUSED]
    for check in (_mixed, _several_scales):
        found = next(filter(None, (check(layers, parent, fused) for parent, fused in rows)), None)
        if found is not None:
            yield found


def _is_unread(layer: StoredLayer, row: _Unread) -> bool:
    inputs = (layer.stored.about.group.get("input_activations") or {}).get("strategy")
    matches = (
        layer.stored.about.format.name == row.format
        and layer.stored.about.group["weights"]["strategy"] in row.strategies
    )
    return matches and (row.inputs is None or inputs in row.inputs)


def _rounds_scales(layer: StoredLayer) -> bool:
    packed = layer.stored.about.format.name == "pack-quantized"
    return packed and layer.weight.scale.dtype.itemsize > layer.layer.weight_dtype.itemsize


def _mixed(layers: dict[str, StoredLayer], parent: str, fused: tuple[str, ...]) -> str | None:
    groups = [layers[name].stored.about.group if (name := f"{parent}.{child}") in layers else None for child in fused]
    if any(group is not None for group in groups) and any(group != groups[0] for group in groups):
        return (
            f"vLLM needs one recipe for {', '.join(fused)}, and those of {parent} differ; it would not load this model"
        )
    return None


def _several_scales(layers: dict[str, StoredLayer], parent: str, fused: tuple[str, ...]) -> str | None:
    siblings = [layers[name] for child in fused if (name := f"{parent}.{child}") in layers]
    for words, scales in (
        ("global scales", [layer.weight.global_scale for layer in siblings if layer.layer.scheme.global_scale]),
        ("input scales", [layer.layer.input_scales for layer in siblings if layer.layer.recipe.static]),
    ):
        if any(not _equal(scale, scales[0]) for scale in scales):
            return (
                f"{parent} has different {words} for {', '.join(fused)}; vLLM uses one for all of them, which changes "
                f"the numbers"
            )
    return None


def _equal(a: object, b: object) -> bool:
    """Whether two tensors, or tuples of tensors and None, are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(_equal(one, other) for one, other in zip(a, b, strict=True))
    return a is b
