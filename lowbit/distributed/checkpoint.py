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
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save as save_from

from lowbit.distributed.zero import SHARES, Shares
from lowbit.processes import processes

__all__ = ["load", "save"]

#: What the first process writes beside the tensors, and every process of itself.
_MORE, _OWN = "more.pt", "process-{}.pt"


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Path:
    """Save ``model`` and ``optimizer`` to the directory ``path``, in place of a checkpoint that is there.

    Every process calls it, with the same ``path`` on a disk that all see. ``more``: what else is to be resumed, by
    name: whatever has ``state_dict`` and ``load_state_dict`` (a scheduler, a ``LossScaler``), or plain values. Of these
    the first process' are saved. The state of torch's random numbers is saved for each process.

    Where a process ends in the middle, the checkpoint before is still there, and the next ``save`` removes the rest.
    Raises RuntimeError in every process where one cannot write.
    """
    target = Path(path)
    written, before = _beside(target, "new"), _beside(target, "old")

    def begin() -> None:
        _recover(target, before)
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        torch.save({name: _state(value) for name, value in more.items()}, written / _MORE)

    def end() -> None:
        if target.exists():
            target.rename(before)
        written.rename(target)
        shutil.rmtree(before, ignore_errors=True)

    _first(begin, "save")
    _everyone(lambda: torch.save(_random(), written / _OWN.format(_rank())), "save")
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

    Raises ValueError where there is no checkpoint, and where it has nothing by a name in ``more``.
    """
    target = Path(path)
    _first(lambda: _recover(target, _beside(target, "old")), "load")
    if not (target / ".metadata").exists():
        raise ValueError(f"distributed.load: {target} holds no checkpoint; give the directory that was saved to")
    kept = torch.load(target / _MORE, weights_only=True)
    missing = [name for name in more if name not in kept]
    if missing:
        raise ValueError(f"distributed.load: {target} has nothing by the names {missing}; it has {sorted(kept)}")
    saved = FileSystemReader(str(target)).read_metadata().state_dict_metadata
    stepped = any(name.startswith("optim.") for name in saved)
    states = _states(model, optimizer if stepped else None)
    load_into(states, checkpoint_id=str(target))
    set_model_state_dict(model, states["model"])
    if optimizer is not None and stepped:
        with _stepped(model, optimizer) as of:
            set_optimizer_state_dict(of, optimizer, states["optim"])
    for name, value in more.items():
        value.load_state_dict(kept.pop(name))
    own = target / _OWN.format(_rank())
    if own.exists() and not (target / _OWN.format(processes())).exists():
        _restore(torch.load(own, weights_only=True))
    return {name: value for name, value in kept.items() if not isinstance(value, dict)}


def _states(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    states: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        with _stepped(model, optimizer) as of:
            states["optim"] = get_optimizer_state_dict(of, optimizer)
    return states


@contextmanager
def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
    """What has the parameters that the optimizer steps, by their names."""
    shares: Shares | None = getattr(optimizer, SHARES, None)
    with nullcontext() if shares is None else shares.stepped(optimizer):
        yield model if shares is None else shares.model


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


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
    except (OSError, RuntimeError) as error:  # torch.save raises the latter on a full disk
        said = f"{type(error).__name__}: {error}"
    heard = [said]
    if processes() > 1:
        heard = [None] * processes()
        dist.all_gather_object(heard, said)
    failed = next((rank for rank, words in enumerate(heard) if words is not None), None)
    if failed is not None:
        raise RuntimeError(
            f"distributed.{what}: process {failed} cannot write ({heard[failed]}); free the disk, or give another path"
        )
