"""Converts tensors and devices to kernel arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

from lowbit import reference
from lowbit.kernels.spec import DTYPES, INTERPRETED

#: 16- and 32-bit types are loaded and stored as integers: see ``bits``.
_PATTERN = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


#: The fixed signs of the Hadamard transform as int32 words, ``SIGNS`` in kernels.
SIGNS = tuple((reference.PI >> shift & 0xFFFFFFFF ^ 1 << 31) - (1 << 31) for shift in (96, 64, 32, 0))


def pattern(x: Tensor) -> Tensor:
    return x.view(_PATTERN.get(x.dtype, x.dtype))


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def dtype_of(x: Tensor) -> int:
    """The kernel argument ``DTYPE``."""
    return DTYPES[str(x.dtype).removeprefix("torch.")]


def input_of(x: Tensor) -> dict[str, Any]:
    return {"x_ptr": pattern(x), "stride_r": x.stride(0), "stride_c": x.stride(1)}


_stood_for: ContextVar[torch.device | None] = ContextVar("lowbit_stood_for", default=None)


@contextmanager
def standing_for(device: torch.device) -> Iterator[None]:
    """A context in which host sides on the meta device make the choices for ``device``."""
    token = _stood_for.set(device)
    try:
        yield
    finally:
        _stood_for.reset(token)


#: FP8 formats with hardware conversion and their PTX names; below, all formats that hardware converts to.
FP8 = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
CONVERTED = {**FP8, "fp4_e2m1": "e2m1"}

#: The lowest compute capability that converts each format.
CONVERTED_FROM = {"e4m3": (8, 9), "e5m2": (8, 9), "e2m1": (10, 0)}


#: The lowest compute capability for which Triton converts fp32 to FP8 directly. Before 3.9 it converts through fp16 on
#: 8.9, which rounds twice.
ROUNDED_ONCE_FROM = (8, 9) if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9) else (9, 0)


def converts(name: str, device: torch.device) -> bool:
    """Whether ``device`` has conversion instructions for ``name``, a value of ``CONVERTED``.

    The interpreter does not emulate these instructions.
    """
    return _from(CONVERTED_FROM[name], device)


def rounds_once(name: str, device: torch.device) -> bool:
    """Whether ``device`` also converts fp32 to ``name`` with a single rounding."""
    return _from(max(CONVERTED_FROM[name], ROUNDED_ONCE_FROM), device)


def _from(capability: tuple[int, int], device: torch.device) -> bool:
    device = _stood_for.get() or device
    if INTERPRETED or device.type != "cuda":
        return not INTERPRETED
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= capability
