"""Sharded Hugging Face checkpoints in safetensors, read tensor by tensor and written file by file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.files import is_file_name, left_behind, read_json, replaced, resumable, shown, write_json
from lowbit.serialize import safetensors

__all__ = ["INDEX", "SINGLE", "Checkpoint", "Group", "Written", "pack", "write_index"]

#: The file of an unsharded model, and the index of a sharded one.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: The record of an unfinished run.
_PROGRESS = "lowbit-progress.json"

#: The remedy if an index and its files differ.
_COPY = "they are of two checkpoints; copy the whole directory again"

#: Names of tensors that are computed together, and their bytes in total.
Group = tuple[tuple[str, ...], int]


class Checkpoint:
    """The tensors of a directory with ``model.safetensors``, or with an index that names several files.

    Attributes:
        entries: Location of each tensor. If several files have a name, the index decides.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, the index names a file outside of the directory, or index and files have
            different tensors.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / INDEX
        weight_map = _weight_map(index) if index.exists() else None
        files = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        entries = {file: self._entries(file) for file in files}
        self.files = [directory / file for file in files]
        self.entries: dict[str, safetensors.Entry] = entries[SINGLE] if weight_map is None else {}
        if weight_map is None:
            return
        self.files.append(index)
        for name, file in weight_map.items():
            if name not in entries[file]:
                raise ValueError(f"{index} says that {shown(name)} is in {file}, which does not have it; {_COPY}")
            self.entries[name] = entries[file][name]
        for file, rows in entries.items():
            unnamed = sorted(rows.keys() - weight_map.keys())
            if unnamed:
                raise ValueError(f"{index} does not name {shown(unnamed[0])}, which {file} holds; {_COPY}")

    def _entries(self, file: str) -> dict[str, safetensors.Entry]:
        path = self.directory / file
        if not path.exists():
            remedy = "no other format is read" if file == SINGLE else f"{INDEX} names it; copy the whole directory"
            raise FileNotFoundError(f"{path} does not exist; {remedy}")
        return safetensors.entries(path)

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU."""
        return safetensors.read_entry(self.entries[name])

    def digest(self) -> str:
        """A hash of the names, sizes and modification times of the files."""
        text = "".join(f"{path.name} {(s := path.stat()).st_size} {s.st_mtime_ns}\n" for path in self.files)
        return hashlib.sha256(text.encode()).hexdigest()


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises ValueError if the index is damaged or names a file outside of its directory."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} is damaged: its weight_map is {shown(weight_map)}; copy it again")
    for file in weight_map.values():
        if not is_file_name(file):
            raise ValueError(f"{index} names a file outside of its directory: {shown(file)}")
    return weight_map


def pack(groups: Iterable[Group], most: int) -> list[list[Group]]:
    """Distribute the groups, in order, to files of at most ``most`` bytes; a larger group gets a separate file."""
    files: list[list[Group]] = []
    room = 0
    for group in groups:
        if not files or group[1] > room:
            files.append([])
            room = most
        files[-1].append(group)
        room -= group[1]
    return files


class Written:
    """The finished files of a checkpoint that is being written; an interrupted run continues with the next file.

    Args:
        directory: The output directory.
        run: All settings that determine the result, as JSON values.

    Attributes:
        told: More JSON values to save with the progress.

    Raises:
        FileExistsError: The directory has other files.
        ValueError: The directory has another run; the message names the first difference.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any]) -> None:
        self.directory, self.path, self.run = directory, directory / _PROGRESS, dict(run)
        self.files: list[dict[str, Any]] = []
        self.told: dict[str, Any] = {}
        if self.path.exists():
            progress = read_json(self.path)
            before = progress.get("run")
            for name, value in self.run.items():
                if not isinstance(before, dict) or before.get(name) != value:
                    raise ValueError(
                        f"{directory} has an interrupted run with {name} "
                        f"{shown(before.get(name) if isinstance(before, dict) else None)}, but this run has "
                        f"{shown(value)}; use another directory, or remove it"
                    )
            try:
                self.files, self.told = [dict(file) for file in progress["files"]], dict(progress["told"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.path} is damaged: {type(error).__name__} {error}; remove {directory} and start over"
                ) from None
        else:
            directory.mkdir(parents=True, exist_ok=True)
            if set(directory.iterdir()) - set(left_behind(directory, _PROGRESS)):
                raise FileExistsError(f"{directory} is not empty; remove it, or use another directory")
        self._save_progress()
        for path in left_behind(directory):
            path.unlink()

    def _save_progress(self) -> None:
        with resumable(self.directory):
            write_json(self.path, {"run": self.run, "files": self.files, "told": self.told})

    def write(self, file: str, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write one file atomically, tensor by tensor; ``layout`` has their dtypes and shapes."""
        with resumable(self.directory), replaced(self.directory / file) as temporary:
            digest, size = safetensors.write_streamed(temporary, layout, tensors)
        self.files.append({"file": file, "sha256": digest, "bytes": size, "names": list(layout)})
        self._save_progress()

    def forget(self) -> None:
        """Remove the record of progress, because the run is finished."""
        self.path.unlink()


def write_index(directory: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Write the index of a sharded checkpoint."""
    names = {name: file["file"] for file in files for name in file["names"]}
    size = sum(
        entry.end - entry.begin for file in files for entry in safetensors.entries(directory / file["file"]).values()
    )
    write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": names})
