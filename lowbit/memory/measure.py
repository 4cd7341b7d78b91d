"""What a call takes of memory by torch's own count, which other programs and freed pages do not disturb."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lowbit.torch_private import DeviceType

__all__ = ["allocated_peak", "allocations", "counting", "saved_bytes"]


def counting() -> profile:
    """torch's profiler for memory, which tells of none of its runs on stderr unless the environment says so."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def allocated_peak(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The most bytes that ``run()`` has allocated on ``device`` at a time, beyond what there was before it.

    Bytes are those of torch's allocator: on a CPU by the profiler's events, on a CUDA device by the allocator's peak,
    which starts again from what is held now. What kernels keep outside of it, such as scratch memory, is not seen.
    ``run`` should free nothing of what there was before: on a CPU that is not seen, on CUDA it counts as less.
    Raises ValueError for another kind of device.
    """
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        run()
        return torch.cuda.max_memory_allocated(place) - before
    if place.type != "cpu":
        raise ValueError(
            f"memory.allocated_peak: allocations are counted on 'cpu' and 'cuda', got {str(place)!r}; measure there"
        )
    now = peak = 0
    for _, change in allocations(run):
        now += change
        peak = max(peak, now)
    return peak


def allocations(run: Callable[[], object]) -> list[tuple[int, int]]:
    """What ``run()`` allocates and frees on the CPU in this thread, in order: when, in nanoseconds of ``time.time_ns``,
    and how many bytes, negative where they are freed.
    """
    with counting() as recorded:
        run()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    changes = (e for e in events if e.name() == "[memory]" and e.device_type() == DeviceType.CPU)
    return sorted(((e.start_ns(), e.nbytes()) for e in changes), key=lambda change: change[0])


def saved_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """Bytes of the storages that a forward keeps for backward, each once, without the parameters of ``model``.

    ``run()`` calls the model with gradients on. Copies of parameters, as autocast and recipes make, count; what a
    checkpoint will recompute does not.
    """
    kept: dict[int, Tensor] = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()._cdata
        if storage not in parameters:
            kept[storage] = t  # held, so that no storage comes twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(t.untyped_storage().nbytes() for t in kept.values())
