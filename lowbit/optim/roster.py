"""Columns of a group's parameters for one step, so that many small parameters need little Python.

A ``Roster`` caches everything that stays the same from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from lowbit.optim.shards import gradient, local
from lowbit.optim.step import ParamLayout, Work

__all__ = ["Roster", "Turn", "shards_of"]

#: Tensor classes that are never sharded.
_UNSHARDED = {nn.Parameter, Tensor}


def shards_of(params: list[Tensor]) -> list[Tensor]:
    """This process' shards of parameters."""
    return params if _UNSHARDED.issuperset(map(type, params)) else [local(param) for param in params]


@dataclass(frozen=True)
class Roster:
    """Parameters and their layouts, valid as long as ``facts`` stay the same.

    Parameters with equal ``list_keys`` may step in one op; None stands for a parameter that may not.
    """

    params: list[Tensor]
    facts: tuple[Any, ...]
    layouts: list[ParamLayout]
    list_keys: list[Any]

    @staticmethod
    def facts_of(
        group: dict[str, Any], params: list[Tensor], shards: list[Tensor], rules: list[str]
    ) -> tuple[Any, ...]:
        return (
            group["bits"], group["master"], group["rounding"], rules, list(map(type, params)),
            [shard.dtype for shard in shards], [shard.is_cpu for shard in shards], [shard.numel() for shard in shards],
            [shard.is_contiguous() for shard in shards],
        )  # fmt: skip

    def is_valid(self, params: list[Tensor], facts: tuple[Any, ...]) -> bool:
        return len(params) == len(self.params) and all(map(is_, params, self.params)) and facts == self.facts


@dataclass(frozen=True)
class Turn:
    """The parameters of a group that step now; ``shards`` and ``grads`` are this process' shards."""

    group: dict[str, Any]
    params: list[Tensor]
    shards: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    layouts: list[ParamLayout]
    list_keys: list[Any]

    @classmethod
    def of(cls, group: dict[str, Any], roster: Roster, grads: list[Tensor], states: list[dict[str, Any]]) -> Turn:
        params, shards = roster.params, shards_of(roster.params)
        if shards is not params:
            grads = [gradient(param) for param in params]
        if group["maximize"]:
            grads = [grad.neg() for grad in grads]
        return cls(group, params, shards, grads, states, roster.layouts, roster.list_keys)

    def work(self, i: int, step: int, rng: Tensor) -> Work:
        source, shard = self.params[i], self.shards[i].detach()
        return Work(self.layouts[i], source, shard, self.grads[i], self.states[i], self.group, step, rng)

    def alike(self, steps: Sequence[int]) -> dict[Any, list[int]]:
        """Indices of parameters that may step in one op, by list key, step, and whether they have a master weight."""
        members: dict[Any, list[int]] = {}
        mastered = ["master" in state for state in self.states]
        for i, key in enumerate(zip(self.list_keys, steps, mastered, strict=True)):
            if key[0] is not None:
                members.setdefault(key, []).append(i)
        return members

    def columns(self, members: list[int]) -> list[list[Tensor]]:
        """The tensor lists of ``OptimizerSteps`` for parameters that are alike."""
        states = [self.states[i] for i in members]
        columns = [[column[i] for i in members] for column in (self.shards, self.grads)]
        moments = self.layouts[members[0]].moments
        for part in ("master", *(part for name in moments for part in (name, f"{name}_scale"))):
            column = [state[part] for state in states] if part in states[0] else []
            columns.append(column if self.shards is self.params else [local(tensor) for tensor in column])
        return [*columns, *[[]] * (7 - len(columns))]

    def places(self, members: list[int]) -> list[int]:
        """The ``places`` of ``OptimizerSteps``."""
        return list(chain.from_iterable([self.layouts[i].place for i in members]))
