"""``clear``: returns memory that this process no longer uses to the system."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from lowbit.memory import heap
from lowbit.memory.rss import resident_bytes
from lowbit.sizes import amount, amount_changed

__all__ = ["Cleared", "clear"]


class Cleared(NamedTuple):
    """The result of ``clear``. ``print`` shows it as text.

    Attributes:
        objects: Unreachable Python objects that the garbage collector found.
        resident_before: Resident bytes of the process before; 0 if unknown (all systems except Linux).
        resident_after: Resident bytes of the process after.
        reserved_before: Bytes that torch's CUDA allocator had reserved on all devices before; None if CUDA is not in
            use.
        reserved_after: Bytes that it has reserved after.
    """

    objects: int
    resident_before: int
    resident_after: int
    reserved_before: int | None
    reserved_after: int | None

    def __str__(self) -> str:
        known = bool(self.resident_before)
        resident = _changed("resident", self.resident_before, self.resident_after) if known else "resident: unknown"
        lines = [f"objects collected: {self.objects:,}", resident]
        if self.reserved_before is not None and self.reserved_after is not None:
            lines.append(_changed("reserved on CUDA", self.reserved_before, self.reserved_after))
        return "\n".join(lines)


def _changed(name: str, before: int, after: int) -> str:
    return f"{name}: {amount(before)} before, {amount(after)} after ({amount_changed(after - before)})"


def clear() -> Cleared:
    """Free memory that the process holds but no longer uses: between two models, or after an out-of-memory error.

    It runs the garbage collector, which frees tensors in reference cycles. On CUDA it waits for the devices in use and
    returns the cache of torch's allocator. With glibc it returns the free pages of the heap. Tensors that a variable
    refers to stay, and so does the traceback of an error that is still handled.

    The next allocations take longer, because the caches are empty. So do not call it in every step.

    Returns:
        Sizes before and after, and the number of collected objects.
    """
    resident, reserved = resident_bytes(), _reserved()
    objects = gc.collect()
    if reserved is not None:
        for device in reserved:
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    heap.trim()
    after = _reserved()
    return Cleared(
        objects,
        resident,
        resident_bytes(),
        None if reserved is None else sum(reserved.values()),
        None if after is None else sum(after.values()),
    )


def _reserved() -> dict[int, int] | None:
    """Return the bytes reserved on each CUDA device in use; None if this process has not used CUDA."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    sizes = {device: torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count())}
    return {device: size for device, size in sizes.items() if size}
