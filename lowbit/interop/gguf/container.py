"""Writes metadata and tensors as a GGUF file, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.files import replaced
from lowbit.interop.files import require_space

__all__ = ["Entry", "write_file"]


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    type: str
    """A key of ``BLOCK_TYPES``, or F32, F16 or BF16."""
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    """Returns its bytes, uint8 ``[..., nbytes of a row]``, or its values in fp32."""


def write_file(gguf: Any, path: Path, architecture: str, metadata: dict[str, Any], entries: Sequence[Entry]) -> None:
    """Write a file, which gets its name when it is complete.

    Args:
        gguf: The package gguf.
        path: The file.
        architecture: The value of ``general.architecture``.
        metadata: The other keys, with ints, floats, bools, strings, or lists of one of them.
        entries: The tensors. Each is made when it is written.

    Raises:
        OSError: The file cannot be written, or the disk has too little space.
    """
    require_space(path, sum(_nbytes(gguf, entry) for entry in entries))
    with replaced(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        for key, value in metadata.items():
            _add(writer, key, value)
        for entry in entries:
            _add_info(gguf, writer, entry)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(entry.make().contiguous().numpy())
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a value in llama.cpp's type for it: unsigned integers, fp32, strings, bools."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _nbytes(gguf: Any, entry: Entry) -> int:
    size, nbytes = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, entry.type)]
    return int(torch.Size(entry.shape).numel() // size * nbytes)


def _add_info(gguf: Any, writer: Any, entry: Entry) -> None:
    kind = getattr(gguf.GGMLQuantizationType, entry.type)
    import numpy as np

    shape: tuple[int, ...] = entry.shape
    dtype: Any = np.float32
    if entry.type != "F32":
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        shape, dtype = (*shape[:-1], shape[-1] // size * nbytes), np.uint8
    writer.add_tensor_info(entry.name, shape, np.dtype(dtype), _nbytes(gguf, entry), raw_dtype=kind)
