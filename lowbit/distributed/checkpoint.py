"""Checkpoints of model and optimizer that load onto another number of processes, and another way of sharding.

Each process writes what it holds, by ``torch.distributed.checkpoint``. A checkpoint is there whole or not at all: it is
written beside its place, and renamed when every process is done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save as save_from

from lowbit.distributed.parameters import set_states, unwrapped
from lowbit.distributed.zero import SHARES, Shares
from lowbit.optim.plain import without_hooks
from lowbit.processes import processes

__all__ = ["load", "remove", "save", "saved"]

#: What the first process writes beside the tensors, and every process of itself.
_MORE, _OWN = "more.pt", "process-{}.pt"
#: What groups of an optimizer have that belongs to the model at hand.
_OF_PARAMS = ("params", "param_names")


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Path:
    """Save ``model`` and ``optimizer`` to the directory ``path``, in place of a checkpoint that is there.

    Every process calls it, with the same ``path`` on a disk that all see. ``more``: what else is to be resumed, by
    name: whatever has ``state_dict`` and ``load_state_dict`` (a scheduler, a ``LossScaler``), or plain values. Of these
    the first process' are saved. The state of torch's random numbers is saved for each process.

    Where a process ends in the middle, the checkpoint before is still there, and the next ``save`` removes the rest.
    Raises RuntimeError in every process where one fails, as with a full disk or a value that
    ``torch.load(weights_only=True)`` does not read.
    """
    target = Path(path)
    written, before = _beside(target, "new"), _beside(target, "old")

    kept = {
        "states": {name: value.state_dict() for name, value in more.items() if hasattr(value, "state_dict")},
        "values": {name: value for name, value in more.items() if not hasattr(value, "state_dict")},
        "groups": [{k: v for k, v in group.items() if k not in _OF_PARAMS} for group in optimizer.param_groups],
    }

    def begin() -> None:
        _recover(target, before)
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        torch.save(kept, written / _MORE)
        torch.load(written / _MORE, weights_only=True)  # raises now what would not load later

    def end() -> None:
        shutil.rmtree(before, ignore_errors=True)
        if target.exists():
            target.rename(before)
        written.rename(target)
        shutil.rmtree(before, ignore_errors=True)

    _first(begin, "save")
    _everyone(lambda: torch.save(_random(), written / _OWN.format(_rank())), "save")
    with _told("save"):
        save_from(_states(model, optimizer if optimizer.state else None), checkpoint_id=str(written))
    _first(end, "save")
    return target


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> dict[str, Any]:
    """Load what ``save`` has written at ``path`` into ``model`` and ``optimizer``, in place.

    Every process calls it; there may be more or fewer than have saved, and model and optimizer may be sharded another
    way, or not at all. ``more``: objects with ``load_state_dict``, by the names that they were saved with. Where there
    are as many processes as have saved, each goes on with its random numbers. Returns the plain values that were saved.

    Raises ValueError where there is no checkpoint, and where it has no states by a name in ``more``;
    RuntimeError in every process where one cannot read.
    """
    target = Path(path)
    _first(lambda: _recover(target, _beside(target, "old")), "load")
    if not (target / ".metadata").exists():
        raise ValueError(f"distributed.load: {target} holds no checkpoint; give the directory that was saved to")
    kept = torch.load(target / _MORE, weights_only=True)
    states, values = kept["states"], kept["values"]
    missing = [name for name in more if name not in states]
    if missing:
        raise ValueError(f"distributed.load: {target} has no states by the names {missing}; it has {sorted(states)}")
    saved = FileSystemReader(str(target)).read_metadata().state_dict_metadata
    stepped = any(name.startswith("optim.") for name in saved)
    found = _states(model, optimizer if stepped else None)
    for name in list(found["optim"]["state"]) if "optim" in found else ():
        if not any(key.startswith(f"optim.state.{name}.") for key in saved):  # it had no gradient yet
            del found["optim"]["state"][name]
    with _told("load"):
        load_into(found, checkpoint_id=str(target))
    set_model_state_dict(unwrapped(model), found["model"])
    if optimizer is not None and stepped:
        with _stepped(model, optimizer) as of:
            set_states(of, optimizer, found["optim"])
    elif optimizer is not None:
        optimizer.state.clear()
        for group, given in zip(optimizer.param_groups, kept["groups"], strict=True):
            group.update(given)
    for name, value in more.items():
        value.load_state_dict(states[name])
    own = target / _OWN.format(_rank())
    if own.exists() and not (target / _OWN.format(processes())).exists():
        _restore(torch.load(own, weights_only=True))
    return dict(values)


def saved(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint at ``path`` for this process to see, also where a ``save`` ended at its renames."""
    return Path(path).exists() or _beside(Path(path), "old").exists()


def remove(path: str | os.PathLike[str]) -> None:
    """Remove the checkpoint at ``path``, if there is one, and what a ``save`` that ended has left of others."""
    for directory in (Path(path), _beside(Path(path), "new"), _beside(Path(path), "old")):
        shutil.rmtree(directory, ignore_errors=True)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    states: dict[str, Any] = {"model": get_model_state_dict(unwrapped(model))}
    if optimizer is not None:
        with _stepped(model, optimizer) as of, without_hooks(optimizer):
            states["optim"] = get_optimizer_state_dict(of, optimizer)
    return states


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


# -- files ------------------------------------------------------------------------------------------------------------
def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _recover(target: Path, before: Path) -> None:
    """A process that ended between two renames has left the checkpoint by its other name."""
    if before.exists() and not target.exists():
        before.rename(target)


def _rank() -> int:
    return dist.get_rank() if processes() > 1 else 0


def _first(work: Callable[[], object], what: str) -> None:
    """What the first process does while the others wait."""
    _everyone(work if _rank() == 0 else lambda: None, what)


def _everyone(work: Callable[[], object], what: str) -> None:
    """What each process does; all raise what one of them raises, so that none waits for it."""
    said: str | None = None
    try:
        work()
    except Exception as error:  # whatever it is, the others wait for it
        said = f"{type(error).__name__}: {error}"
    heard = [said]
    if processes() > 1:
        heard = [None] * processes()
        dist.all_gather_object(heard, said)
    failed = next((rank for rank, words in enumerate(heard) if words is not None), None)
    if failed is not None:
        raise RuntimeError(f"distributed.{what}: process {failed} failed: {heard[failed]}")


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What torch raises in every process where one failed is no Exception."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items(), key=lambda one: one[0])
        raise RuntimeError(f"distributed.{what}: process {rank} failed: {type(first).__name__}: {first}") from error
