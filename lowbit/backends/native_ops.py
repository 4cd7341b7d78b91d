"""Kernels of the native library as rows of the registry, for the CPU and CUDA backends.

``torch.ops.lowbit_native.NAME`` takes the arguments of the op and the outputs to fill. Formats and schemes are passed
by name (csrc/ops_entry.h). Each kernel that the library has for a device becomes a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.backends.native import loading_error
from lowbit.backends.registry import Impl, Run
from lowbit.ops import OPS, OpSpec
from lowbit.torch_private import dispatches_to

__all__ = ["has_kernel", "rows", "run"]

_library = torch.library.Library("lowbit_native", "FRAGMENT")


def _define() -> None:
    """Define the ops with the schemas of ``OPS``; the library contains the kernels."""
    if loading_error() is None:
        for spec in OPS.values():
            _library.define(f"{spec.name}({spec.positional[1]}) -> ()")


def has_kernel(op: str, device: str) -> bool:
    """Whether the library has a kernel of the op for a device type."""
    return loading_error() is None and dispatches_to(f"lowbit_native::{op}", device.upper())


def run(spec: OpSpec) -> Run:
    """The native kernel of an op."""

    def run_native(outs: tuple[Tensor, ...], call: Any) -> None:
        getattr(torch.ops.lowbit_native, spec.name)(*call, *outs)

    return run_native


def rows(device: str) -> tuple[Impl, ...]:
    """One row per op with a kernel for this device type, which is also the backend's name."""
    return tuple(
        Impl(spec.name, device, (device,), run(spec)) for spec in OPS.values() if has_kernel(spec.name, device)
    )


_define()
