"""Checkpoints of model and optimizer that load with any number of processes and any sharding strategy.

Each process writes its shards by ``torch.distributed.checkpoint``. Saving is atomic: all files are written to another
directory, which is renamed when every process is done.
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

#: Prefix of the names of optimizer states in a checkpoint.
_STATES = "optim.state."
#: Entries of parameter groups that are not saved, because they belong to the model.
_OF_PARAMS = ("params", "param_names")

_T = TypeVar("_T")


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Path:
    """Save ``model`` and ``optimizer`` to the directory ``path``, and replace a checkpoint that is there.

    All processes must call it. The states of torch's random number generators are saved for each process.

    If a process is killed while saving, the previous checkpoint is still there, and the next ``save`` removes the
    incomplete files. After an error or Ctrl-C, no incomplete files are left. Only files of ``save`` are ever removed.

    Args:
        path: A directory on a disk that all processes see, the same for all: new, empty, or a checkpoint.
        model: The model that ``shard_`` returned, or one that is not sharded.
        optimizer: Its optimizer.
        more: Objects with ``state_dict`` and ``load_state_dict`` (a scheduler, a ``LossScaler``), or plain values. The
            first process' are saved.

    Returns:
        ``path``.

    Raises:
        ValueError: The directory is neither new, empty nor a checkpoint.
        RuntimeError: Saving failed in one of the processes; all of them raise. Causes are a full disk, another run
            that saves there, or a value that ``torch.load(weights_only=True)`` does not read.
    """
    draft = stored.Draft(Path(path).resolve())
    extras = {
        "states": {name: value.state_dict() for name, value in more.items() if hasattr(value, "state_dict")},
        "values": {name: value for name, value in more.items() if not hasattr(value, "state_dict")},
        "groups": [{k: v for k, v in group.items() if k not in _OF_PARAMS} for group in optimizer.param_groups],
    }

    def begin() -> None:
        draft.begin()
        torch.save(extras, draft.path / stored.MORE)
        torch.load(draft.path / stored.MORE, weights_only=True)  # raises now if it would not load later

    try:
        _first(begin, "save")
        _everyone(lambda: torch.save(_random(), draft.path / stored.random_file(_rank())), "save")
        with _plain_errors("save"):
            save_from(_states(model, optimizer if optimizer.state else None), checkpoint_id=str(draft.path))
        digests = _everyone(lambda: draft.digests(_rank()), "save")
        _first(lambda: draft.finish({name: row for rows in digests for name, row in rows.items()}), "save")
    except BaseException:
        draft.discard()
        raise
    return Path(path)


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> dict[str, Any]:
    """Load a checkpoint of ``save`` into ``model`` and ``optimizer``, in place.

    All processes must call it. Their number and the sharding strategy may differ from those that saved. With the same
    number of processes, each restores its random number generators. States of frozen parameters are loaded too.

    Every file is compared with its saved SHA-256 before anything is restored in any process. Checkpoints of earlier
    versions have no digests; only the sizes of their files are checked.

    Args:
        path: The directory that was passed to ``save``.
        model: The model to load into.
        optimizer: Its optimizer; None loads the model only.
        more: Objects with ``load_state_dict``, by the names that they were saved with.

    Returns:
        The plain values that were saved, by name.

    Raises:
        ValueError: There is no checkpoint, or it has no states with a name in ``more``.
        RuntimeError: In one of the processes, a file is missing, truncated or altered, or reading failed. All raise.
    """
    target = Path(path).resolve()
    contents: list[stored.Contents] = []

    def read() -> None:
        contents.append(stored.read(target, _rank(), processes()))
        missing = [name for name in more if name not in contents[0].more["states"]]
        if missing:
            names = sorted(contents[0].more["states"])
            raise stored.Refused(f"distributed.load: {target} has no states by the names {missing}; it has {names}")

    _first(lambda: stored.recover(target), "load")
    _everyone(read, "load")  # before anything is restored in any process
    (content,) = contents
    stepped = any(name.startswith(_STATES) for name in content.tensors)
    with _restored_after_errors(optimizer):
        states = _states(model, optimizer if stepped else None, loading=True)
        if "optim" in states:
            _match(states["optim"]["state"], content.tensors, target)
        with _plain_errors("load"):
            load_into(states, checkpoint_id=str(target))
        set_model_state_dict(unwrapped(model), states["model"])
        if optimizer is not None and stepped:
            with _stepped(model, optimizer) as of:
                set_states(of, optimizer, states["optim"])
        elif optimizer is not None:
            optimizer.state.clear()
            for group, saved_group in zip(optimizer.param_groups, content.more["groups"], strict=True):
                group.update(saved_group)
    for name, value in more.items():
        value.load_state_dict(content.more["states"][name])
    if content.random is not None:
        _restore(content.random)
    return dict(content.more["values"])


def saved(path: str | os.PathLike[str]) -> bool:
    """Whether this process sees a checkpoint at ``path``, even if a ``save`` was killed between its renames."""
    return stored.saved(Path(path).resolve())


def remove(path: str | os.PathLike[str]) -> None:
    """Remove the checkpoint at ``path``, if there is one, and incomplete files of a ``save`` that was killed.

    Raises:
        ValueError: The directory has other files.
    """
    stored.remove(Path(path).resolve())


def _states(model: nn.Module, optimizer: torch.optim.Optimizer | None, loading: bool = False) -> dict[str, Any]:
    """The states by the names of parameters. With ``loading``, every parameter has states to load into."""
    states: dict[str, Any] = {"model": get_model_state_dict(unwrapped(model))}
    if optimizer is not None:
        with _stepped(model, optimizer) as of, without_hooks(optimizer):
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if loading and any(param not in optimizer.state for param in params):
                optimizer.state.clear()  # torch creates states only if there are none at all
            states["optim"] = get_optimizer_state_dict(of, optimizer)
    return states


def _match(states: dict[str, Any], tensors: frozenset[str], target: Path) -> None:
    """Drop parameters that were saved without states, and warn of saved states that no parameter here has."""
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
            f"({', '.join(sorted(lost)[:3])}); they are ignored. To load them, create the optimizer with these "
            f"parameters too, also if they are frozen"
        )


@contextmanager
def _restored_after_errors(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """An error inside restores the optimizer's states."""
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
    """The module with the names of the parameters that the optimizer steps."""
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


