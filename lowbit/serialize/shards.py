"""Checkpoints in safetensors files, as transformers lays them out, read tensor by tensor and written file by file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.files import is_file_name, left_behind, read_json, replaced, resumable, shown, write_json
from lowbit.serialize import safetensors

__all__ = ["INDEX", "Checkpoint", "Group", "Written", "pack", "write_index"]

#: The one file of a small model; and what names the files of others.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: What a run that is not finished has written.
_PROGRESS = "lowbit-progress.json"

#: What to do where an index and its files differ.
_COPY = "they are of two checkpoints; copy the whole directory again"

#: Names of tensors that are made together, and the bytes of all of them.
Group = tuple[tuple[str, ...], int]


class Checkpoint:
    """The tensors of a directory with ``model.safetensors``, or with an index that names several files.

    ``entries``: where each lies: of several files that hold one name, in the file that the index gives it. Raises:
    FileNotFoundError for a missing file; ValueError for a damaged one, for an index that names a file elsewhere or a
    tensor that its file does not have, and for a tensor that the index does not name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / INDEX
        where = _weight_map(index) if index.exists() else None
        files = [SINGLE] if where is None else sorted(set(where.values()))
        held = {file: self._entries(file) for file in files}
        self.files = [directory / file for file in files]
        self.entries: dict[str, safetensors.Entry] = held[SINGLE] if where is None else {}
        if where is None:
            return
        self.files.append(index)
        for name, file in where.items():
            if name not in held[file]:
                raise ValueError(f"{index} says that {shown(name)} is in {file}, which does not have it; {_COPY}")
            self.entries[name] = held[file][name]
        for file, rows in held.items():
            unnamed = sorted(rows.keys() - where.keys())
            if unnamed:
                raise ValueError(f"{index} does not name {shown(unnamed[0])}, which {file} holds; {_COPY}")

    def _entries(self, file: str) -> dict[str, safetensors.Entry]:
        path = self.directory / file
        if not path.exists():
            other = "no other format is read" if file == SINGLE else f"{INDEX} names it; copy the whole directory"
            raise FileNotFoundError(f"{path} does not exist; {other}")
        return safetensors.entries(path)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in memory of its own."""
        return safetensors.read_entry(self.entries[name])

    def digest(self) -> str:
        """Of what tells this checkpoint from another, short of reading it: names, sizes and times of its files."""
        text = "".join(f"{path.name} {(s := path.stat()).st_size} {s.st_mtime_ns}\n" for path in self.files)
        return hashlib.sha256(text.encode()).hexdigest()


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises ValueError for a damaged index, and for a file outside of its directory."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} is damaged: its weight_map is {shown(weight_map)}; copy it again")
    for file in weight_map.values():
        if not is_file_name(file):
            raise ValueError(f"{index} names a file outside of its directory: {shown(file)}")
    return weight_map


def pack(groups: Iterable[Group], most: int) -> list[list[Group]]:
    """The groups in order, in files of ``most`` bytes at most; one that is larger has a file of its own."""
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
    """The files of a checkpoint that are finished, so that a run that was stopped goes on with the next.

    ``run``: what decides every bit of the result. ``told``: what is to be remembered with them, as JSON has it.
    Raises FileExistsError for a directory that holds something else; ValueError for another run, naming the first
    difference.
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
                        f"{directory} holds a run that was stopped, and another one: its {name} is "
                        f"{shown(before.get(name) if isinstance(before, dict) else None)}, here it is {shown(value)}; "
                        f"give another directory, or remove it"
                    )
            try:
                self.files, self.told = [dict(file) for file in progress["files"]], dict(progress["told"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.path} is damaged: {type(error).__name__} {error}; remove {directory}, and start over"
                ) from None
        else:
            directory.mkdir(parents=True, exist_ok=True)
            if set(directory.iterdir()) - set(left_behind(directory, _PROGRESS)):
                raise FileExistsError(f"{directory} is not empty; remove it, or give another directory")
        self._keep()
        for path in left_behind(directory):
            path.unlink()

    def _keep(self) -> None:
        with resumable(self.directory):
            write_json(self.path, {"run": self.run, "files": self.files, "told": self.told})

    def write(self, file: str, layout: Mapping[str, Tensor], made: Iterable[tuple[str, Tensor]]) -> None:
        """Write a file of what ``made`` yields, whole or not at all. ``layout``: the dtypes and shapes of all that."""
        with resumable(self.directory), replaced(self.directory / file) as temporary:
            digest, size = safetensors.write_as_made(temporary, layout, made)
        self.files.append({"file": file, "sha256": digest, "bytes": size, "names": list(layout)})
        self._keep()

    def forget(self) -> None:
        """Remove what says that the run is not finished."""
        self.path.unlink()


def write_index(directory: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Write the index by which transformers finds the tensors in ``files``."""
    names = {name: file["file"] for file in files for name in file["names"]}
    size = sum(
        entry.end - entry.begin for file in files for entry in safetensors.entries(directory / file["file"]).values()
    )
    write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": names})
