"""Rough times of arithmetics, before any of them is estimated on the model.

Most of a step is the products of linear layers. Their time relative to fp32 is measured on three layers of the largest
shape; the rest of the step is taken to be as long as in plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit.memory.estimator import Estimate
from lowbit.models.output_layers import find_output_layers
from lowbit.plan.adapters import RANK
from lowbit.plan.settings import TrainingSettings

__all__ = ["Products", "Rough", "products_of", "total"]

#: Fields of an arithmetic that change linear layers, and those of them that change output layers too.
_OF_LAYERS = frozenset({"precision", "recipe", "adapters", "base", "bf16_params", "loaded", "frozen"})
_OF_OUTPUT = frozenset({"precision", "bf16_params", "loaded"})

#: The least share of linear layers in the time for a rough time.
_LEAST_SHARE = 0.1


class Products(NamedTuple):
    """The linear layers of a model.

    Attributes:
        layers: Three layers of the shape that takes the longest.
        rows: Their input.
        share: Share of linear layers in the time of plain training, without output layers.
        of_output: Share of output layers.
    """

    layers: nn.Module
    rows: Tensor
    share: float
    of_output: float


def products_of(model: nn.Module, usage: Estimate) -> Products | None:
    """Return the linear layers of ``model``, or None if they take less than a tenth of the time.

    Args:
        model: The model.
        usage: An estimate of its plain forward and backward.
    """
    outputs = find_output_layers(model)
    linears = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    seconds = dict.fromkeys(linears, 0.0)
    for op, taken in zip(usage.ops, usage.op_seconds, strict=True):
        if op.layer in seconds:
            seconds[op.layer] += taken
    every = max(sum(usage.op_seconds), 1e-12)
    inner = {path: taken / every for path, taken in seconds.items() if path not in outputs}
    if sum(inner.values()) < _LEAST_SHARE:
        return None
    longest = max(inner, key=inner.__getitem__)
    layer = linears[longest]
    wide, narrow = layer.weight.shape
    rows = max(usage.flops_of(longest) // (2 * wide * narrow), 1)
    bias = layer.bias is not None
    sizes = ((narrow, wide), (wide, narrow), (narrow, wide))
    layers = nn.Sequential(*(nn.Linear(*size, bias, device="meta", dtype=layer.weight.dtype) for size in sizes))
    if not layer.weight.is_meta:
        layers = layers.to_empty(device=layer.weight.device)
    shares = sum(inner.values()), sum(taken / every for path, taken in seconds.items() if path in outputs)
    return Products(layers, layer.weight.new_empty(rows, narrow), *shares)


class Rough:
    """Rough seconds of forward and backward by arithmetic.

    Args:
        plain: Seconds of plain training.
        products: Its linear layers.
        seconds_of: Returns the seconds of forward and backward of ``products.layers`` with these settings.
    """

    def __init__(
        self, plain: float, products: Products | None, seconds_of: Callable[[TrainingSettings], float]
    ) -> None:
        self._plain, self._products, self._seconds_of = plain, products, seconds_of
        self._known: dict[TrainingSettings, float] = {}

    def seconds(self, arithmetic: TrainingSettings) -> float:
        """Return the rough seconds of forward and backward."""
        if self._products is None:
            return self._plain
        share, of_output = self._products.share, self._products.of_output
        ratio = share * self._ratio(arithmetic, _OF_LAYERS) + of_output * self._ratio(arithmetic, _OF_OUTPUT)
        return self._plain * (1 - share - of_output + ratio)

    def _ratio(self, arithmetic: TrainingSettings, names: Set[str]) -> float:
        """Return the time of layers with these fields of an arithmetic, relative to plain training."""
        fields = {name: getattr(arithmetic, name) for name in names}
        if fields.get("adapters") is not None or fields.get("base") is not None:
            fields["adapters"] = RANK  # of the three layers, which a LoraConfig need not name
        settings = TrainingSettings(**fields)
        for one in (settings, TrainingSettings()):
            if one not in self._known:
                self._known[one] = self._seconds_of(one)
        return self._known[settings] / max(self._known[TrainingSettings()], 1e-12)


def total(output: Any, batch: Any) -> Tensor:
    """The loss of the three layers."""
    result: Tensor = output.sum()
    return result
