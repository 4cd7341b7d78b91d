"""Example calls, and the programs that ``torch.export`` traces from them."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.models.batches import arguments

__all__ = ["Inputs", "input_shapes", "inputs_of", "traced"]


class Inputs(NamedTuple):
    """An example call.

    Attributes:
        args, kwargs: Its arguments.
        values: All of them by name.
        axes: The axes of each that may have any length.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: dict[str, Any]
    axes: dict[str, Any]


def inputs_of(model: nn.Module, batch: Any) -> Inputs:
    """The example call for a batch. A batch of one row is doubled, because torch takes a size of one as fixed."""
    args, kwargs = arguments(model, batch)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if tensors and all(value.dim() > 1 and value.shape[0] == 1 for value in tensors):
        args = tuple(_doubled(value) for value in args)
        kwargs = {name: _doubled(value) for name, value in kwargs.items()}
    names = list(inspect.signature(model.forward).parameters)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return Inputs(args, kwargs, values, {name: _free_axes(value) for name, value in values.items()})


def _doubled(value: Any) -> Any:
    return torch.cat([value, value]) if isinstance(value, Tensor) else value


def _free_axes(value: Any) -> Any:
    """The axes that may have any length: the first one, and the second one of token ids, masks and 3-D tensors."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    axes = [0, 1] if (value.dim() == 2 and not value.is_floating_point()) or value.dim() == 3 else [0]
    return dict.fromkeys(axes, torch.export.Dim.AUTO)


def traced(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """The program of ``torch.export`` for a model."""
    return torch.export.export(model, inputs.args, inputs.kwargs, dynamic_shapes=inputs.axes)


def input_shapes(program: torch.export.ExportedProgram) -> list[list[int]]:
    """The shape of each input of a program, with -1 for axes of any length."""
    names = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    return [
        [size if isinstance(size, int) else -1 for size in value.shape] for value in values if isinstance(value, Tensor)
    ]
