"""Checkpoints of model and optimizer that load onto another number of processes, and another way of sharding.

Each process writes what it holds, by ``torch.distributed.checkpoint``. A checkpoint is there whole or not at all: it is
written beside its place, and renamed when every process is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save as save_from

from lowbit import user_warnings
from lowbit.dist_utils import processes
from lowbit.distributed import stored
from lowbit.distributed.parameters import set_states, unwrapped
from lowbit.distributed.zero import SHARES, Shares
from lowbit.optim.plain import without_hooks

__all__ = ["load", "remove", "save", "saved"]

#: What the names of states in a checkpoint begin with.
_STATES = "optim.state."
#: What groups of an optimizer have that belongs to the model at hand.
_OF_PARAMS = ("params", "param_names")

_T = TypeVar("_T")


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Path:
    """Save ``model`` and ``optimizer`` to the directory ``path``, in place of a checkpoint that is there.

    A directory that holds anything else stays as it is, and is refused: nothing is removed but files of ``save``.

    Every process calls it, with the same ``path`` on a disk that all see. ``more``: what else is to be resumed, by
    name: whatever has ``state_dict`` and ``load_state_dict`` (a scheduler, a ``LossScaler``), or plain values. Of these
    the first process' are saved. The state of torch's random numbers is saved for each process.

    Where a process ends in the middle, the checkpoint before is still there, and the next ``save`` removes the rest.
    An error or Ctrl-C leaves nothing behind.
    Raises ValueError for a directory that is neither new, empty nor a checkpoint; RuntimeError in every process where
    one fails, as with a full disk, another run that saves there, or a value that ``torch.load(weights_only=True)`` does
    not read.
    """
    draft = stored.Draft(Path(path).resolve())
    kept = {
        "states": {name: value.state_dict() for name, value in more.items() if hasattr(value, "state_dict")},
        "values": {name: value for name, value in more.items() if not hasattr(value, "state_dict")},
        "groups": [{k: v for k, v in group.items() if k not in _OF_PARAMS} for group in optimizer.param_groups],
    }

    def begin() -> None:
        draft.begin()
        torch.save(kept, draft.path / stored.MORE)
        torch.load(draft.path / stored.MORE, weights_only=True)  # raises now what would not load later

    try:
        _first(begin, "save")
        _everyone(lambda: torch.save(_random(), draft.path / stored.own_file(_rank())), "save")
        with _told("save"):
            save_from(_states(model, optimizer if optimizer.state else None), checkpoint_id=str(draft.path))
        digests = _everyone(lambda: draft.digests(_rank()), "save")
        _first(lambda: draft.finish({name: row for rows in digests for name, row in rows.items()}), "save")
    except BaseException:
        draft.give_up()
        raise
    return Path(path)


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> dict[str, Any]:
    """Load what ``save`` has written at ``path`` into ``model`` and ``optimizer``, in place.

    Every process calls it; there may be more or fewer than have saved, and model and optimizer may be sharded another
    way, or not at all. ``more``: objects with ``load_state_dict``, by the names that they were saved with. Where there
    are as many processes as have saved, each goes on with its random numbers. Returns the plain values that were saved.

    Every file is held to the SHA-256 that it was saved with, before anything is restored in any process. Checkpoints of
    earlier versions have none: the sizes of their files are checked. States of frozen parameters are loaded too.

    Raises ValueError where there is no checkpoint, and where it has no states by a name in ``more``;
    RuntimeError in every process where a file is missing, cut or altered, or one cannot read.
    """
    target = Path(path).resolve()
    read: list[stored.Kept] = []

    def look() -> None:
        read.append(stored.read(target, _rank(), processes()))
        missing = [name for name in more if name not in read[0].more["states"]]
        if missing:
            there = sorted(read[0].more["states"])
            raise stored.Refused(f"distributed.load: {target} has no states by the names {missing}; it has {there}")

    _first(lambda: stored.recover(target), "load")
    _everyone(look, "load")  # before anything is restored anywhere
    (kept,) = read
    stepped = any(name.startswith(_STATES) for name in kept.tensors)
    with _restored_after_errors(optimizer):
        found = _states(model, optimizer if stepped else None, loading=True)
        if "optim" in found:
            _match(found["optim"]["state"], kept.tensors, target)
        with _told("load"):
            load_into(found, checkpoint_id=str(target))
        set_model_state_dict(unwrapped(model), found["model"])
        if optimizer is not None and stepped:
            with _stepped(model, optimizer) as of:
                set_states(of, optimizer, found["optim"])
        elif optimizer is not None:
            optimizer.state.clear()
            for group, given in zip(optimizer.param_groups, kept.more["groups"], strict=True):
                group.update(given)
    for name, value in more.items():
        value.load_state_dict(kept.more["states"][name])
    if kept.random is not None:
        _restore(kept.random)
    return dict(kept.more["values"])


def saved(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint at ``path`` for this process to see, also where a ``save`` ended at its renames."""
    return stored.saved(Path(path).resolve())


