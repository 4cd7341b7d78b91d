"""What lets a run adapt: to memory that runs out in a step, and to another budget in the middle of training.

``FRUGAL`` is the table of what takes less memory, in the order in which it is tried. ``CHANGES`` is the table of what
may change of a model and an optimizer that train; all other settings are arithmetic, which stays. ``Before`` and
``Marks`` are what a step that fails is put back to.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lowbit.checkpointing.apply import checkpoint_, uncheckpoint_
from lowbit.checkpointing.policies import choose
from lowbit.models.writes import HeldBuffers
from lowbit.optim import offload_, unoffload_
from lowbit.plan.settings import Settings, policy_of
from lowbit.sizes import amount
from lowbit.train.micro_batches import micro_batches, samples
from lowbit.train.states import State

__all__ = [
    "CHANGES", "FRUGAL", "RANDOM_BYTES", "TRIES", "Before", "Frugal", "Marks", "Predicted", "alike", "change_",
    "copies_of_buffers", "difference", "fastest", "least_rows", "more_frugal", "permits", "recompute_",
]  # fmt: skip


class Predicted(Protocol):
    """What a step by ``settings`` holds and takes."""

    @property
    def settings(self) -> Settings: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


# -- what takes less memory -------------------------------------------------------------------------------------------
class Frugal(NamedTuple):
    """One way to less memory: ``next(settings, model, batch)`` is the value of ``field`` that takes less, or None. A
    plan permits it where one of its predictions is ``like`` it.
    """

    field: str
    next: Callable[[Settings, nn.Module, Any], Any]
    like: Callable[[Settings, Any], bool]


#: Policies of checkpointing, each of which keeps less than those before.
_POLICIES = (None, "attention", "save_matmuls", "sqrt", "block")


def least_rows(model: nn.Module) -> int:
    """The rows that a part has at least: in training BatchNorm refuses a single value a channel."""
    return 2 if any(isinstance(one, _BatchNorm) and one.training for one in model.modules()) else 1


def _more_parts(settings: Settings, model: nn.Module, batch: Any) -> int | None:
    try:
        rows = samples(batch)
        more = min(2 * settings.micro, max(rows // least_rows(model), 1))
        micro_batches(batch, more)
    except ValueError:  # a batch that cannot be split
        return None
    return more if more > settings.micro else None


def _more_recomputed(settings: Settings, model: nn.Module, batch: Any) -> str | None:
    known = settings.checkpoint in _POLICIES
    later = _POLICIES[_POLICIES.index(settings.checkpoint) + 1 :] if known else _POLICIES[-1:]
    return next((policy for policy in later if policy is not None and _applies(model, policy)), None)


def _applies(model: nn.Module, policy: str) -> bool:
    """Whether the model has what the policy looks for."""
    try:
        return bool(choose(model, policy))
    except ValueError:
        return False


def _activations_elsewhere(settings: Settings, model: nn.Module, batch: Any) -> bool | None:
    return None if settings.offload_activations else True


def _states_elsewhere(settings: Settings, model: nn.Module, batch: Any) -> bool | None:
    return None if settings.offload_states else True


#: The bytes of torch's random state on the CPU, which a step keeps until it is done.
RANDOM_BYTES = torch.get_rng_state().numel()

#: How many of the fastest predictions, and of those that hold least, are held against an estimate of the whole step,
#: and how often a search chooses options of blocks again within less.
TRIES = 6

#: What is tried where memory runs out, in this order.
FRUGAL = (
    Frugal("micro", _more_parts, lambda planned, value: planned.micro > 1),
    Frugal("checkpoint", _more_recomputed, lambda planned, value: planned.checkpoint == value),
    Frugal("offload_activations", _activations_elsewhere, lambda planned, value: planned.offload_activations),
    Frugal("offload_states", _states_elsewhere, lambda planned, value: planned.offload_states),
)


def more_frugal(
    settings: Settings, model: nn.Module, batch: Any, predictions: Sequence[Predicted] = ()
) -> Settings | None:
    """The next settings that take less memory and are permitted; None where none are left."""
    for row in FRUGAL:
        value = row.next(settings, model, batch)
        if value is not None and permits(predictions, row.field, value):
            return replace(settings, **{row.field: value})
    return None


def permits(predictions: Sequence[Predicted], field: str, value: Any) -> bool:
    """Whether a plan with these predictions may have the value; without predictions there is no plan that says no."""
    like = next(row.like for row in FRUGAL if row.field == field)
    return not predictions or any(like(one.settings, value) for one in predictions)


# -- what may change in the middle of training ------------------------------------------------------------------------
def recompute_(model: nn.Module, checkpoint: str | tuple[str, ...] | None) -> None:
    """Let backward of ``model`` recompute by another policy than it does, in place."""
    if checkpoint is None:
        uncheckpoint_(model)
    else:
        checkpoint_(model, policy_of(model, checkpoint))


def _checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Any, where: str) -> None:
    recompute_(model, checkpoint)


def _place_states(model: nn.Module, optimizer: torch.optim.Optimizer, away: bool, where: str) -> None:
    if away:
        offload_(optimizer, where)
    else:
        unoffload_(optimizer)


def _read_at_each_step(model: nn.Module, optimizer: torch.optim.Optimizer, value: Any, where: str) -> None:
    """A step reads the setting itself."""


#: By field of the settings, what gives a live model and optimizer another value of it.
CHANGES: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Any, str], None]] = {
    "checkpoint": _checkpoint,
    "offload_states": _place_states,
    "offload_activations": _read_at_each_step,
    "micro": _read_at_each_step,
}


def change_(model: nn.Module, optimizer: torch.optim.Optimizer, before: Settings, after: Settings, where: str) -> None:
    """Take a model and its optimizer from settings to others, in place; where that raises they are as before.

    ``where``: what states are offloaded to. Raises ValueError for settings of another arithmetic; as ``checkpoint_``
    and ``offload_``.
    """
    if not alike(before, after):
        raise ValueError(
            f"expected settings of the same arithmetic, got {difference(before, after)}; {', '.join(CHANGES)} may "
            f"change in the middle of training, for others plan anew and load a checkpoint"
        )
    done: list[str] = []
    try:
        for field in _changed(before, after):
            CHANGES[field](model, optimizer, getattr(after, field), where)
            done.append(field)
    except BaseException:
        for field in reversed(done):
            CHANGES[field](model, optimizer, getattr(before, field), where)
        raise


def _changed(before: Settings, after: Settings) -> list[str]:
    return [one.name for one in fields(Settings) if getattr(before, one.name) != getattr(after, one.name)]


def alike(one: Settings, other: Settings) -> bool:
    """Whether both have the same arithmetic."""
    return CHANGES.keys() >= set(_changed(one, other))


def difference(before: Settings, after: Settings) -> str:
    """What changes, in words."""
    return ", ".join(
        f"{name}={getattr(after, name)!r} instead of {getattr(before, name)!r}" for name in _changed(before, after)
    )


def fastest(
    predictions: Iterable[Predicted],
    settings: Settings,
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
    checked: dict[Settings, Predicted] = {}
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
class Before:
    """What forward and backward of ``model`` move, as it is now: gradients, buffers, random states, and the state of
    training in low precision. ``put_back`` may be called any number of times.

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
    def put_back(self) -> None:
        """Make all of it what it was."""
        for param, gradient in self._gradients.items():
            param.grad = None if gradient is None else gradient.clone()
        self._buffers.put_back()
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


class Marks:
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
    def put_back(self) -> None:
        """Drop states that have been made since, where nothing has moved."""
        for param in list(self._optimizer.state):
            if param not in self._states:
                del self._optimizer.state[param]
        for param, kept in self._states.items():
            self._optimizer.state[param].clear()
            self._optimizer.state[param].update(kept)
        for tensor, number in self._single:
            tensor.copy_(number)
