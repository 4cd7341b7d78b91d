"""What processes take of time to exchange parameters and gradients: bytes over the bandwidth between them.

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
from lowbit.plan.settings import TrainingSettings
from lowbit.sizes import bytes_in

__all__ = ["ALONE", "DEFAULTS", "Together", "bandwidth_of", "exchange_seconds", "together"]


class Together(NamedTuple):
    """Processes that train together: how many, bytes a second that each sends, and how many are in a group."""

    gpus: int
    bandwidth: float
    group_size: int | None

    def of(self, settings: TrainingSettings) -> TrainingSettings:
        """Settings for them."""
        group_size = self.group_size if STRATEGIES[settings.strategy].grouped else None
        return replace(settings, gpus=self.gpus, group_size=group_size)


ALONE = Together(1, math.inf, None)


def together(gpus: int, link: str | float | None, group_size: int | None, device: torch.device) -> Together:
    """Raises ValueError for what is no number of processes, no bandwidth and no divisor of ``gpus``."""
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"fit: gpus is a number of processes from 1, got {gpus!r}")
    if gpus == 1 and (link is not None or group_size is not None):
        raise ValueError("fit: link and group_size are of several processes; give gpus=2 or more, or leave them out")
    if group_size is not None and (group_size < 1 or gpus % group_size):
        raise ValueError(f"fit: group_size is a divisor of gpus={gpus}, got {group_size!r}")
    return ALONE if gpus == 1 else Together(gpus, bandwidth_of(link, device), group_size)


#: By the type of a device, bytes a second that a process sends where nothing is measured or said: gloo over 10 Gb/s
#: Ethernet; NCCL over PCIe 4.0 with 16 lanes.
DEFAULTS = {"cpu": 1.25e9, "cuda": 25e9}

#: What forward takes of a pass in which nothing is recomputed: backward has two products for each one of forward.
_FORWARD = 1 / 3

#: What is summed to measure, and how often; the fastest counts.
_BYTES, _TIMES = 8 << 20, 5


def exchange_seconds(
    settings: TrainingSettings, parameters: int, compute: float, bandwidth: float, overlaps: bool
) -> float:
    """What a step takes longer for its exchanges. ``parameters``: bytes of the whole model. ``compute``: seconds of
    forward and backward of one part. What is sent in backward goes while backward computes; in forward likewise where
    the device ``overlaps``.
    """
    if settings.gpus == 1:
        return 0.0
    in_forward, in_backward, in_step = STRATEGIES[settings.strategy].sends
    group = settings.group
    each = parameters * (group - 1) / group / bandwidth
    groups = settings.gpus // group
    between = 2 * parameters / group * (groups - 1) / groups / bandwidth
    forward = max(0.0, in_forward * each - (_FORWARD * compute if overlaps else 0.0))
    backward = max(0.0, in_backward * each + between - (1 - _FORWARD) * compute)
    return settings.micro_batches * (forward + backward) + in_step * each


def bandwidth_of(link: str | float | None, device: torch.device) -> float:
    """Bytes a second that a process sends: ``link``, such as ``"25GB/s"`` or a number; where it is None what a sum
    among the processes of ``torch.distributed`` reaches, which all call this, else the row of ``DEFAULTS``.

    Raises ValueError for what is no bandwidth.
    """
    if link is None:
        return _measured(device) if processes() > 1 else DEFAULTS.get(device.type, DEFAULTS["cpu"])
    try:
        found = float(bytes_in(link.removesuffix("/s")) if isinstance(link, str) else link)
    except (ValueError, TypeError):
        found = 0.0
    if not found > 0:
        raise ValueError(f"fit: link is what a process sends a second, such as '25GB/s', got {link!r}")
    return found


@cache
def _measured(device: torch.device) -> float:
    """The same in all processes, which call it together."""
    count = processes()
    data = torch.zeros(_BYTES, dtype=torch.uint8, device=device).view(torch.float32)
    seconds = min(_timed(lambda: dist.all_reduce(data), device) for _ in range(_TIMES))
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 2 * _BYTES * (count - 1) / count / float(slowest)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
