"""Predicted memory and time of an optimizer step, from steps over some of many alike blocks.

States, gradients, time and peak grow by the same amount with each block, so two estimates over a few blocks suffice.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from lowbit.memory.alike import runs_of
from lowbit.memory.estimator import Estimate
from lowbit.optim.offload import LEAST_BYTES
from lowbit.plan.fitting.sharing import Whole

__all__ = ["COUNTS", "Blocks", "Step", "step_of"]

#: Numbers of alike blocks in the two estimates.
COUNTS = (2, 3)


class Step(NamedTuple):
    """An optimizer step.

    Attributes:
        states: Bytes of optimizer states and master copies.
        small: Bytes of those that are too small to be offloaded.
        peak: Peak bytes.
        seconds: Time.
        whole: Bytes of the unsharded model.
        trained: Bytes of the parameters that the step changes.
    """

    states: int
    small: int
    peak: int
    seconds: float
    whole: Whole
    trained: int


def step_of(usage: Estimate, whole: Whole, trained: int) -> Step:
    """Return the optimizer step of an estimate."""
    kinds = ("optimizer state", "master copies")
    sizes = [holding.bytes for holding in usage.held_at(0) if holding.kind in kinds]
    small = sum(size for size in sizes if size < LEAST_BYTES)
    peak, seconds = usage.by_phase.get("step", 0), usage.seconds_by_phase.get("step", 0.0)
    return Step(sum(sizes), small, peak, seconds, whole, trained)


class Blocks(NamedTuple):
    """The longest run of alike blocks in a model.

    Attributes:
        path: Path of the module that contains them.
        names: Their names in it, by period.
    """

    path: str
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Blocks | None:
        """Return None if there are too few alike blocks to gain from them."""
        longest = max(runs_of(model), key=lambda run: len(run.periods), default=None)
        if longest is None or len(longest.periods) <= sum(COUNTS):
            return None
        path = next(path for path, module in model.named_modules() if module is longest.holder)
        return cls(path, longest.periods)

    def freeze_(self, model: nn.Module, kept: int) -> None:
        """Freeze the parameters of all but the first ``kept`` periods in a copy of the model, which may lack some."""
        holder = model.get_submodule(self.path)
        present = [names for names in self.names if names[0] in holder._modules]
        apart = [holder.get_submodule(name) for names in present[kept:] for name in names]
        inside = {id(module) for block in apart for module in block.modules()}
        outside = (module for module in model.modules() if id(module) not in inside)
        shared = {id(parameter) for module in outside for parameter in module.parameters(recurse=False)}
        for block in apart:
            for parameter in block.parameters():
                if id(parameter) not in shared:
                    parameter.requires_grad_(False)

    def extended(self, few: Step, more: Step) -> Step:
        """Return the step over all periods from those over ``COUNTS`` periods."""
        times = len(self.names) - COUNTS[1]

        def at_end(first: int, second: int) -> int:
            return second + times * (second - first)

        trained = at_end(few.trained, more.trained)
        return Step(
            at_end(few.states, more.states), at_end(few.small, more.small), at_end(few.peak, more.peak),
            more.seconds * trained / max(more.trained, 1), more.whole, trained,
        )  # fmt: skip
