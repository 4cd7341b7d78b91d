"""Calls of ``hadamard``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from lowbit.ops.rotation import Hadamard
from lowbit.ops.spec import FLOATS, as_rows, dtype_name
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, sample_matrices


def _samples(device: str) -> Iterator[Hadamard]:
    """Along both axes, with what is left at the end of a row, and strides."""
    for index, x in enumerate(sample_matrices(device)):
        for axis in (0, 1):
            yield Hadamard(as_rows(x), (1, 2, 16, 32, 64, 128)[index % 6], axis, index % 2 == 0)
    for rows, cols in ((3, 272), (70, 33), (1, 1), (5, 500)):
        for block, dtype in product((16, 128, 256), FLOATS):
            x = random_matrix(rows, cols, device, seed=block).to(dtype)
            yield Hadamard(x, block, 1, block <= 128)
            yield Hadamard(x.t(), block, 0)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    for block, axis in product((16, 128), (0, 1)):
        for dtype in (torch.bfloat16,):
            subject = f"{dtype_name(dtype)} in {block} along {('rows', 'columns')[axis]}"
            yield Workload("", subject, partial(_make, rows, cols, dtype, block, axis))


def _make(rows: int, cols: int, dtype: torch.dtype, block: int, axis: int) -> Hadamard:
    return Hadamard(large_matrix(rows, cols, dtype), block, axis)


SAMPLES = {"hadamard": _samples}
WORKLOADS = {"hadamard": _workloads}
