"""Out-of-memory errors: how to recognize them, and how to reclaim the memory of a failed attempt."""

from __future__ import annotations

import gc
import re

import torch

from lowbit.memory.heap import trim

__all__ = ["ran_out", "reclaim"]

#: Texts of out-of-memory errors that have no type of their own. Starting a thread needs memory for its stack.
_TEXTS = ("can't allocate memory", "bad_alloc", "out of memory", "not enough memory", "can't start new thread")

#: oneDNN's error if there is no memory for the code of a kernel (a primitive). The same error for a primitive
#: descriptor means that the processor is not supported.
_PRIMITIVE = re.compile(r"could not create a primitive(?! descriptor)")


def ran_out(error: BaseException) -> bool:
    """Return whether an error means out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (any(part in text for part in _TEXTS) or bool(_PRIMITIVE.search(text)))


def reclaim() -> None:
    """Release reference cycles, the cache of torch's CUDA allocator, and free memory of glibc's heap."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()
