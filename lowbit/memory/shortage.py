"""Running out of memory: which errors say so, and how to have back what a failed attempt has let go of."""

from __future__ import annotations

import gc

import torch

from lowbit.memory.heap import trim

__all__ = ["ran_out", "reclaim"]

#: What errors say that tell of no memory, where their type does not. A primitive is what oneDNN calls a kernel, for
#: whose code it finds none; a thread needs memory for its stack.
_TEXTS = (
    "can't allocate memory", "bad_alloc", "out of memory", "not enough memory", "could not create a primitive",
    "can't start new thread",
)  # fmt: skip


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was no memory; any other is a mistake, not an event."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def reclaim() -> None:
    """Give freed memory back: what only cycles of objects hold, what torch's CUDA allocator keeps, and glibc's heap."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim()
