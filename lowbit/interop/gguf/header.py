"""Parses the header of a GGUF file: metadata, and the place of each tensor.

The file is untrusted: each length is compared with the bytes that are left before anything is read or allocated.
Source: ggml/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.files import check_regular, shown
from lowbit.interop.files import require_library

__all__ = ["Header", "Stored", "detect"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

#: The struct formats of metadata types by their number; 8 is a string and 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

#: Nested arrays are not deeper, and tensors have no more axes.
_MOST_DEPTH, _MOST_AXES = 4, 4

#: Largest value of ``general.alignment``.
_MOST_ALIGNMENT = 1 << 20


class Stored(NamedTuple):
    """A tensor in the file."""

    name: str
    type: str
    """Its name in ``gguf.GGMLQuantizationType``."""
    shape: tuple[int, ...]
    start: int
    """The offset of its first byte in the file."""
    row_bytes: int
    """Bytes of a row."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


def detect(path: str | Path) -> bool:
    """Whether ``path`` is a GGUF file, by its first bytes."""
    try:
        with Path(path).open("rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


class Header:
    """Metadata and tensors of a file.

    Attributes:
        path: The file.
        values: All metadata by key.
        tensors: The tensors by name.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not a GGUF file, or damaged.
        ImportError: The package gguf is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if check_regular(path) < 24 or not detect(path):
            raise ValueError(f"{path} is not a GGUF file: it does not begin with {_MAGIC!r}")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            try:
                self.values, rows = _parse(cursor)
                self.tensors = _placed(rows, cursor.at, self.values, len(data))
            except (ValueError, struct.error, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is damaged: {error}; copy or download it again") from None

    def read(self, name: str) -> Tensor:
        """The bytes of a tensor, uint8 ``[..., row_bytes]``, in memory of their own."""
        row = self.tensors[name]
        raw = bytearray(row.nbytes)
        with self.path.open("rb") as file:
            file.seek(row.start)
            if file.readinto(raw) != len(raw):
                raise ValueError(f"{self.path} has become shorter; copy or download it again")
        return torch.frombuffer(raw, dtype=torch.uint8).view(*row.shape[:-1], row.row_bytes)


class _Cursor:
    """A position in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, len(_MAGIC)

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, and its header needs {size} more after {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MOST_DEPTH:
            raise ValueError(f"a value has type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _NUMBERS:
            size = struct.calcsize(f"<{_NUMBERS[inner]}")
            raw = self.take(count * size)
            return list(struct.unpack(f"<{count}{_NUMBERS[inner]}", raw))
        if count > (len(self.data) - self.at) // 8:  # strings and arrays begin with their length
            raise ValueError(f"an array has {count} elements")
        return [self.value(inner, depth + 1) for _ in range(count)]


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
    """Metadata, and name, shape, type and offset of each tensor."""
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"it has version {version}, expected one of {', '.join(map(str, _VERSIONS))}")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        if key in values:
            raise ValueError(f"{shown(key)} occurs twice")
        values[key] = cursor.value(cursor.number("I"))
    rows = []
    for _ in range(tensors):
        name, axes = cursor.string(), cursor.number("I")
        if not 1 <= axes <= _MOST_AXES:
            raise ValueError(f"{shown(name)} has {axes} axes")
        shape = tuple(cursor.number("Q") for _ in range(axes))
        if not all(shape):
            raise ValueError(f"{shown(name)} has shape {list(shape[::-1])}")
        rows.append((name, shape[::-1], cursor.number("I"), cursor.number("Q")))
    return values, rows


def _placed(
    rows: list[tuple[str, tuple[int, ...], int, int]], end: int, values: dict[str, Any], size: int
) -> dict[str, Stored]:
    """The tensors, checked against the size of the file."""
    gguf = require_library("gguf")
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT:
        raise ValueError(f"its alignment is {shown(alignment)}")
    start = -(-end // alignment) * alignment
    tensors: dict[str, Stored] = {}
    for name, shape, number, offset in rows:
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{shown(name)} has type {number}, which is unknown") from None
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block or name in tensors:
            raise ValueError(f"{shown(name)} occurs twice, or has {shape[-1]} columns in blocks of {block}")
        row = Stored(name, kind.name, shape, start + offset, shape[-1] // block * nbytes)
        if row.start + row.nbytes > size:
            raise ValueError(f"{shown(name)} ends at byte {row.start + row.nbytes}, and the file has {size}")
        tensors[name] = row
    for one, other in pairwise(sorted(tensors.values(), key=lambda row: row.start)):
        if one.start + one.nbytes > other.start:
            raise ValueError(f"{shown(one.name)} and {shown(other.name)} share bytes of the file")
    return tensors
