"""Training text as tokens in files: a dataset that reads what is asked for, and holds nothing of the files."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["TokenFiles", "tokens"]

#: What a raw file may hold, little-endian.
_RAW = ("uint16", "uint32")
#: Tokens at the beginning of a raw file by which uint32 is known from uint16.
_PROBE = 4096
#: How files of other kinds begin.
_HEADS = {b"\x93NUMPY": "a .npy file without its suffix", b"PK\x03\x04": "an archive of torch.save or numpy.savez"}
#: Bytes of floats, and the upper 16 bits of magnitudes from 2^-27 to 2^27.
_FLOATS = ((4, 0x3200, 0x4D00), (8, 0x3E40, 0x41A0))
#: Numbers from which a file is said to hold floats.
_FEWEST = 16


def tokens(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    length: int,
    dtype: str | torch.dtype | None = None,
    stride: int | None = None,
    vocabulary: int | None = None,
) -> TokenFiles:
    """A Dataset of ``(inputs, targets)``, both int64 ``[length]``, targets one token further.

    ``path``: a file or several, ``.npy`` of one dimension of integers, or raw tokens of ``dtype`` without a head:
    uint16 (the default) or uint32, little-endian. ``stride``: tokens from the beginning of an item to that of the next
    (default ``length``, so that each target comes once). No item goes across files; tokens after the last whole item of
    a file are left out. ``vocabulary``: tokens are below it, which each item is checked for.

    An item maps its own part of a file and lets go of it, so resident memory does not grow with what has been read.
    The dataset is its paths and sizes: workers of a DataLoader get it by pickling. Order and shares are those of
    torch's samplers (``shuffle=True``, DistributedSampler).

    Raises ValueError for files that are truncated, hold part of a token or another dtype, or are too short; at an item
    for a file that has become shorter and for a token beyond ``vocabulary``. A missing file is FileNotFoundError.
    """
    step = length if stride is None else stride
    for name, value in (("length", length), ("stride", step)):
        if value < 1:
            raise ValueError(f"memory.tokens: {name} is at least 1, got {value}")
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise ValueError("memory.tokens: expected at least one file, got none")
    wanted = None if dtype is None else str(dtype).removeprefix("torch.")
    return TokenFiles(tuple(_file(Path(p), wanted) for p in paths), length, step, vocabulary)


@dataclass(frozen=True)
class _File:
    """A file of ``count`` numbers of ``dtype`` that begin at byte ``offset``."""

    path: str
    dtype: str
    offset: int
    count: int

    def read(self, start: int, count: int) -> Tensor:
        """Tokens as int64, of a map that is gone afterwards. A map longer than the file is refused by mmap."""
        place = self.offset + start * np.dtype(self.dtype).itemsize
        try:
            part = np.memmap(self.path, self.dtype, "r", place, (count,))
        except ValueError as error:
            raise ValueError(
                f"memory.tokens: expected {self.count} tokens in {self.path}, but it has become shorter; open it again"
            ) from error
        return torch.from_numpy(part.astype(np.int64))


class TokenFiles(Dataset[tuple[Tensor, Tensor]]):
    """The items of some files, which ``lb.memory.tokens`` opens."""

    def __init__(self, files: tuple[_File, ...], length: int, stride: int, vocabulary: int | None) -> None:
        self.files, self.length, self.stride, self.vocabulary = files, length, stride, vocabulary
        items = [max(0, (file.count - 1 - length) // stride + 1) for file in files]
        #: Items in each file and those before it, together.
        self.ends = list(accumulate(items))
        if not self.ends[-1]:
            longest = max(files, key=lambda file: file.count)
            raise ValueError(
                f"memory.tokens: an item of length {length} takes {length + 1} tokens, the longest file {longest.path} "
                f"has {longest.count}; give a shorter length"
            )

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"memory.tokens: there are {len(self)} items, got index {index}")
        number = bisect_right(self.ends, at)
        file, first = self.files[number], (self.ends[number - 1] if number else 0)
        start = (at - first) * self.stride
        found = file.read(start, self.length + 1)
        if self.vocabulary is not None and not 0 <= int(found.min()) <= int(found.max()) < self.vocabulary:
            raise ValueError(
                f"memory.tokens: expected tokens from 0 to {self.vocabulary - 1}, got {int(found.min())} to "
                f"{int(found.max())} in {file.path} from token {start} on; is it of another dtype than {file.dtype}?"
            )
        return found[:-1], found[1:]


# -- opening -----------------------------------------------------------------------------------------------------------
def _file(path: Path, wanted: str | None) -> _File:
    size = path.stat().st_size
    return _npy_file(path, size, wanted) if path.suffix == ".npy" else _raw_file(path, size, wanted)


def _raw_file(path: Path, size: int, wanted: str | None) -> _File:
    name = wanted or _RAW[0]
    if name not in _RAW:
        raise ValueError(f"memory.tokens: raw files hold {' or '.join(_RAW)}, got dtype={name!r}; save others as .npy")
    _refuse_other(path, name, wanted)
    dtype = np.dtype(name).newbyteorder("<")
    if size % dtype.itemsize:
        raise ValueError(
            f"memory.tokens: expected whole tokens of {dtype.itemsize} bytes ({name}) in {path}, got {size} bytes; the "
            f"file is truncated, or of another dtype"
        )
    file = _File(str(path.absolute()), dtype.str, 0, size // dtype.itemsize)
    if wanted is None and file.count > 1:
        halves = file.read(0, min(file.count, _PROBE))
        if not halves[1::2].any() and halves[::2].any():
            raise ValueError(
                f"memory.tokens: every other number of {path} is 0 as uint16, as tokens of uint32 would be; pass "
                f'dtype="uint32", or dtype="uint16" where that is so'
            )
    return file


def _refuse_other(path: Path, name: str, wanted: str | None) -> None:
    """Raises ValueError for a file that begins as another kind of file does, or whose numbers are floats.

    Floats of ordinary size have their exponents in a narrow range: in the upper half of each number of 32 bits, the
    upper quarter of each of 64. Token numbers do not keep to it. A named ``"uint16"`` is believed.
    """
    with path.open("rb") as stream:
        head = stream.read(4 * _PROBE)
    kind = next((kind for magic, kind in _HEADS.items() if head.startswith(magic)), None)
    floats = kind is None and wanted != "uint16" and any(_are_floats(head, *fits) for fits in _FLOATS)
    kind = "floating-point numbers" if floats else kind
    if kind is not None:
        raise ValueError(
            f"memory.tokens: expected raw tokens of {name} in {path}, got {kind}; write the tokens as integers, "
            'ids.astype("uint16").tofile(path), or save them as .npy'
            + ('; pass dtype="uint16" if they are tokens of it' if floats and wanted is None else "")
        )


def _are_floats(head: bytes, size: int, low: int, high: int) -> bool:
    """Whether the upper 16 bits of nearly all numbers of ``size`` bytes, zeros apart, are from ``low`` to ``high``."""
    halves = np.frombuffer(head[: len(head) // size * size], "<u2").reshape(-1, size // 2)
    upper = halves[halves.any(1), -1] & 0x7FFF
    return len(upper) >= _FEWEST and bool(((upper >= low) & (upper <= high)).mean() > 0.99)


def _npy_file(path: Path, size: int, wanted: str | None) -> _File:
    try:
        with path.open("rb") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
            offset = stream.tell()
    except ValueError as error:
        raise ValueError(f"memory.tokens: {path} has no whole head of a .npy file: {error}") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"memory.tokens: expected one dimension of integers in {path}, got {dtype} {list(shape)}")
    if wanted is not None and wanted != dtype.name:
        raise ValueError(f"memory.tokens: {path} holds {dtype.name}, got dtype={wanted!r}; leave dtype out")
    expected = offset + shape[0] * dtype.itemsize
    if size < expected:
        raise ValueError(f"memory.tokens: expected {expected} bytes in {path}, got {size}; the file is truncated")
    return _File(str(path.absolute()), dtype.str, offset, shape[0])
