"""Files of a checkpoint: recognizing, replacing, removing and verifying checkpoint directories.

A checkpoint directory is recognized by its ``checkpoint.json`` and the names of all its files. No other directory is
ever removed. Checkpoints of earlier versions have no ``checkpoint.json``, and so no digests.
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

__all__ = ["MORE", "Contents", "Draft", "Refused", "random_file", "read", "recover", "remove", "saved"]

#: The file with the size and SHA-256 of all files, and its format name.
_LISTING, _FORMAT = "checkpoint.json", "lowbit-checkpoint"
#: The file of the first process with everything except tensors, and torch's metadata of tensors.
MORE, _TENSORS = "more.pt", ".metadata"
#: The names of all files of a checkpoint, complete or not.
_NAMES = re.compile(
    r"more\.pt|process-\d+\.pt|\.metadata(\.tmp)?|__\d+_\d+\.distcp|checkpoint\.json|\.checkpoint\.json\.[0-9a-f]{16}\.tmp"
)

_T = TypeVar("_T")


class Refused(ValueError):
    """An error that the caller can correct, with the same message in every process."""


class Draft:
    """A checkpoint that is being written next to ``target`` and replaces it when it is complete."""

    def __init__(self, target: Path) -> None:
        self.target, self.path, self._before = target, _sibling(target, "new"), _sibling(target, "old")
        self._lock: DirectoryLock | None = None

    def begin(self) -> None:
        """Create the empty directory and lock it.

        Raises:
            Refused: A directory has files that are not of a checkpoint.
            BlockingIOError: Another run is saving there.
        """
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
        paths = [path for path in sorted(self.path.iterdir()) if named.fullmatch(path.name)]
        return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}

    def finish(self, files: Mapping[str, Any]) -> None:
        """Replace the previous checkpoint. ``files`` has the digests of all processes."""
        write_json(self.path / _LISTING, {"format": _FORMAT, "version": 1, "files": dict(files)})
        _remove_directory(self._before)
        if self.target.exists():
            self.target.rename(self._before)
        self.path.rename(self.target)
        sync_directory(self.target.parent)
        _remove_directory(self._before)
        self._release()

    def discard(self) -> None:
        """Remove the draft and keep the previous checkpoint."""
        if self._lock is not None:
            recover(self.target)
            _remove_directory(self.path)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


# -- directories -------------------------------------------------------------------------------------------------------
def saved(target: Path) -> bool:
    """Whether this process sees a checkpoint at ``target``, also between the renames of a ``save``."""
    return target.exists() or _sibling(target, "old").exists()


def recover(target: Path) -> None:
    """Restore the name of a checkpoint if a process was killed between the two renames of ``finish``."""
    before = _sibling(target, "old")
    if not target.exists() and before.exists():
        _refuse_strangers(before, "load")
        before.rename(target)


def remove(target: Path) -> None:
    """Remove the checkpoint at ``target``, and incomplete files of a ``save``.

    Raises:
        Refused: There are other files.
    """
    directories = (target, _sibling(target, "new"), _sibling(target, "old"))
    for directory in directories:
        _refuse_strangers(directory, "remove")
    for directory in directories:
        _remove_directory(directory)


def _remove_directory(directory: Path) -> None:
    """Remove a checkpoint directory, if it exists."""
    if directory.exists():
        _refuse_strangers(directory, "remove")
        _empty(directory)
        directory.rmdir()


def _empty(directory: Path) -> None:
    """Remove the files, the listing last, so that the directory is recognized if the process is killed meanwhile."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name == _LISTING):
        path.unlink()


def _refuse_strangers(directory: Path, who: str) -> None:
    """Raise Refused if ``directory`` exists and is neither empty nor a checkpoint."""
    if not os.path.lexists(directory):
        return
    if directory.is_symlink() or not directory.is_dir():
        raise Refused(f"distributed.{who}: {directory} is not a directory; move it away, or pass another path")
    entries = {path.name: path.is_dir() for path in directory.iterdir()}
    strange = sorted(name for name, folder in entries.items() if folder or not _NAMES.fullmatch(name))
    if not strange and not _is_marked(directory, entries.keys()):
        strange = sorted(entries)
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise Refused(
            f"distributed.{who}: expected {directory} to be new, empty or a lowbit checkpoint, but it has "
            f"{', '.join(strange[:3])}{more}; move them away, or pass another path"
        )


