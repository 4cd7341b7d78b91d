"""The parameters of a group in a step, by columns: many of few elements would else wait for Python.

What stays from step to step is looked up once, in a ``Roster``; all that may be replaced, in every step.
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

__all__ = ["Roster", "Turn", "held"]

#: Whose parameters are whole; those of other classes may be spread over processes.
_WHOLE = {nn.Parameter, Tensor}


def held(params: list[Tensor]) -> list[Tensor]:
    """What this process holds of parameters."""
    return params if _WHOLE.issuperset(map(type, params)) else [local(param) for param in params]


@dataclass(frozen=True)
class Roster:
    """Parameters with their plans, which hold as long as ``facts`` of them and of their group are the same.

    ``kinds``: what those have in common that one op steps; None of those that step otherwise.
    """

    params: list[Tensor]
    facts: tuple[Any, ...]
    layouts: list[ParamLayout]
    kinds: list[Any]

    @staticmethod
    def facts_of(group: dict[str, Any], params: list[Tensor], mine: list[Tensor], rules: list[str]) -> tuple[Any, ...]:
        """What decides plans and kinds."""
        return (
            group["bits"], group["master"], group["rounding"], rules, list(map(type, params)),
            [param.dtype for param in mine], [param.is_cpu for param in mine], [param.numel() for param in mine],
            [param.is_contiguous() for param in mine],
        )  # fmt: skip

    def holds(self, params: list[Tensor], facts: tuple[Any, ...]) -> bool:
        return len(params) == len(self.params) and all(map(is_, params, self.params)) and facts == self.facts


@dataclass(frozen=True)
class Turn:
    """The parameters of a group that step now. ``mine``: what this process holds of them, and of their ``grads``."""

    group: dict[str, Any]
    params: list[Tensor]
    mine: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    layouts: list[ParamLayout]
    kinds: list[Any]

    @classmethod
    def of(cls, group: dict[str, Any], roster: Roster, grads: list[Tensor], states: list[dict[str, Any]]) -> Turn:
        """All of a roster."""
        params, mine = roster.params, held(roster.params)
        if mine is not params:
            grads = [gradient(param) for param in params]
        if group["maximize"]:
            grads = [grad.neg() for grad in grads]
        return cls(group, params, mine, grads, states, roster.layouts, roster.kinds)

    def work(self, i: int, step: int, rng: Tensor) -> Work:
        """One of them."""
        source, mine = self.params[i], self.mine[i].detach()
        return Work(self.layouts[i], source, mine, self.grads[i], self.states[i], self.group, step, rng)

    def alike(self, steps: Sequence[int]) -> dict[Any, list[int]]:
        """Those that one op steps, by their kind, their step, and whether they have masters."""
        found: dict[Any, list[int]] = {}
        mastered = ["master" in state for state in self.states]
        for i, key in enumerate(zip(self.kinds, steps, mastered, strict=True)):
            if key[0] is not None:
                found.setdefault(key, []).append(i)
        return found

    def columns(self, members: list[int]) -> list[list[Tensor]]:
        """Of some that are alike what ``OptimizerSteps`` begins with."""
        states = [self.states[i] for i in members]
        columns = [[column[i] for i in members] for column in (self.mine, self.grads)]
        moments = self.layouts[members[0]].moments
        for part in ("master", *(part for name in moments for part in (name, f"{name}_scale"))):
            kept = [state[part] for state in states] if part in states[0] else []
            columns.append(kept if self.mine is self.params else [local(tensor) for tensor in kept])
        return [*columns, *[[]] * (7 - len(columns))]

    def places(self, members: list[int]) -> list[int]:
        """The ``places`` of ``OptimizerSteps``."""
        return list(chain.from_iterable([self.layouts[i].place for i in members]))
