"""Running out of memory: which errors say so, and how to have back what a failed attempt has let go of."""

from __future__ import annotations

import gc
import re

import torch

from lowbit.memory.heap import trim

__all__ = ["ran_out", "reclaim"]

#: What errors say that tell of no memory, if their type does not. A thread needs memory for its stack.
_TEXTS = ("can't allocate memory", "bad_alloc", "out of memory", "not enough memory", "can't start new thread")

#: oneDNN has no memory for the code of a kernel, which it calls a primitive. Of a descriptor it says that there is none
#: for this processor.
_PRIMITIVE = re.compile(r"could not create a primitive(?! descriptor)")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory; any other is a mistake, not an event."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (any(one in text for one in _TEXTS) or bool(_PRIMITIVE.search(text)))


def reclaim() -> None:
    """Give freed memory back: what only cycles of objects hold, what torch's CUDA allocator keeps, and glibc's heap."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()
