"""Read and write safetensors files, which may come from an untrusted source.

Loaded tensors are copies, not memory maps: a mapped tensor changes with the file, and a truncated file kills the
process. Single tensors are read by their offset in the header, because the library maps the whole file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lowbit.files import check_regular, flush, sha256, shown
from lowbit.models.ties import storage

__all__ = ["Entry", "check_writable", "entries", "read", "read_entry", "write", "write_streamed"]

#: First bytes of files from ``torch.save`` or pickle.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

#: Dtype names in headers, for dtypes of torch; ``_UNREAD`` are the sub-byte dtypes.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_UNREAD = ("F4", "F6_E2M3", "F6_E3M2")

_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

#: The library's limit for the length of a header.
_MOST_HEADER = 100_000_000

#: An operating system error in the library's messages.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def check_writable(tensors: dict[str, Tensor]) -> None:
    """Raise TypeError, with the names of the tensors, for dtypes that the format does not support."""
    for dtype in {value.dtype for value in tensors.values()}:
        try:
            safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
        except (KeyError, ValueError, TypeError, safetensors.SafetensorError):
            names = ", ".join(name for name, value in tensors.items() if value.dtype == dtype)
            raise TypeError(f"save_model: safetensors cannot hold {dtype} ({names}); convert it") from None


def write(path: Path, tensors: dict[str, Tensor]) -> tuple[str, int]:
    """Write tensors of any stride and device.

    Returns:
        The file's SHA-256 and its size in bytes.

    Raises:
        OSError: The file cannot be written.
    """
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.cpu().resolve_conj().resolve_neg().contiguous()
        is_view = value.untyped_storage().nbytes() != value.nbytes
        plain[name] = (
            value.clone() if is_view or storage(value) in seen else value
        )  # the library rejects shared storage
        seen.add(storage(value))
    try:
        safetensors.torch.save_file(plain, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise OSError(f"{path} cannot be written: {error}") from None
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
    with open(path, "rb+") as file:
        flush(file)
    return sha256(path), path.stat().st_size


def write_streamed(path: Path, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, int]:
    """Write tensors one at a time, so that only one is in memory.

    Args:
        path: An existing file, which is overwritten.
        layout: Dtypes and shapes by name, as tensors on any device.
        tensors: Names and tensors, in any order.

    Returns:
        The file's SHA-256 and its size in bytes.

    Raises:
        OSError: The file cannot be written.
    """
    rows: dict[str, dict[str, Any]] = {}
    end = 0
    for name, like in sorted(layout.items(), key=lambda row: -row[1].itemsize):  # aligns every tensor
        begin, end = end, end + like.nbytes
        rows[name] = {"dtype": _DTYPE_NAMES[like.dtype], "shape": list(like.shape), "data_offsets": [begin, end]}
    head = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "rb+") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
        for name, value in tensors:
            like = layout[name]
            assert value.dtype == like.dtype and value.shape == like.shape, name
            file.seek(8 + len(head) + rows[name]["data_offsets"][0])
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        flush(file)
    return sha256(path), path.stat().st_size


def read(path: Path, digest: str, size: int) -> dict[str, Tensor]:
    """Read all tensors of a file to the CPU; none share memory.

    Args:
        path: The file.
        digest: Its expected SHA-256.
        size: Its expected size in bytes.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: Size or SHA-256 differ, or it is not a safetensors file.
    """
    actual = check_regular(path)
    if actual != size:
        raise ValueError(f"{path} is truncated or altered: {actual} bytes instead of {size}; copy or save it again")
    if sha256(path) != digest:
        raise ValueError(f"{path} is altered: its SHA-256 is not the one expected; copy or save it again")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}
    except (safetensors.SafetensorError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        with open(path, "rb") as file:  # raises FileNotFoundError if another save has removed it meanwhile
            start = file.read(4)
        if start.startswith(_PICKLES):  # checked last: a valid header length may have the same bytes
            raise ValueError(
                f"{path} is a pickle (torch.save), expected a safetensors file. A pickle can run code when it is "
                "loaded, so lowbit reads none; get the weights as safetensors"
            ) from None
        raise ValueError(f"{path} is damaged: {str(error)[:500]}; copy or save it again") from None


class Entry(NamedTuple):
    """The location of a tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte, from the start of the file."""
    end: int
    """Offset after the last byte."""


def entries(path: Path) -> dict[str, Entry]:
    """The locations of a file's tensors by name, without reading them.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: It is not a safetensors file, or has a sub-byte dtype.
    """
    size = check_regular(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MOST_HEADER):
            raise ValueError(f"{path} is not a safetensors file, or is truncated; copy or save it again")
        head = file.read(length)
    try:
        rows = json.loads(head)
        rows.pop("__metadata__", None)
        unread = [name for name, row in rows.items() if row["dtype"] in _UNREAD]
        entries = {name: _entry(path, row, 8 + length, size) for name, row in rows.items() if name not in unread}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {str(error)[:300]}; copy or save it again") from None
    if unread:
        raise ValueError(
            f"{path} has {shown(unread[0])} in {rows[unread[0]]['dtype']}, a dtype that lowbit does not support; use "
            f"the original checkpoint in high precision"
        )
    return entries


def _entry(path: Path, row: dict[str, Any], start: int, size: int) -> Entry:
    dtype, shape, (begin, end) = _DTYPES[row["dtype"]], tuple(row["shape"]), row["data_offsets"]
    expected = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != expected or start + end > size:
        raise ValueError(f"a tensor {list(shape)} of {row['dtype']} has the offsets {begin}:{end}")
    return Entry(path, dtype, shape, start + begin, start + end)


def read_entry(entry: Entry) -> Tensor:
    """Read one tensor to the CPU. Raises FileNotFoundError, or ValueError if the file has become shorter."""
    data = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    with open(entry.path, "rb") as file:
        file.seek(entry.begin)
        if data.numel() and file.readinto(data.numpy().data) != data.numel():
            raise ValueError(f"{entry.path} is truncated; copy or save it again")
    return data.view(entry.dtype).view(entry.shape)
