"""The files of a checkpoint: which directory is one, how one takes another's place, whether every byte is as saved.

A directory is known by its ``checkpoint.json`` and by the names of all its files. No other directory is ever removed.
Checkpoints of earlier versions have no ``checkpoint.json``, and so no digests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lowbit.files import (
    DirectoryLock,
    check_regular,
    left_behind,
    read_json,
    sha256,
    shown,
    sync_directory,
    write_json,
)

__all__ = ["MORE", "Draft", "Kept", "Refused", "own_file", "read", "recover", "remove", "saved"]

#: What says that a directory is a checkpoint, and the size and SHA-256 of each of its files.
_LISTING, _FORMAT = "checkpoint.json", "lowbit-checkpoint"
#: What the first process writes beside the tensors, what every process writes of itself, what torch says of tensors.
MORE, _TENSORS = "more.pt", ".metadata"
#: The names of all files that a checkpoint may hold, finished or not.
_NAMES = re.compile(
    r"more\.pt|process-\d+\.pt|\.metadata(\.tmp)?|__\d+_\d+\.distcp|checkpoint\.json|\.checkpoint\.json\.[0-9a-f]{16}\.tmp"
)

_T = TypeVar("_T")


class Refused(ValueError):
    """What a caller has to change; the same words in every process."""


class Draft:
    """A checkpoint that is being written beside ``target``, whose place it takes when it is finished."""

    def __init__(self, target: Path) -> None:
        self.target, self.path, self._before = target, _beside(target, "new"), _beside(target, "old")
        self._lock: DirectoryLock | None = None

    def begin(self) -> None:
        """Make the empty directory. Raises Refused where a file would be lost, or another process is saving."""
        for directory in (self.target, self.path, self._before):
            _refuse_strangers(directory, "save")
        recover(self.target)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(self.path, "distributed.save")
        _empty(self.path)
        write_json(self.path / _LISTING, {"format": _FORMAT, "version": 1, "files": None})

    def digests(self, rank: int) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of the files that this process has written."""
        named = re.compile(rf"__{rank}_\d+\.distcp|process-{rank}\.pt" + (r"|more\.pt|\.metadata" if rank == 0 else ""))
        mine = [path for path in sorted(self.path.iterdir()) if named.fullmatch(path.name)]
        return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in mine}

    def finish(self, files: Mapping[str, Any]) -> None:
        """Put it in the place of the one before. ``files``: the digests of all processes."""
        write_json(self.path / _LISTING, {"format": _FORMAT, "version": 1, "files": dict(files)})
        remove_one(self._before)
        if self.target.exists():
            self.target.rename(self._before)
        self.path.rename(self.target)
        sync_directory(self.target.parent)
        remove_one(self._before)
        self._release()

    def give_up(self) -> None:
        """Remove what was written. The checkpoint before is in its place."""
        if self._lock is not None:
            recover(self.target)
            remove_one(self.path)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


# -- directories -------------------------------------------------------------------------------------------------------
def saved(target: Path) -> bool:
    """Whether there is a checkpoint at ``target`` for this process to see, also between the renames of a ``save``."""
    return target.exists() or _beside(target, "old").exists()


def recover(target: Path) -> None:
    """A process that ended between two renames has left the checkpoint by its other name."""
    before = _beside(target, "old")
    if not target.exists() and before.exists():
        _refuse_strangers(before, "load")
        before.rename(target)


def remove(target: Path) -> None:
    """Remove the checkpoint at ``target``, and what a ``save`` has left. Raises Refused for anything else."""
    directories = (target, _beside(target, "new"), _beside(target, "old"))
    for directory in directories:
        _refuse_strangers(directory, "remove")
    for directory in directories:
        remove_one(directory)


def remove_one(directory: Path) -> None:
    """Remove a directory that was found to be a checkpoint, or is one by now."""
    if directory.exists():
        _refuse_strangers(directory, "remove")
        _empty(directory)
        directory.rmdir()


