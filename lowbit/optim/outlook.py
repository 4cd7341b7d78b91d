"""Shapes and dtypes of the states that an optimizer will create in a parameter's first step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.memory.fake import fake_tensors, numbers_are_one
from lowbit.optim.base import Optimizer
from lowbit.optim.plain import plain_step
from lowbit.optim.watch import Watch

__all__ = ["states_to_come"]


def states_to_come(optimizer: torch.optim.Optimizer, group: dict[str, Any], index: int) -> dict[str, Tensor] | None:
    """The tensors of a parameter's state after its first step, on the meta device, by name.

    A copy of the optimizer steps a fake parameter, so the optimizer does not change.

    Returns:
        The tensors, or None if the step needs data.
    """
    param = group["params"][index]
    with torch.inference_mode(False), torch.no_grad(), fake_tensors(), numbers_are_one():
        fake = nn.Parameter(torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device))
        fake.grad = torch.empty_like(fake)
        twin = _twin(optimizer, group, index, fake)
        try:
            plain_step(twin)
        except Exception:  # any optimizer's code
            return None
        state = twin.state[fake]
    return {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], index: int, fake: nn.Parameter
) -> torch.optim.Optimizer:
    """An optimizer with the same settings for one parameter that has not stepped."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for replaced in ("step", "zero_grad"):
        vars(twin).pop(replaced, None)
    twin_group = {**group, "params": [fake]}
    if "param_names" in twin_group:
        twin_group["param_names"] = [group["param_names"][index]]
    twin.param_groups, twin.state = [twin_group], defaultdict(dict)
    if isinstance(twin, Optimizer):
        twin._indices, twin._layouts, twin._rosters = {fake: 0}, {}, {}
        twin._watch = Watch(type(optimizer).__name__)
        twin.stepped = None
    return twin
