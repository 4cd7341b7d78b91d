"""Tensors in files that are mapped into memory: read and written in place, their pages dropped after use."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit.storage.directory import ScratchDirectory

__all__ = ["drop_pages", "is_mapped", "mapped_like", "read_ahead"]


#: Where the tensors of ``mapped_like`` lie. Memory of any other kind would lose what is dropped.
_mapped: set[int] = set()


def mapped_like(tensor: Tensor, files: ScratchDirectory) -> Tensor:
    """A CPU tensor of that shape, dtype and order of strides in a file of ``files``, which goes with its storage.

    What it holds is not defined before it is written. The disk has room for all of it. Raises OSError.
    """
    plan = torch.empty_like(tensor, device="meta")
    path = files.reserve(plan.nbytes)
    raw = torch.from_file(str(path), shared=True, size=plan.nbytes, dtype=torch.uint8)
    storage = raw.untyped_storage()
    _mapped.add(storage.data_ptr())
    weakref.finalize(storage, _mapped.discard, storage.data_ptr())
    weakref.finalize(storage, files.release, path, plan.nbytes)
    return raw.view(plan.dtype).as_strided(plan.shape, plan.stride())


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor lies in such a file, and takes memory only while it is used."""
    return tensor.untyped_storage().data_ptr() in _mapped


def drop_pages(tensor: Tensor) -> None:
    """Take the pages of a mapped tensor out of the process; the system writes what has changed and reads it again."""
    _advise(tensor, mmap.MADV_DONTNEED)


def read_ahead(tensor: Tensor) -> None:
    """Have the system read a mapped tensor before it is used."""
    _advise(tensor, mmap.MADV_WILLNEED)


def _advise(tensor: Tensor, advice: int) -> None:
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in _mapped:
        return
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), advice)
