"""What lets a run adapt: to memory that runs out in a step, and to another budget in the middle of training.

The rows of ``TECHNIQUES`` say what takes less memory, in which order it is tried, and what may change of a model and an
optimizer that train; all other settings are arithmetic, which stays. ``StepSnapshot`` and ``OptimizerVersions`` are
what a step that fails is put back to.
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
    """What a step by ``settings`` holds and takes."""

    @property
    def settings(self) -> TrainingSettings: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


#: The bytes of torch's random state on the CPU, which a step keeps until it is done.
RANDOM_BYTES = torch.get_rng_state().numel()

#: How many of the fastest predictions, and of those that hold least, are held against an estimate of the whole step,
#: and how often a search chooses options of blocks again within less.
TRIES = 6


# -- what takes less memory -------------------------------------------------------------------------------------------
def fallback(
    settings: TrainingSettings, subject: Subject, predictions: Sequence[Predicted] = ()
) -> TrainingSettings | None:
    """The next settings that take less memory and are permitted; None where none are left."""
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
    """Whether it takes less memory than what the settings have of its dimension. Only the last of a dimension surely
    takes less than what is no fallback.
    """
    now = technique_of(dimension, settings)
    if now is TECHNIQUES[dimension][0]:
        return True
    order = [one for other, one in FALLBACKS if other == dimension]
    return technique in order[order.index(now) + 1 :] if now in order else technique is order[-1]


def permits(predictions: Sequence[Predicted], technique: Technique) -> bool:
    """Whether a plan with these predictions may have it; without predictions there is no plan that says no."""
    return not predictions or any(technique.is_on(one.settings) for one in predictions)


# -- what may change in the middle of training ------------------------------------------------------------------------
def change_(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: TrainingSettings, after: TrainingSettings, where: str
) -> None:
    """Take a model and its optimizer from settings to others, in place; where that raises they are as before.

    ``where``: what states are offloaded to. Raises ValueError for settings of another arithmetic; as ``checkpoint_``
    and ``offload_``.
    """
    if not alike(before, after):
        raise ValueError(
            f"expected settings of the same arithmetic, got {difference(before, after)}; {', '.join(LIVE)} may "
            f"change in the middle of training, for others plan anew and load a checkpoint"
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
    """Whether both have the same arithmetic."""
    return LIVE.keys() >= set(_changed(one, other))


def difference(before: TrainingSettings, after: TrainingSettings) -> str:
    """What changes, in words."""
    return ", ".join(
        f"{name}={getattr(after, name)!r} instead of {getattr(before, name)!r}" for name in _changed(before, after)
    )


def fastest(
    predictions: Iterable[Predicted],
    settings: TrainingSettings,
    limit: int,
    whole: Callable[[Predicted], Predicted] = lambda one: one,
) -> Predicted:
    """The fastest of the predictions with the arithmetic of ``settings`` that ``whole`` finds to hold at most ``limit``
    bytes.

    Raises ValueError where none does, with the least that one does.
    """
    same = [one for one in predictions if alike(one.settings, settings)]
    if not same:
        raise ValueError(
            "run.refit: expected a run of a plan, whose predictions say what fits, got one without predictions; make "
            "the run by lb.fit(...).apply_(model)"
        )
    fit = sorted((one for one in same if one.peak_bytes <= limit), key=lambda one: (one.seconds, one.peak_bytes))
    smallest = sorted(same, key=lambda one: one.peak_bytes)
    tried = [*fit[:TRIES], *smallest[:TRIES]]
    checked: dict[TrainingSettings, Predicted] = {}
    for one in tried:
        if one.settings not in checked:
            checked[one.settings] = found = whole(one)
            if found.peak_bytes <= limit:
                return found
    least = min(checked.values(), key=lambda one: one.peak_bytes)
    raise ValueError(
        f"run.refit: no choice of this arithmetic fits a step into {amount(limit)}; the least is "
        f"{amount(least.peak_bytes)}, with {difference(settings, least.settings) or 'the settings as they are'}. "
        f"The run goes on as it was; ask for as much, or plan with fewer bits and load a checkpoint"
    )


# -- what a step that fails is put back to ----------------------------------------------------------------------------
class StepSnapshot:
    """What forward and backward of ``model`` move, as it is now: gradients, buffers, random states, and the state of
    training in low precision. ``restore`` may be called any number of times.

    Random states are those of torch on the CPU and on the devices of the parameters, of generators that modules have,
    of Python's ``random`` and of numpy. What a module keeps in Python values of its own is not known here.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._gradients = {p: None if p.grad is None else p.grad.clone() for p in model.parameters()}
        self._buffers = HeldBuffers(model)
        self._states = [
            (one, one.micro_batch.clone(), one.pending.clone()) for one in model.modules() if isinstance(one, State)
        ]
        self._random = list(_random_states(model))

    @torch.no_grad()
    def restore(self) -> None:
        """Make all of it what it was."""
        for param, gradient in self._gradients.items():
            param.grad = None if gradient is None else gradient.clone()
        self._buffers.restore()
        for training, micro_batch, pending in self._states:
            training.pending = pending
            training.set_micro_batch(int(micro_batch))
        for give, value in self._random:
            give(value)


def copies_of_buffers(model: nn.Module) -> dict[Tensor, Tensor]:
    """A copy of each buffer, which a step holds until it is done."""
    return {buffer: buffer.clone() for buffer in model.buffers()}


def _random_states(model: nn.Module) -> Iterator[tuple[Callable[[Any], object], Any]]:
    """Each random state with what gives it back."""
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
    """The states of ``optimizer`` before a step, without copies of their numbers.

    Torch counts what is written to a tensor. ``moved`` asks that of parameters and states; numbers of one element, such
    as counts of steps, are kept and put back.
    """

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states = {param: dict(kept) for param, kept in optimizer.state.items()}
        held = [one for kept in self._states.values() for one in kept.values() if isinstance(one, Tensor)]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._versions = [(one, one._version) for one in (*params, *(one for one in held if one.numel() > 1))]
        self._single = [(one, one.clone()) for one in held if one.numel() == 1]

    def moved(self) -> int:
        """How many parameters and states have been written to since."""
        return sum(tensor._version != version for tensor, version in self._versions)

    @torch.no_grad()
    def restore(self) -> None:
        """Drop states that have been made since, where nothing has moved."""
        for param in list(self._optimizer.state):
            if param not in self._states:
                del self._optimizer.state[param]
        for param, kept in self._states.items():
            self._optimizer.state[param].clear()
            self._optimizer.state[param].update(kept)
        for tensor, number in self._single:
            tensor.copy_(number)
