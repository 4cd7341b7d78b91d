"""dequantize_: a model's quantized layers replaced, in place, by plain ones that hold what the codes stand for."""

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
    """Turn the quantized layers of ``model`` back, in place, into layers of the classes that they were made of.

    Weights are what the codes stand for, in the dtype that they had (or that the model was cast to since); what
    quantization lost stays lost. Biases stay the same Parameters. Layers that shared a weight share one again, and
    weights require grad if they did. Names, hooks, train/eval mode and checkpointing are kept. What merges adapters
    into plain weights, such as peft's ``merge_and_unload``, works after this. Packed layers are unpacked first.

    Raises, with the model untouched: ValueError for a model without quantized layers, or that is one itself; TypeError
    for what is no model.
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
    found = kind(module)
    if found != "quantized":
        return Verdict(inside=True)
    was = _origin(module)
    adapter = None if was is None else find(was.layer).adapter
    if adapter is None:
        return Verdict(reason=f"no row of lowbit.convert.ADAPTERS says what this {type(module).__name__} was made of")
    return Verdict(adapter=adapter)


def _origin(module: nn.Module) -> Origin | None:
    """What the layer was; a QuantLinear that no conversion made stands for a Linear."""
    found = origin(module)
    if found is None and isinstance(module, QuantLinear):
        like = nn.Linear(module.in_features, module.out_features, device="meta")
        return Origin(shell(like), frozenset({"weight"}))
    return found


class _PlainWeights:
    """Makes the plain weights of one conversion; layers that share their codes get one Parameter."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], nn.Parameter] = {}

    def __call__(
        self, *layers: QuantLinear, kernel_size: tuple[int, ...] | None = None, transposed: bool = False
    ) -> nn.Parameter:
        key = (*(id(layer.codes) for layer in layers), kernel_size, transposed)
        if key not in self.made:
            parts = [layer.plain_weight() for layer in layers]
            weight = parts[0] if len(parts) == 1 else torch.cat(parts)
            weight = weight.t().contiguous() if transposed else weight
            if kernel_size is not None:
                weight = weight.unflatten(1, (*kernel_size, -1)).movedim(-1, 1).contiguous()
            self.made[key] = nn.Parameter(weight)
        return self.made[key]

    @torch.no_grad()
    def restore(self, layer: Any, adapter: Adapter, recipe: Any) -> nn.Module:
        was = _origin(layer)
        assert was is not None
        plain, kept = shell(was.layer), {id(p) for p in layer.parameters()}
        adapter.restore(plain, layer, self)
        for name, p in plain.named_parameters():
            if id(p) not in kept:
                p.requires_grad_(name in was.trained)
        return plain

    def measure(self, layer: nn.Module, made: nn.Module, recipe: Any) -> dict[str, Any]:
        """What the report says of a layer."""
        inner = [module for module in layer.modules() if isinstance(module, QuantLinear)]
        weights = sum(module.weight.numel() for module in inner)
        return measured(layer, made, weights, 8.0 * inner[0].weight.dtype.itemsize)
