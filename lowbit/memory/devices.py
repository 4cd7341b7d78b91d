"""GPUs that a plan or an estimate may be for, without having one.

Sizes are those of CUDA's ops and allocations. Times are rooflines of data sheets: the longer of arithmetic and memory
traffic, and at least the launch of a kernel (Williams et al., "Roofline", 2009). A real step takes longer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.memory.cost import Work
from lowbit.sizes import amount

__all__ = ["DEVICES", "UNIT", "Device", "as_on_cuda", "device_in", "placed"]

#: The unit in which CUDA's allocator of torch counts.
UNIT = 512

#: Seconds between the launches of two kernels that Python code calls.
_LAUNCH = 5e-6

_math = torch.ops.aten._scaled_dot_product_attention_math.default

#: The arithmetic in which a device computes that has no units for a narrower one.
_WIDER = {"fp4": "fp8", "fp8": "bf16", "int8": "bf16", "bf16": "fp32", "fp16": "fp32"}


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet.

    Attributes:
        name: Its name in plans.
        memory: Bytes of memory.
        bandwidth: Bytes per second from and to this memory.
        flops: Operations per second by arithmetic (``"fp32"``, ``"bf16"``, ``"fp8"``, ``"int8"`` and so on), for dense
            matrices, with sums in fp32 or int32. A missing arithmetic is computed in the next wider one.
        host: Bytes per second from or to host memory.
        link: Bytes per second that a device sends to others of its machine.
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    host: float = 25e9
    link: float = 25e9

    def seconds(self, work: Work) -> float:
        """Return the time of an op by the roofline; 0 if it computes nothing."""
        if not work.computes:
            return 0.0
        return max(work.flops / self.rate(work.kind), work.bytes / self.bandwidth, _LAUNCH)

    def rate(self, kind: str) -> float:
        """Return the operations per second in an arithmetic."""
        while kind not in self.flops and kind in _WIDER:
            kind = _WIDER[kind]
        return self.flops.get(kind, self.flops["fp32"])


def _row(
    name: str, mebibytes: int, gigabytes: float, *, host: float = 25, link: float = 0, **teraflops: float
) -> Device:
    """Return a row of the table: memory as drivers report it, GB/s, and TFLOPS."""
    flops = {kind: rate * 1e12 for kind, rate in teraflops.items()}
    return Device(name, mebibytes << 20, gigabytes * 1e9, flops, host * 1e9, (link or host) * 1e9)


#: Devices by name. Source: the data sheets and architecture papers of NVIDIA. Rows may be added.
DEVICES: dict[str, Device] = {
    row.name: row
    for row in (
        _row("t4", 15360, 320, fp32=8.1, fp16=65, int8=130, host=12),
        _row("rtx-3060", 12288, 360, fp32=12.7, bf16=25.5, fp16=25.5, int8=102),
        _row("rtx-3090", 24576, 936, fp32=35.6, bf16=71, fp16=71, int8=284),
        _row("rtx-4070", 12282, 504, fp32=29.1, bf16=58.3, fp16=58.3, fp8=116.5, int8=233),
        _row("rtx-4080", 16376, 717, fp32=48.7, bf16=97.5, fp16=97.5, fp8=194.9, int8=389.9),
        _row("rtx-4090", 24564, 1008, fp32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6),
        _row("rtx-5090", 32607, 1792, fp32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838, fp4=1676, host=50),
        _row("rtx-a6000", 49140, 768, fp32=38.7, bf16=154.8, fp16=154.8, int8=309.7),
        _row("rtx-6000-ada", 49140, 960, fp32=91.1, bf16=364.2, fp16=364.2, fp8=728.5, int8=728.5),
        _row("a10g", 23028, 600, fp32=31.2, bf16=70, fp16=70, int8=140),
        _row("l4", 23034, 300, fp32=30.3, bf16=121, fp16=121, fp8=242, int8=242),
        _row("l40s", 46068, 864, fp32=91.6, bf16=362, fp16=362, fp8=733, int8=733),
        _row("a100-40gb", 40960, 1555, fp32=19.5, bf16=312, fp16=312, int8=624, link=300),
        _row("a100-80gb", 81920, 2039, fp32=19.5, bf16=312, fp16=312, int8=624, link=300),
        _row("h100-pcie", 81559, 2000, fp32=51, bf16=756, fp16=756, fp8=1513, int8=1513, host=50, link=300),
        _row("h100", 81559, 3350, fp32=67, bf16=989, fp16=989, fp8=1979, int8=1979, host=50, link=450),
        _row("h200", 143771, 4800, fp32=67, bf16=989, fp16=989, fp8=1979, int8=1979, host=50, link=450),
        _row("b200", 183359, 8000, fp32=75, bf16=2250, fp16=2250, fp8=4500, int8=4500, fp4=9000, host=50, link=900),
    )
}  # fmt: skip


def device_in(name: str | Device | None, who: str) -> Device | None:
    """Return the device called ``name``, or None for None.

    Raises:
        ValueError: There is no such device.
    """
    if name is None or isinstance(name, Device):
        return name
    row = _named(name)
    if row is not None:
        return row
    if str(name) in ("cpu", "cuda"):
        raise ValueError(
            f"{who}: device={str(name)!r} is not a row of lb.plan.DEVICES, such as 'rtx-4090'; leave it out for the "
            f"device that the model is on"
        )
    close = difflib.get_close_matches(str(name).lower(), DEVICES, n=3, cutoff=0.4)
    listed = ", ".join(f"{known} ({amount(DEVICES[known].memory)})" for known in close or DEVICES)
    raise ValueError(
        f"{who}: no device is called {name!r}; there {'is' if len(close) == 1 else 'are'} {listed}"
        + (", and more" if close else "")
        + "; add a row to lb.plan.DEVICES for another one"
    )


def placed(device: torch.device | str | Device | None) -> tuple[torch.device | str | None, Device | None]:
    """Return the device of an estimate's tensors, and the device of the table that it is for, or None.

    Args:
        device: A device of torch, or one of the table by name.
    """
    target = _named(device) if isinstance(device, str) else device
    return ("cpu", target) if isinstance(target, Device) else (cast("torch.device | str | None", device), None)


def _named(name: str) -> Device | None:
    """Return the device of a name, in which case, separators and the series may differ, as in ``"RTX4090"``."""
    return next((row for key, row in DEVICES.items() if _plain(key) == _plain(name)), None)


def _plain(name: Any) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|rtx", "", str(name).lower())


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Context in which ops on fake tensors of the CPU are chosen as on CUDA, as far as they differ in memory.

    Dropout saves a mask of bytes, attention with dropout needs no scores but grouped queries in fp32 do, and RMSNorm
    saves one number per row.
    """
    attend: Any = F.scaled_dot_product_attention

    def dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        out: Tensor = torch.native_dropout(x, p, training)[0]
        return x.copy_(out) if inplace else out

    def attended(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        fp32 = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if fp32 and options.get("enable_gqa"):  # CUDA's fp32 kernel has one key per query head
            scored: Tensor = _math(query, key, value, attn_mask, 0.0, is_causal, **options)[0]
            return scored
        out: Tensor = attend(query, key, value, attn_mask, 0.0, is_causal, **options)
        return out

    def normed(
        x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        out: Tensor = _RMSNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
        return out

    replaced = {"dropout": dropped, "scaled_dot_product_attention": attended, "rms_norm": normed}
    with ExitStack() as patches:
        for name, function in replaced.items():
            patches.enter_context(mock.patch.object(F, name, function))
        yield


class _RMSNorm(torch.autograd.Function):
    """The memory of CUDA's fused RMSNorm over the last ``axes`` axes. It computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, axes: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-axes], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
