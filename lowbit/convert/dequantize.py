"""dequantize_: replaces the quantized layers of a model by plain layers with the decoded weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit.convert.adapters import Adapter, find
from lowbit.convert.engine import Origin, Task, convert, origin, shell, swap
from lowbit.convert.maker import measured
from lowbit.convert.prepack import unprepack_
from lowbit.convert.requantize import unfuse_requantize_
from lowbit.convert.select import Verdict
from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear
from lowbit.report import Report

__all__ = ["dequantize_"]


def dequantize_(model: nn.Module) -> Report:
    """Turn the quantized layers of ``model`` back, in place, into layers of their original classes.

    Weights are the decoded values, in their original dtype (or the dtype that the model was cast to since). The
    quantization error stays. Biases stay the same Parameters. Layers that shared a weight share one again, and weights
    require grad if they did before. Names, hooks, train/eval mode and checkpointing are kept. Packed layers are
    unpacked first. Afterwards adapters can be merged, for example by peft's ``merge_and_unload``.

    Args:
        model: A model with quantized layers.

    Returns:
        The report of the converted layers.

    Raises:
        ValueError: The model has no quantized layers, or is one itself. The model is unchanged.
        TypeError: ``model`` is not an nn.Module.
    """
    if isinstance(model, nn.Module) and any(kind(module) == "packed" for module in model.modules()):
        unprepack_(model)
    if isinstance(model, nn.Module):
        unfuse_requantize_(model)
    plain = _PlainWeights()
    task = Task(
        "dequantize_", "QuantLinear, QuantConv, QuantMultiheadAttention", _judge, plain.restore, plain.measure, swap
    )
    return convert(model, task)[0]


def _judge(names: list[str], module: nn.Module) -> Verdict:
    if kind(module) != "quantized":
        return Verdict(inside=True)
    source = _origin(module)
    adapter = None if source is None else find(source.layer).adapter
    if adapter is None:
        return Verdict(reason=f"lowbit.convert.ADAPTERS has no row for the plain layer of this {type(module).__name__}")
    return Verdict(adapter=adapter)


def _origin(module: nn.Module) -> Origin | None:
    """The plain layer of ``module``: a Linear for a QuantLinear that was not made by a conversion."""
    source = origin(module)
    if source is None and isinstance(module, QuantLinear):
        like = nn.Linear(module.in_features, module.out_features, device="meta")
        return Origin(shell(like), frozenset({"weight"}))
    return source


class _PlainWeights:
    """Decodes the weights of one conversion. Layers that share their codes get one Parameter."""

    def __init__(self) -> None:
        self.weights: dict[tuple[Any, ...], nn.Parameter] = {}

    def __call__(
        self, *layers: QuantLinear, kernel_size: tuple[int, ...] | None = None, transposed: bool = False
    ) -> nn.Parameter:
        key = (*(id(layer.codes) for layer in layers), kernel_size, transposed)
        if key not in self.weights:
            parts = [layer.plain_weight() for layer in layers]
            weight = parts[0] if len(parts) == 1 else torch.cat(parts)
            weight = weight.t().contiguous() if transposed else weight
            if kernel_size is not None:
                weight = weight.unflatten(1, (*kernel_size, -1)).movedim(-1, 1).contiguous()
            self.weights[key] = nn.Parameter(weight)
        return self.weights[key]

    @torch.no_grad()
    def restore(self, layer: Any, adapter: Adapter, recipe: Any) -> nn.Module:
        source = _origin(layer)
        assert source is not None
        plain, unchanged = shell(source.layer), {id(p) for p in layer.parameters()}
        adapter.restore(plain, layer, self)
        for name, p in plain.named_parameters():
            if id(p) not in unchanged:
                p.requires_grad_(name in source.trained)
        return plain

    def measure(self, layer: nn.Module, plain: nn.Module, recipe: Any) -> dict[str, Any]:
        inner = [module for module in layer.modules() if isinstance(module, QuantLinear)]
        weights = sum(module.weight.numel() for module in inner)
        return measured(layer, plain, weights, 8.0 * inner[0].weight.dtype.itemsize)
