"""The time that processes need to exchange parameters and gradients: bytes over the bandwidth between them.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 7; Zhao et al., "PyTorch FSDP", arXiv 2304.11277,
section 3.3, for what overlaps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from lowbit.dist_utils import processes
from lowbit.distributed.strategies import STRATEGIES
from lowbit.memory.devices import Device
from lowbit.plan.settings import TrainingSettings
from lowbit.sizes import bytes_in

__all__ = ["ALONE", "DEFAULTS", "Together", "bandwidth_of", "exchange_seconds", "together"]


class Together(NamedTuple):
    """The processes that train together: their number, bytes per second that each sends, and processes per group."""

    gpus: int
    bandwidth: float
    group_size: int | None

    def of(self, settings: TrainingSettings) -> TrainingSettings:
        """Return ``settings`` for these processes."""
        group_size = self.group_size if STRATEGIES[settings.strategy].grouped else None
        return replace(settings, gpus=self.gpus, group_size=group_size)


ALONE = Together(1, math.inf, None)


def together(gpus: int, link: str | float | None, group_size: int | None, device: torch.device | Device) -> Together:
    """Return the processes for arguments of ``lb.fit``. Raises ValueError for invalid arguments."""
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"fit: gpus must be a number of processes from 1, got {gpus!r}")
    if gpus == 1 and (link is not None or group_size is not None):
        raise ValueError("fit: link and group_size need several processes; pass gpus=2 or more, or leave them out")
    if group_size is not None and (group_size < 1 or gpus % group_size):
        raise ValueError(f"fit: group_size must be a divisor of gpus={gpus}, got {group_size!r}")
    return ALONE if gpus == 1 else Together(gpus, bandwidth_of(link, device), group_size)


#: Assumed bytes per second that a process sends, by device type: gloo over 10 Gb/s Ethernet; NCCL over PCIe 4.0 x16.
DEFAULTS = {"cpu": 1.25e9, "cuda": 25e9}

#: Share of forward in the time of forward and backward: backward has two matmuls for each matmul of forward.
_FORWARD = 1 / 3

#: Bytes of the measured all-reduce, and its repetitions, of which the fastest counts.
_BYTES, _TIMES = 8 << 20, 5


def exchange_seconds(
    settings: TrainingSettings, parameters: int, gradients: int, compute: float, bandwidth: float, overlaps: bool
) -> float:
    """Return the seconds that communication adds to a step.

    Communication of backward overlaps with its compute.

    Args:
        settings: Settings, with the number of processes and the sharding strategy.
        parameters: Bytes of the parameters of the whole model, also of frozen ones.
        gradients: Bytes of the gradients of the whole model.
        compute: Seconds of forward and backward of one micro-batch.
        bandwidth: Bytes per second that a process sends.
        overlaps: Whether communication of forward overlaps with compute too.
    """
    if settings.gpus == 1:
        return 0.0
    group = settings.group
    sent = STRATEGIES[settings.strategy].sends(parameters, gradients)
    in_forward, in_backward, in_step = (size * (group - 1) / group / bandwidth for size in sent)
    groups = settings.gpus // group
    between = 2 * gradients / group * (groups - 1) / groups / bandwidth
    forward = max(0.0, in_forward - (_FORWARD * compute if overlaps else 0.0))
    backward = max(0.0, in_backward + between - (1 - _FORWARD) * compute)
    return settings.micro_batches * (forward + backward) + in_step


def bandwidth_of(link: str | float | None, device: torch.device | Device) -> float:
    """Return the bytes per second that a process sends.

    Args:
        link: The bandwidth, such as ``"25GB/s"`` or a number. None measures an all-reduce if ``torch.distributed``
            runs several processes, which must all call this; otherwise it takes the value of ``DEFAULTS``.
        device: Device of the model, or a row of ``lb.plan.DEVICES``, whose link is then assumed.

    Raises:
        ValueError: For an invalid bandwidth.
    """
    if link is None and isinstance(device, Device):
        return device.link
    if link is None:
        assert isinstance(device, torch.device)
        return _measured(device) if processes() > 1 else DEFAULTS.get(device.type, DEFAULTS["cpu"])
    try:
        rate = float(bytes_in(link.removesuffix("/s")) if isinstance(link, str) else link)
    except (ValueError, TypeError):
        rate = 0.0
    if not rate > 0:
        raise ValueError(f"fit: link must be the bytes per second that a process sends, such as '25GB/s', got {link!r}")
    return rate


@cache
def _measured(device: torch.device) -> float:
    """Return the measured bandwidth, the same in all processes. All must call it together."""
    count = processes()
    data = torch.zeros(_BYTES, dtype=torch.uint8, device=device).view(torch.float32)
    seconds = min(_timed(lambda: dist.all_reduce(data), device) for _ in range(_TIMES))
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 2 * _BYTES * (count - 1) / count / float(slowest)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
