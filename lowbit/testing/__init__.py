"""Calls of every op, made from the tables: small ones to test kernels with, and large ones to measure them with.

``SAMPLES[op](device)`` yields small calls that cover formats, schemes, shapes and strides: test a kernel of your own
with them, against ``lowbit.reference``. ``WORKLOADS[op](rows, cols)`` yields large calls, for benchmarks. The library
itself does not import this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lowbit.testing import codec, conv, dual, fused, grouped, linear, matmul, optim, packed, quantize, rotation
from lowbit.testing.inputs import Workload

__all__ = ["SAMPLES", "WORKLOADS", "Workload"]

_MODULES = (codec, quantize, dual, matmul, grouped, linear, packed, conv, optim, rotation, fused)

SAMPLES: dict[str, Callable[[str], Iterator[Any]]] = {
    name: make for module in _MODULES for name, make in module.SAMPLES.items()
}
WORKLOADS: dict[str, Callable[[int, int], Iterator[Workload]]] = {
    name: make for module in _MODULES for name, make in module.WORKLOADS.items()
}