def _first(work: Callable[[], object], caller: str) -> None:
    """Run ``work`` in the first process while the others wait."""
    _everyone(work if _rank() == 0 else lambda: None, caller)


def _everyone(work: Callable[[], _T], caller: str) -> list[_T]:
    """Run ``work`` in every process and return all results. If it raises in one process, all processes raise.

    Raises:
        stored.Refused: If ``work`` raised it.
        RuntimeError: If ``work`` raised any other Exception. A process that was interrupted raises the interrupt.
    """
    result: _T | None = None
    message: str | None = None
    refused, interrupt = False, None
    try:
        result = work()
    except stored.Refused as error:
        message, refused = str(error), True
    except Exception as error:  # any error, because the other processes wait for this one
        message = f"{type(error).__name__}: {error}"
    except BaseException as error:  # Ctrl-C, raised below
        message, interrupt = type(error).__name__, error
    outcomes: list[Any] = [(result, message, refused)]
    if processes() > 1:
        outcomes = [None] * processes()
        dist.all_gather_object(outcomes, (result, message, refused))
    if interrupt is not None:
        raise interrupt
    for rank, (_, message, refused) in enumerate(outcomes):
        if message is not None:
            raise (
                stored.Refused(message)
                if refused
                else RuntimeError(f"distributed.{caller}: process {rank} failed: {message}")
            )
    return [result for result, _, _ in outcomes]


@contextmanager
def _plain_errors(caller: str) -> Iterator[None]:
    """Raise RuntimeError instead of torch's CheckpointException, which is no Exception and hides an interrupt."""
    try:
        yield
    except CheckpointException as error:
        failure = error.failures.get(_rank())
        if failure is not None and not isinstance(failure[0], Exception):
            raise failure[0] from None
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        raise RuntimeError(f"distributed.{caller}: process {rank} failed: {type(first).__name__}: {first}") from error