def _is_marked(directory: Path, names: Set[str]) -> bool:
    """Whether a directory that has only names of checkpoint files has the files that mark a checkpoint."""
    if {MORE, _TENSORS} <= names or not names - {path.name for path in left_behind(directory, _LISTING)}:
        return True
    with suppress(ValueError, FileNotFoundError):
        return read_json(directory / _LISTING).get("format") == _FORMAT
    return False


def _sibling(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


# -- reading -----------------------------------------------------------------------------------------------------------
class Contents(NamedTuple):
    """The contents of a checkpoint, without its tensors.

    Attributes:
        more: Everything that the first process saved except tensors.
        tensors: Names of the tensors.
        random: This process' random number states; None if another number of processes saved.
    """

    more: dict[str, Any]
    tensors: frozenset[str]
    random: dict[str, Any] | None


def random_file(rank: int) -> str:
    """The name of the file with the random number states of a process."""
    return f"process-{rank}.pt"


def read(target: Path, rank: int, count: int) -> Contents:
    """Read a checkpoint in process ``rank`` of ``count``, after verifying this process' share of the files.

    Raises:
        Refused: There is no checkpoint.
        ValueError: A file is missing, truncated or altered; the message names it.
    """
    if not (target / _LISTING).exists() and not (target / _TENSORS).exists():
        raise Refused(f"distributed.load: {target} holds no checkpoint; pass the directory that was saved to")
    files = _listed(target)
    for name in sorted(files)[rank::count]:
        _check(target / name, files[name])
    metadata = _readable(target / _TENSORS, lambda path: FileSystemReader(str(path.parent)).read_metadata())
    if not (target / _LISTING).exists():
        _check_sizes(target, metadata)
    more = _readable(target / MORE, _load)
    saved_by = sum(1 for _ in target.glob("process-*.pt"))
    random = _readable(target / random_file(rank), _load) if saved_by == count else None
    return Contents(more, frozenset(metadata.state_dict_metadata), random)


def _listed(target: Path) -> dict[str, Any]:
    """Size and SHA-256 by file; empty if the checkpoint has no listing."""
    path = target / _LISTING
    if not path.exists():
        return {}
    listing = read_json(path)
    files = listing.get("files")
    if listing.get("format") != _FORMAT or not isinstance(files, dict) or not all(map(_NAMES.fullmatch, files)):
        raise ValueError(f"{path} is damaged: its files are {shown(files)}; copy the checkpoint again, or load another")
    return files


def _check(path: Path, row: Any) -> None:
    if not path.exists():
        raise ValueError(f"{path} is missing; copy the checkpoint again, or load another")
    size = check_regular(path)
    if not isinstance(row, dict) or row.keys() != {"bytes", "sha256"}:
        raise ValueError(
            f"{path.parent / _LISTING} is damaged: its entry of {path.name} is {shown(row)}; copy it again"
        )
    if size != row["bytes"]:
        raise ValueError(
            f"{path} is damaged: expected {row['bytes']} bytes, got {size}; copy the checkpoint again, or load another"
        )
    if sha256(path) != row["sha256"]:
        raise ValueError(
            f"{path} is damaged: its SHA-256 differs from the saved one; copy the checkpoint again, or load another"
        )


def _check_sizes(target: Path, metadata: Any) -> None:
    """Check that the tensors' files are long enough, if no digests were saved."""
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
    """The result of ``read``. Any error becomes a ValueError with the file's name."""
    try:
        return read(path)
    except Exception as error:  # torch and pickle raise nearly any exception for a truncated file
        fault = "is missing" if not path.exists() else f"is damaged ({type(error).__name__}: {shown(str(error))})"
        raise ValueError(f"{path} {fault}; copy the checkpoint again, or load another") from error
