"""Adaptation of a run: fallbacks when memory runs out, changes for another budget, and the state before a step.

The rows of ``TECHNIQUES`` define the fallbacks, their order, and the settings that may change during training. All
other settings are arithmetic, which never changes in a run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowbit.models.writes import HeldBuffers
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import FALLBACKS, LIVE, TECHNIQUES, Technique, technique_of
from lowbit.sizes import amount
from lowbit.train.states import State

__all__ = [
    "RANDOM_BYTES",
    "TRIES",
    "OptimizerVersions",
    "Predicted",
    "StepSnapshot",
    "alike",
    "change_",
    "copies_of_buffers",
    "difference",
    "fallback",
    "fastest",
    "permits",
]  # fmt: skip


class Predicted(Protocol):
    """The predicted memory and time of a step."""

    @property
    def settings(self) -> TrainingSettings: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


#: Bytes of torch's CPU random state, which a step keeps until it is done.
RANDOM_BYTES = torch.get_rng_state().numel()

#: Number of the fastest, and of the smallest, predictions that are checked by an estimate of the whole step. Also the
#: number of attempts of a search to choose per-block checkpoints within less memory.
TRIES = 6


# -- fallbacks --------------------------------------------------------------------------------------------------------
def fallback(
    settings: TrainingSettings, subject: Subject, predictions: Sequence[Predicted] = ()
) -> TrainingSettings | None:
    """The settings with the next permitted fallback; None if none is left."""
    for dimension, technique in FALLBACKS:
        if technique.more is not None:
            changes = technique.more(settings, subject)
        elif _takes_less(technique, dimension, settings) and technique.why_not(subject) is None:
            changes = technique.changes
        else:
            continue
        if changes and permits(predictions, technique):
            return replace(settings, **changes)
    return None


def _takes_less(technique: Technique, dimension: str, settings: TrainingSettings) -> bool:
    """Whether a fallback surely takes less memory than the current technique of its dimension."""
    current = technique_of(dimension, settings)
    if current is TECHNIQUES[dimension][0]:
        return True
    order = [fallback for name, fallback in FALLBACKS if name == dimension]
    return technique in order[order.index(current) + 1 :] if current in order else technique is order[-1]


def permits(predictions: Sequence[Predicted], technique: Technique) -> bool:
    """Whether a plan with these predictions allows a technique. A run without predictions allows all."""
    return not predictions or any(technique.is_on(one.settings) for one in predictions)


# -- changes during training ------------------------------------------------------------------------------------------
def change_(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: TrainingSettings, after: TrainingSettings, where: str
) -> None:
    """Change a model and its optimizer to other settings, in place, or raise with both unchanged.

    Raises:
        ValueError: For settings with another arithmetic, and as ``checkpoint_`` and ``offload_``.
    """
    if not alike(before, after):
        raise ValueError(
            f"expected settings of the same arithmetic, got {difference(before, after)}; {', '.join(LIVE)} may "
            f"change in the middle of training, for others make a new plan and load a checkpoint"
        )
    done: list[str] = []
    try:
        for field in _changed(before, after):
            LIVE[field](model, optimizer, getattr(after, field), where)
            done.append(field)
    except BaseException:
        for field in reversed(done):
            LIVE[field](model, optimizer, getattr(before, field), where)
        raise


def _changed(before: TrainingSettings, after: TrainingSettings) -> list[str]:
    return [one.name for one in fields(TrainingSettings) if getattr(before, one.name) != getattr(after, one.name)]


def alike(one: TrainingSettings, other: TrainingSettings) -> bool:
    """Whether both settings have the same arithmetic."""
    return LIVE.keys() >= set(_changed(one, other))


def difference(before: TrainingSettings, after: TrainingSettings) -> str:
    """The changed settings, in words."""
    return ", ".join(
        f"{name}={getattr(after, name)!r} instead of {getattr(before, name)!r}" for name in _changed(before, after)
    )


def fastest(
    predictions: Iterable[Predicted],
    settings: TrainingSettings,
    limit: int,
    whole: Callable[[Predicted], Predicted] = lambda one: one,
) -> Predicted:
    """The fastest prediction with the arithmetic of ``settings`` whose estimate by ``whole`` is within ``limit`` bytes.

    Raises:
        ValueError: If none fits, with the smallest limit that would.
    """
    same = [one for one in predictions if alike(one.settings, settings)]
    if not same:
        raise ValueError(
            "run.refit: expected a run of a plan, whose predictions say what fits, got one without predictions; make "
            "the run by lb.fit(...).apply_(model)"
        )
    fitting = sorted((one for one in same if one.peak_bytes <= limit), key=lambda one: (one.seconds, one.peak_bytes))
    smallest = sorted(same, key=lambda one: one.peak_bytes)
    checked: dict[TrainingSettings, Predicted] = {}
    for candidate in [*fitting[:TRIES], *smallest[:TRIES]]:
        if candidate.settings not in checked:
            checked[candidate.settings] = estimate = whole(candidate)
            if estimate.peak_bytes <= limit:
                return estimate
    least = min(checked.values(), key=lambda one: one.peak_bytes)
    raise ValueError(
        f"run.refit: no choice of this arithmetic fits a step into {amount(limit)}; the least is "
        f"{amount(least.peak_bytes)}, with {difference(settings, least.settings) or 'the settings as they are'}. "
        f"The run continues unchanged; ask for as much, or plan with fewer bits and load a checkpoint"
    )


# -- the state before a step ------------------------------------------------------------------------------------------
class StepSnapshot:
    """A copy of the state that forward and backward change. ``restore`` may be called any number of times.

    It holds gradients, buffers, the state of low-precision training, and random states: torch's on the CPU and on the
    devices of the parameters, generators that are attributes of modules, Python's ``random``, and numpy's. Other
    Python attributes of modules are not restored.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._gradients = {p: None if p.grad is None else p.grad.clone() for p in model.parameters()}
        self._buffers = HeldBuffers(model)
        self._states = [
            (module, module.micro_batch.clone(), module.pending.clone())
            for module in model.modules()
            if isinstance(module, State)
        ]
        self._random = list(_random_states(model))

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back."""
        for param, gradient in self._gradients.items():
            param.grad = None if gradient is None else gradient.clone()
        self._buffers.restore()
        for training, micro_batch, pending in self._states:
            training.pending = pending
            training.set_micro_batch(int(micro_batch))
        for set_state, state in self._random:
            set_state(state)


def copies_of_buffers(model: nn.Module) -> dict[Tensor, Tensor]:
    """A copy of each buffer. A step keeps them until it is done."""
    return {buffer: buffer.clone() for buffer in model.buffers()}


def _random_states(model: nn.Module) -> Iterator[tuple[Callable[[Any], object], Any]]:
    """Pairs of a function that sets a random state, and the state."""
    yield torch.set_rng_state, torch.get_rng_state()
    yield random.setstate, random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.random.set_state, numpy.random.get_state()
    for device in {param.device for param in model.parameters() if param.is_cuda}:
        yield partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                yield value.set_state, value.get_state()


class OptimizerVersions:
    """Version counters of an optimizer's parameters and states before a step.

    ``moved`` compares torch's version counters, so that no tensor is copied, except for states with one element, such
    as step counts. ``restore`` writes those back.
    """

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states = {param: dict(state) for param, state in optimizer.state.items()}
        values = [value for state in self._states.values() for value in state.values() if isinstance(value, Tensor)]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._versions = [
            (tensor, tensor._version) for tensor in (*params, *(one for one in values if one.numel() > 1))
        ]
        self._single = [(value, value.clone()) for value in values if value.numel() == 1]

    def moved(self) -> int:
        """The number of parameters and states that were written since."""
        return sum(tensor._version != version for tensor, version in self._versions)

    @torch.no_grad()
    def restore(self) -> None:
        """Drop states that were created since, if nothing has moved."""
        for param in list(self._optimizer.state):
            if param not in self._states:
                del self._optimizer.state[param]
        for param, state in self._states.items():
            self._optimizer.state[param].clear()
            self._optimizer.state[param].update(state)
        for tensor, number in self._single:
            tensor.copy_(number)
