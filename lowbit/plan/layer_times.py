"""Time of each layer of a model with each recipe, measured on this machine with the layer's own inputs.

Layers with the same class, shapes and inputs are measured once. The plain layer and its quantized copies take turns, so
that a disturbance does not count for only one of them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowbit.convert.prepack import prepack_
from lowbit.convert.quantize import quantize_
from lowbit.machine import fastest
from lowbit.models.batches import feed
from lowbit.models.names import exact
from lowbit.models.writes import held_buffers
from lowbit.recipes import Recipe

__all__ = ["layer_times"]

#: Seconds for all runs of one kind of layer after the first, and the least and the largest number of runs.
_SECONDS, _LEAST, _MOST = 0.5, 3, 30


class _Call(NamedTuple):
    """One call of a layer."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def kind(self) -> str:
        """Equal for calls that take the same time."""
        described = tree_map_only(Tensor, _description, (self.args, self.kwargs))
        weights = [_description(parameter) for parameter in self.layer.parameters()]
        return repr((self.layer, weights, described))


def _description(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


@torch.no_grad()
def layer_times(
    model: nn.Module,
    names: Iterable[str],
    recipes: Mapping[str, Recipe | None],
    batch: Any,
    progress: Callable[[str, int, int], None],
) -> dict[str, dict[str | None, float]]:
    """Return the seconds of all calls of each layer in one batch, by layer and recipe; None is the plain layer.

    Quantized layers are measured as ``quantize_`` and, on a CPU, ``prepack_`` leave them. A layer that the batch does
    not reach takes no time.
    """
    layers = {name: model.get_submodule(name) for name in names}
    calls: list[tuple[str, str]] = []
    examples: dict[str, _Call] = {}

    def record(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = _Call(layer, args, kwargs)
        calls.append((name, call.kind))
        examples.setdefault(call.kind, call)

    hooks = [layer.register_forward_pre_hook(partial(record, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with held_buffers(model):
            feed(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    measured: dict[str, dict[str | None, float]] = {}
    for number, (kind, call) in enumerate(examples.items()):
        progress("kind of layer", number, len(examples))
        measured[kind] = _measured(call, recipes)
    return {
        name: {
            key: sum(measured[kind][key] for owner, kind in calls if owner == name)
            for key in (None, *(key for key, recipe in recipes.items() if recipe is not None))
        }
        for name in layers
    }


def _measured(call: _Call, recipes: Mapping[str, Recipe | None]) -> dict[str | None, float]:
    """The seconds of one call by recipe, the fastest of several runs."""
    layers: dict[str | None, nn.Module] = {None: copy.deepcopy(call.layer).eval()}
    layers |= {name: _quantized(call.layer, recipe) for name, recipe in recipes.items() if recipe is not None}
    device = next((p.device for p in call.layer.parameters()), None)
    runs: dict[str | None, Callable[[], object]] = {
        name: partial(layer, *call.args, **call.kwargs) for name, layer in layers.items()
    }
    total = sum(fastest(run, device, 1) for run in runs.values())  # the first runs also allocate and compile
    seconds: dict[str | None, list[float]] = {name: [] for name in runs}
    for _ in range(max(_LEAST, min(_MOST, int(_SECONDS / max(total, 1e-9))))):
        for name, run in runs.items():
            seconds[name].append(fastest(run, device, 1))
    return {name: min(values) for name, values in seconds.items()}


def _quantized(layer: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy of a layer as it is deployed. Its values do not matter, so weights are rounded to nearest."""
    holder = nn.Sequential(OrderedDict(layer=copy.deepcopy(layer).eval()))
    quantize_(holder, {exact("layer"): recipe}, method="nearest", skip=())
    if all(tensor.device.type == "cpu" for tensor in (*holder.parameters(), *holder.buffers())):
        prepack_(holder)
    return holder.get_submodule("layer")
