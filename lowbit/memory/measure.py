"""Memory of a call by torch's own count, which other programs and freed pages do not disturb."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lowbit.torch_private import DeviceType

__all__ = ["allocated_peak", "allocations", "counting", "saved_bytes"]


def counting() -> profile:
    """Return torch's memory profiler, without its messages on stderr unless the environment asks for them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def allocated_peak(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the most bytes that ``run()`` allocates on ``device`` at a time, beyond those allocated before.

    Bytes are those of torch's allocator. On a CPU they come from profiler events, on CUDA from the allocator's peak,
    which is reset. Scratch memory that kernels allocate elsewhere does not count.

    Args:
        run: Should not free tensors that existed before: on a CPU these are ignored, on CUDA they are subtracted.
        device: A CPU or CUDA device.

    Raises:
        ValueError: The device is neither a CPU nor CUDA.
    """
    target = torch.device(device)
    if target.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target)
        before = torch.cuda.memory_allocated(target)
        run()
        return torch.cuda.max_memory_allocated(target) - before
    if target.type != "cpu":
        raise ValueError(
            f"memory.allocated_peak: allocations are counted on 'cpu' and 'cuda', got {str(target)!r}; use one of these"
        )
    current = peak = 0
    for _, change in allocations(run):
        current += change
        peak = max(peak, current)
    return peak


def allocations(run: Callable[[], object]) -> list[tuple[int, int]]:
    """Return the CPU allocations and frees of ``run()`` in this thread, in order.

    Returns:
        Pairs of time (nanoseconds of ``time.time_ns``) and bytes, which are negative for frees.
    """
    with counting() as recorded:
        run()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    changes = (e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU)
    return sorted(((e.start_ns(), e.nbytes()) for e in changes), key=lambda change: change[0])


def saved_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """Return the bytes that a forward saves for backward. Each storage counts once.

    Args:
        run: Calls the model with gradients enabled.
        model: Its parameters do not count. Copies of them do, such as those of autocast and recipes. Activations that a
            checkpoint recomputes do not.
    """
    saved: dict[int, Tensor] = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()._cdata
        if storage not in parameters:
            saved[storage] = t  # keeps it alive, so that its address is not used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(t.untyped_storage().nbytes() for t in saved.values())
