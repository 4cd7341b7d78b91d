"""Tensors in memory-mapped files, whose pages are dropped after use."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit.storage.directory import ScratchDirectory

__all__ = ["drop_pages", "is_mapped", "mapped_like", "read_ahead"]


#: Addresses of the tensors of ``mapped_like``. Dropping pages of other memory would lose their contents.
_mapped: set[int] = set()


def mapped_like(tensor: Tensor, files: ScratchDirectory) -> Tensor:
    """An uninitialized CPU tensor in a file of ``files``, with the shape, dtype and stride order of ``tensor``.

    Disk space is allocated for all of it. The file is removed with the tensor's storage.

    Raises:
        OSError: The budget or the disk is exhausted.
    """
    like = torch.empty_like(tensor, device="meta")
    path = files.reserve(like.nbytes)
    raw = torch.from_file(str(path), shared=True, size=like.nbytes, dtype=torch.uint8)
    storage = raw.untyped_storage()
    _mapped.add(storage.data_ptr())
    weakref.finalize(storage, _mapped.discard, storage.data_ptr())
    weakref.finalize(storage, files.release, path, like.nbytes)
    return raw.view(like.dtype).as_strided(like.shape, like.stride())


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor is in a file of ``mapped_like``, and so uses memory only while it is used."""
    return tensor.untyped_storage().data_ptr() in _mapped


def drop_pages(tensor: Tensor) -> None:
    """Free the pages of a mapped tensor. The system writes changes to the file, and reads pages again on access."""
    _advise(tensor, mmap.MADV_DONTNEED)


def read_ahead(tensor: Tensor) -> None:
    """Let the system read a mapped tensor before it is used."""
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
