"""Interface of low-bit optimizers for loading and saving: the rule of each parameter and the format of its states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.ops.optim import RULES
from lowbit.optim.states import Storage, find

__all__ = ["StatefulOptimizer"]


class StatefulOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with the methods that loading and saving need."""

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        """Name of the parameter's update rule: a key of ``RULES``, or a rule of the optimizer's class."""
        raise NotImplementedError

    def check(self, group: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for invalid settings or parameters of a group."""
        raise NotImplementedError

    def settle(self) -> None:
        """Record the settings with which existing states are stored."""
        raise NotImplementedError

    def storages(self, group: dict[str, Any], param: Tensor) -> dict[str, Storage]:
        """Format of each state of a parameter, by the state's name."""
        row, shape = find(group["bits"]), tuple(param.shape) or (1,)
        return {m: Storage.of(row, shape, not m.endswith("_root")) for m in RULES[self.rule(group, param)].moments}

    def replicated(self, group: dict[str, Any], param: Tensor) -> dict[str, tuple[int, ...]]:
        """Shapes of the fp32 states that are replicated on all processes, by name."""
        return {}

    def counters(self, group: dict[str, Any], param: Tensor) -> dict[str, float]:
        """Numbers in host memory that decide what a step does, by name, with their values before the first step."""
        return {}

    def from_torch(self, param: Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """``states`` of the torch optimizer, with the ``replicated`` ones converted to this optimizer's."""
        return states

    def to_torch(self, param: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """The ``replicated`` states, converted to states of the torch optimizer."""
        return states

    def group_of(self, param: Tensor) -> dict[str, Any]:
        """The group of a parameter."""
        return next(group for group in self.param_groups if any(param is other for other in group["params"]))

    def stored_states(self) -> Iterator[tuple[str, Tensor, dict[str, Storage]]]:
        """Name, parameter and formats of states, for each parameter that has stepped."""
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if param in self.state:
                    yield self.name_of(group, index), param, self.storages(group, param)

    def name_of(self, group: dict[str, Any], index: int) -> str:
        """The parameter's name if the optimizer has names, else its position and shape."""
        names = group.get("param_names")
        if names:
            return str(names[index])
        number = next(i for i, other in enumerate(self.param_groups) if other is group)
        return f"parameter {index} of group {number} {list(group['params'][index].shape)}"
