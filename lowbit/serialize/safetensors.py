"""The safetensors file format, read and written without trust in the file.

Eight bytes of header length, a JSON header, the tensors' bytes. Tensors are read into memory of their own, never mapped
(a mapped tensor would change with the file, and kill the process where the file shrinks), and the checksum is that of
the very bytes that they are made of. Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from lowbit.files import check_regular, shown

__all__ = ["DTYPES", "read", "write"]

#: The format's names of dtypes; what this torch does not have is left out.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype)
    for name, dtype in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
        "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    }.items()
    if hasattr(torch, dtype)
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: The format's own limit of a header's bytes.
MOST_HEADER = 100_000_000

#: More axes than tensors of torch have.
MOST_AXES = 64

#: What a file begins with that ``torch.save`` or pickle wrote.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Entry(NamedTuple):
    """A tensor as the header describes it; its bytes are ``begin`` to ``end`` behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


# -- writing -----------------------------------------------------------------------------------------------------------
def check_writable(tensors: dict[str, Tensor]) -> None:
    """Raises TypeError for dtypes that the format lacks, naming the tensors."""
    for dtype in {value.dtype for value in tensors.values()} - _NAMES.keys():
        names = ", ".join(name for name, value in tensors.items() if value.dtype == dtype)
        raise TypeError(f"save_model: safetensors cannot hold {dtype} ({names}); convert it")


def write(file: BinaryIO, tensors: dict[str, Tensor]) -> tuple[str, int]:
    """Write ``tensors``, of any stride and on any device, to ``file``; the SHA-256 and the size of what was written.

    Raises: OSError.
    """
    _need_little_endian()
    # Larger elements first, so that each tensor's bytes are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in ordered:
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    for head in (len(text).to_bytes(8, "little"), text):
        digest.update(head)
        file.write(head)
    for _, value in ordered:
        piece = _bytes_of(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest(), 8 + len(text) + end


def _bytes_of(value: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return value.reshape(-1).view(torch.uint8).numpy().data


def _need_little_endian() -> None:
    if sys.byteorder != "little":
        raise RuntimeError("safetensors files are little-endian, and this machine is not; save and load on another")


# -- reading -----------------------------------------------------------------------------------------------------------
def read(path: Path, digest: str, size: int) -> dict[str, Tensor]:
    """The tensors of a file with this SHA-256 and size, on the CPU, each in memory of its own.

    Allocates no more than the file's size. Raises: FileNotFoundError; ValueError for a file that is not that one, or is
    no safetensors file.
    """
    _need_little_endian()
    actual = check_regular(path)
    if actual != size:
        raise ValueError(f"{path} is truncated or altered: {actual} bytes instead of {size}; copy or save it again")
    seen = hashlib.sha256()
    tensors: dict[str, Tensor] = {}
    with open(path, "rb") as file:
        for entry in _entries(path, file, os.fstat(file.fileno()).st_size, seen):
            value = tensors[entry.name] = _allocated(path, entry)
            if value.numel():
                piece = _bytes_of(value)
                if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                    raise ValueError(f"{path} is truncated: it ends in the bytes of {shown(entry.name)}; copy it again")
                seen.update(piece)
    if seen.hexdigest() != digest:
        raise ValueError(f"{path} is altered: its SHA-256 is not the one expected; copy or save it again")
    return tensors


def _allocated(path: Path, entry: Entry) -> Tensor:
    try:
        return torch.empty(entry.shape, dtype=entry.dtype)
    except (RuntimeError, TypeError, OverflowError):  # an axis beyond 64 bits beside one of 0
        raise _damaged(path, f"no tensor has the shape of {shown(entry.name)}") from None


def _entries(path: Path, file: BinaryIO, size: int, seen: Any) -> list[Entry]:
    """The header's tensors in the order of their bytes, which they fill without a gap."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= min(MOST_HEADER, size - 8):
        if head.startswith(_PICKLES):
            raise ValueError(
                f"{path} is a pickle, as torch.save writes it, and not a safetensors file. A pickle can run code when "
                "it is read; lowbit reads none. Ask for the weights as safetensors"
            )
        raise _damaged(path, f"a header of {length} bytes does not fit into {size}")
    text = file.read(length)
    seen.update(head)
    seen.update(text)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    except RecursionError:
        raise _damaged(path, "its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = sorted((_entry(path, name, row) for name, row in header.items()), key=lambda entry: entry[3:])
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise _damaged(path, f"the bytes of {shown(entry.name)} overlap others, or leave a gap")
        end = entry.end
    if 8 + length + end != size:
        raise _damaged(path, f"its tensors fill {end} bytes of {size - 8 - length}")
    return entries


def _entry(path: Path, name: str, row: Any) -> Entry:
    try:
        dtype, shape = DTYPES[row["dtype"]], tuple(row["shape"])
        begin, end = row["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"{shown(name)} has no dtype, shape or offsets that are known") from None
    if len(shape) > MOST_AXES or not all(type(value) is int and 0 <= value < 1 << 63 for value in (*shape, begin, end)):
        raise _damaged(path, f"{shown(name)} has a shape or offsets that are no sizes")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(path, f"{shown(name)} has {end - begin} bytes, and not those of its shape and dtype")
    return Entry(name, dtype, shape, begin, end)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged: {why}; copy or save it again")
