"""Kernels of the native library as rows of the registry: what the CPU and CUDA backends share.

``torch.ops.lowbit_native.NAME`` takes the arguments of the op of that name and its outputs to fill, formats and schemes
by name (csrc/ops_entry.h). A kernel that the library has for a device is a row, without another word here.
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
    """The schemas, which are the ops' own; the library brings the kernels."""
    if loading_error() is None:
        for spec in OPS.values():
            _library.define(f"{spec.name}({spec.positional[1]}) -> ()")


def has_kernel(op: str, device: str) -> bool:
    """Whether the library was built with a kernel of the op for a type of device."""
    return loading_error() is None and dispatches_to(f"lowbit_native::{op}", device.upper())


def run(spec: OpSpec) -> Run:
    """Runs the kernel of an op."""

    def run_native(outs: tuple[Tensor, ...], call: Any) -> None:
        getattr(torch.ops.lowbit_native, spec.name)(*call, *outs)

    return run_native


def rows(device: str) -> tuple[Impl, ...]:
    """A row for each op that the library has a kernel of for this device, whose name is the backend's too."""
    return tuple(
        Impl(spec.name, device, (device,), run(spec)) for spec in OPS.values() if has_kernel(spec.name, device)
    )


_define()
