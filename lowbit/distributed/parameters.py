"""Replacement of an optimizer's parameters by their shards, with their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lowbit.models.replicas import is_replicating
from lowbit.optim.base import Optimizer
from lowbit.optim.plain import without_hooks

__all__ = ["begin_with", "named", "set_states", "states_of", "tree_of", "unwrapped"]


def named(model: nn.Module) -> dict[Tensor, str]:
    """The first name of each parameter, without the prefix of a wrapper."""
    return {parameter: name for name, parameter in unwrapped(model).named_parameters()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel or ShardedGradients, else the model itself."""
    inner: nn.Module = model.module if is_replicating(model) else model  # type: ignore[assignment]
    return inner


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The optimizer's states by parameter name, or None before its first step."""
    return dict(get_optimizer_state_dict(model, optimizer)) if optimizer.state else None


def set_states(model: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, Any], full: bool = False) -> None:
    """Load states by the parameter names of ``model``. Parameters without states in ``states`` lose theirs.

    With ``full``, the states are full tensors, and each process takes its part.
    """
    options = StateDictOptions(full_state_dict=full, strict=False)
    with without_hooks(optimizer):
        set_optimizer_state_dict(model, optimizer, states, options=options)
    for name, parameter in model.named_parameters():
        if name not in states["state"]:
            optimizer.state.pop(parameter, None)


def begin_with(
    optimizer: torch.optim.Optimizer, new: Mapping[Tensor, Tensor], model: nn.Module, states: dict[str, Any] | None
) -> None:
    """Load full ``states``, by the names of ``model``, into an optimizer whose groups have the parameters of ``new``.

    ``new`` has the new parameter for each old one.
    """
    optimizer.state.clear()
    if isinstance(optimizer, Optimizer):
        optimizer.replaced(new)
    if states is not None:
        set_states(model, optimizer, states, full=True)


def tree_of(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module without a forward that has these parameters, by dotted name."""
    root = nn.Module()
    for path, parameter in parameters.items():
        module = root
        *parents, name = path.split(".")
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.register_parameter(name, parameter)
    return root