def _empty(directory: Path) -> None:
    """The listing goes last: a process that is killed meanwhile leaves what is known to be a checkpoint."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name == _LISTING):
        path.unlink()


def _refuse_strangers(directory: Path, who: str) -> None:
    """Raises Refused where ``directory`` is there and is neither empty nor a checkpoint."""
    if not os.path.lexists(directory):
        return
    if directory.is_symlink() or not directory.is_dir():
        raise Refused(f"distributed.{who}: {directory} is no directory; move it away, or give another path")
    found = {path.name: path.is_dir() for path in directory.iterdir()}
    strange = sorted(name for name, folder in found.items() if folder or not _NAMES.fullmatch(name))
    if not strange and not _is_marked(directory, found.keys()):
        strange = sorted(found)
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise Refused(
            f"distributed.{who}: expected {directory} to be new, empty or a checkpoint of lowbit, and it holds "
            f"{', '.join(strange[:3])}{more}; move them away, or give another path"
        )


def _is_marked(directory: Path, names: Set[str]) -> bool:
    """Whether a directory in which all names are those of checkpoints is one by what it holds."""
    if {MORE, _TENSORS} <= names or not names - {path.name for path in left_behind(directory, _LISTING)}:
        return True
    with suppress(ValueError, FileNotFoundError):
        return read_json(directory / _LISTING).get("format") == _FORMAT
    return False


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


# -- what was saved ----------------------------------------------------------------------------------------------------
class Kept(NamedTuple):
    """What a checkpoint holds beside its tensors. ``tensors``: their names. ``random``: this process' random state,
    None where more or fewer processes have saved.
    """

    more: dict[str, Any]
    tensors: frozenset[str]
    random: dict[str, Any] | None


def own_file(rank: int) -> str:
    """The name of the file that a process writes of itself."""
    return f"process-{rank}.pt"


def read(target: Path, rank: int, count: int) -> Kept:
    """What process ``rank`` of ``count`` takes from a checkpoint, after it has checked its share of the files.

    Raises:
        Refused: There is no checkpoint.
        ValueError: A file is missing, cut or altered; names it.
    """
    if not (target / _LISTING).exists() and not (target / _TENSORS).exists():
        raise Refused(f"distributed.load: {target} holds no checkpoint; give the directory that was saved to")
    files = _listed(target)
    for name in sorted(files)[rank::count]:
        _check(target / name, files[name])
    metadata = _readable(target / _TENSORS, lambda path: FileSystemReader(str(path.parent)).read_metadata())
    if not (target / _LISTING).exists():
        _check_sizes(target, metadata)
    more = _readable(target / MORE, _load)
    own, saved_by = target / own_file(rank), sum(1 for _ in target.glob("process-*.pt"))
    random = _readable(own, _load) if saved_by == count else None
    return Kept(more, frozenset(metadata.state_dict_metadata), random)


def _listed(target: Path) -> dict[str, Any]:
    """Size and SHA-256 by file; none of a checkpoint that has no listing."""
    path = target / _LISTING
    if not path.exists():
        return {}
    found = read_json(path)
    files = found.get("files")
    if found.get("format") != _FORMAT or not isinstance(files, dict) or not all(map(_NAMES.fullmatch, files)):
        raise ValueError(f"{path} is damaged: its files are {shown(files)}; copy the checkpoint again, or load another")
    return files


def _check(path: Path, row: Any) -> None:
    if not path.exists():
        raise ValueError(f"{path} is missing; copy the checkpoint again, or load another")
    size = check_regular(path)
    if not isinstance(row, dict) or row.keys() != {"bytes", "sha256"}:
        raise ValueError(f"{path.parent / _LISTING} is damaged: of {path.name} it says {shown(row)}; copy it again")
    if size != row["bytes"]:
        raise ValueError(
            f"{path} is damaged: expected {row['bytes']} bytes, got {size}; copy the checkpoint again, or load another"
        )
    if sha256(path) != row["sha256"]:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is not the one that was saved; copy the checkpoint again, or load another"
        )


def _check_sizes(target: Path, metadata: Any) -> None:
    """All that can be said of the tensors' files where no digests were saved."""
    ends: dict[str, int] = {}
    for piece in (metadata.storage_data or {}).values():
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in ends.items():
        path = target / name
        size = check_regular(path) if path.exists() else 0
        if size < end:
            raise ValueError(
                f"{path} is damaged: expected {end} bytes, got {size}; copy the checkpoint again, or load another"
            )


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def _readable(path: Path, read: Callable[[Path], _T]) -> _T:
    """What ``read`` makes of a file. Raises ValueError, with its name, for whatever it raises."""
    try:
        return read(path)
    except Exception as error:  # torch and pickle raise nearly anything for a file that is cut
        words = "is missing" if not path.exists() else f"is damaged ({type(error).__name__}: {shown(str(error))})"
        raise ValueError(f"{path} {words}; copy the checkpoint again, or load another") from error