def remove(path: str | os.PathLike[str]) -> None:
    """Remove the checkpoint at ``path``, if there is one, and what a ``save`` that ended has left of others.

    Raises ValueError for a directory that holds anything else.
    """
    stored.remove(Path(path).resolve())


def _states(model: nn.Module, optimizer: torch.optim.Optimizer | None, loading: bool = False) -> dict[str, Any]:
    """The states by the names of parameters. ``loading``: every parameter has some, to load into."""
    states: dict[str, Any] = {"model": get_model_state_dict(unwrapped(model))}
    if optimizer is not None:
        with _stepped(model, optimizer) as of, without_hooks(optimizer):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if loading and any(param not in optimizer.state for param in params):
                optimizer.state.clear()  # torch makes states where there are none at all
            states["optim"] = get_optimizer_state_dict(of, optimizer)
    return states


def _match(states: dict[str, Any], tensors: frozenset[str], target: Path) -> None:
    """Leave out what had no gradient yet when it was saved, and warn of states that nothing here has."""
    owners: set[str] = set()
    lost: set[str] = set()
    for key in tensors:
        if key.startswith(_STATES):
            parts = key.removeprefix(_STATES).split(".")
            names = [".".join(parts[:end]) for end in range(1, len(parts))]
            owner = next((name for name in names if name in states), None)
            (lost if owner is None else owners).add(owner or names[-1])
    for name in states.keys() - owners:
        del states[name]
    if lost:
        user_warnings.warn(
            f"distributed.load: {target} has states of {len(lost)} parameters that the optimizer does not have "
            f"({', '.join(sorted(lost)[:3])}); they are left out. To load them, make the optimizer of those parameters "
            f"too, frozen ones as well"
        )


@contextmanager
def _restored_after_errors(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """An error inside leaves the optimizer with the states that it had."""
    before = {} if optimizer is None else dict(optimizer.state)
    try:
        yield
    except BaseException:
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(before)
        raise


@contextmanager
def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
    """What has the parameters that the optimizer steps, by their names."""
    shares: Shares | None = getattr(optimizer, SHARES, None)
    with nullcontext() if shares is None else shares.stepped(optimizer):
        yield unwrapped(model) if shares is None else shares.model


def _random() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# -- processes --------------------------------------------------------------------------------------------------------
def _rank() -> int:
    return dist.get_rank() if processes() > 1 else 0


def _first(work: Callable[[], object], what: str) -> None:
    """What the first process does while the others wait."""
    _everyone(work if _rank() == 0 else lambda: None, what)


def _everyone(work: Callable[[], _T], what: str) -> list[_T]:
    """What each process does and finds; all raise what one of them raises, so that none waits for it.

    Raises ``stored.Refused`` as it is, RuntimeError for anything else; in a process that was interrupted, that.
    """
    found: _T | None = None
    said: str | None = None
    refused, interrupt = False, None
    try:
        found = work()
    except stored.Refused as error:
        said, refused = str(error), True
    except Exception as error:  # whatever it is, the others wait for it
        said = f"{type(error).__name__}: {error}"
    except BaseException as error:  # a Ctrl-C, which stays one
        said, interrupt = type(error).__name__, error
    heard: list[Any] = [(found, said, refused)]
    if processes() > 1:
        heard = [None] * processes()
        dist.all_gather_object(heard, (found, said, refused))
    if interrupt is not None:
        raise interrupt
    for rank, (_, words, is_refusal) in enumerate(heard):
        if words is not None:
            raise (
                stored.Refused(words)
                if is_refusal
                else RuntimeError(f"distributed.{what}: process {rank} failed: {words}")
            )
    return [one for one, _, _ in heard]


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What torch raises in every process where one failed is no Exception, and hides that it was interrupted."""
    try:
        yield
    except CheckpointException as error:
        own = error.failures.get(_rank())
        if own is not None and not isinstance(own[0], Exception):
            raise own[0] from None
        rank, (first, _) = min(error.failures.items(), key=lambda one: one[0])
        raise RuntimeError(f"distributed.{what}: process {rank} failed: {type(first).__name__}: {first}") from error
