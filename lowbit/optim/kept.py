"""What an optimizer keeps of its parameters: the rule of each, and the storage of its states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.ops.optim import RULES
from lowbit.optim.states import Storage, find

__all__ = ["Keeping"]


class Keeping(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that says how it keeps states: all that loading and saving need to know."""

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        """The name of the rule that a parameter steps by."""
        raise NotImplementedError

    def check(self, group: dict[str, Any]) -> None:
        """Raises TypeError and ValueError for a group's settings and parameters."""
        raise NotImplementedError

    def settle(self) -> None:
        """Holds groups to the settings that their states are kept by."""
        raise NotImplementedError

    def kept_as(self, group: dict[str, Any], param: Tensor) -> dict[str, Storage]:
        """What each state of a parameter is kept as, by the state's name."""
        row, shape = find(group["bits"]), tuple(param.shape) or (1,)
        return {m: Storage.of(row, shape, not m.endswith("_root")) for m in RULES[self.rule(group, param)].moments}

    def replicated(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of states in fp32 that each process holds whole, by name."""
        return {}

    def from_torch(self, param: Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """The states that ``replicated`` names, from those of torch's optimizer; others as they are."""
        return states

    def to_torch(self, param: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """The states that ``replicated`` names, as torch's optimizer keeps them."""
        return states

    def kept(self) -> Iterator[tuple[str, Tensor, dict[str, Storage]]]:
        """Each parameter that has stepped: its name, itself, and what its states are kept as."""
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if param in self.state:
                    yield self.name_of(group, place), param, self.kept_as(group, param)

    def name_of(self, group: dict[str, Any], place: int) -> str:
        """A parameter for messages: by its name where the optimizer was given names."""
        names = group.get("param_names")
        if names:
            return str(names[place])
        index = next(i for i, other in enumerate(self.param_groups) if other is group)
        return f"parameter {place} of group {index} {list(group['params'][place].shape)}"
