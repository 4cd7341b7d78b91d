"""Weights' files, by the library safetensors, without trust in the file.

Loaded tensors are copies, never mapped on the file: a mapped tensor would change with it, and kill the process where it
shrinks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lowbit.files import check_regular, flush

__all__ = ["check_writable", "read", "write"]

#: What a file begins with that ``torch.save`` or pickle wrote.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

#: Bytes that are hashed at a time.
_PIECE = 1 << 20


def check_writable(tensors: dict[str, Tensor]) -> None:
    """Raises TypeError for dtypes that the format lacks, naming the tensors."""
    for dtype in {value.dtype for value in tensors.values()}:
        try:
            safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
        except (KeyError, ValueError, TypeError, safetensors.SafetensorError):
            names = ", ".join(name for name, value in tensors.items() if value.dtype == dtype)
            raise TypeError(f"save_model: safetensors cannot hold {dtype} ({names}); convert it") from None


def write(path: Path, tensors: dict[str, Tensor]) -> tuple[str, int]:
    """Write ``tensors``, of any stride and on any device, to ``path``; its SHA-256 and its size. Raises: OSError."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.cpu().resolve_conj().resolve_neg().contiguous()
        whole = value.untyped_storage().nbytes() == value.nbytes  # the library takes no views of one storage
        plain[name] = value if whole and value.data_ptr() not in seen else value.clone()
        seen.add(value.data_ptr())
    try:
        safetensors.torch.save_file(plain, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    with open(path, "rb+") as file:
        flush(file)
    return _sha256(path), path.stat().st_size


def read(path: Path, digest: str, size: int) -> dict[str, Tensor]:
    """The tensors of a file with this SHA-256 and size, on the CPU, each in memory of its own.

    Raises: FileNotFoundError; ValueError for a file that is not that one, or is no safetensors file.
    """
    actual = check_regular(path)
    if actual != size:
        raise ValueError(f"{path} is truncated or altered: {actual} bytes instead of {size}; copy or save it again")
    if _sha256(path) != digest:
        raise ValueError(f"{path} is altered: its SHA-256 is not the one expected; copy or save it again")
    try:
        with safetensors.safe_open(path, framework="pt") as found:
            return {name: found.get_tensor(name).clone() for name in found.keys()}
    except (safetensors.SafetensorError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        with open(path, "rb") as file:  # FileNotFoundError: removed meanwhile, by whoever saved another model
            start = file.read(4)
        if start.startswith(_PICKLES):  # not before: the size of a header may have these bytes
            raise ValueError(
                f"{path} is a pickle, as torch.save writes it, and not a safetensors file. A pickle can run code when "
                "it is read; lowbit reads none. Ask for the weights as safetensors"
            ) from None
        raise ValueError(f"{path} is damaged: {str(error)[:500]}; copy or save it again") from None


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()
