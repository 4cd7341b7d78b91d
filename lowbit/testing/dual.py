"""Calls of ``quantize_both``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lowbit.ops.dual import QuantizeBoth
from lowbit.ops.spec import FLOATS
from lowbit.testing.inputs import Workload, large_matrix, random_matrix

#: Two schemes and the block of the transform: those of recipes, blocks larger than tiles, and blocks in no tile.
PAIRS = (
    ("mxfp8:ceil", "mxfp8:ceil:T", 1), ("mxfp4:nearest", "mxfp4:nearest:T", 32), ("mxfp4:ceil", "mxfp4:ceil:T", 32),
    ("nvfp4:global_row", "nvfp4:T", 16), ("nvfp4:ceil", "nvfp4:ceil:T", 16),
    ("fp8_e4m3:group128", "fp8_e4m3:group128:T", 1), ("fp8_e4m3:row:e8m0:ceil", "fp8_e4m3:row:e8m0:ceil:T", 1),
    ("int8:row", "int8:col", 128), ("int8:tensor", "mxfp6", 16), ("fp8_e5m2:block128x128", "int4:group32:fp16", 2),
    ("int4:group7", "fp6_e2m3:mx", 1), ("int4:group32:full", "nf4", 16),
)  # fmt: skip


def _samples(device: str) -> Iterator[QuantizeBoth]:
    rng = torch.tensor([7, 3], device=device)
    sizes = ((64, 96), (32, 33), (20, 70), (256, 160), (1, 5), (96, 1))
    for index, (scheme, other, block) in enumerate(PAIRS):
        for place in (index, index + 1, index + 3):
            rows, cols = sizes[place % len(sizes)]
            x = random_matrix(rows, cols, device, seed=place, extremes=True).to(FLOATS[place % 3])
            x = x.t().contiguous().t() if place % 2 else x
            yield QuantizeBoth(x, scheme, other, block)
            if "nf4" not in (scheme, other):  # codebooks are rounded to nearest
                yield QuantizeBoth(x, scheme, other, block, "nearest", "stochastic", rng, 4, 9)
                yield QuantizeBoth(x, scheme, other, block, "stochastic", "stochastic", rng, 4, 9)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    for scheme, other, block in PAIRS[:6]:
        yield Workload("", f"{scheme} and {other}", partial(_make, rows, cols, scheme, other, block))


def _make(rows: int, cols: int, scheme: str, other: str, block: int) -> QuantizeBoth:
    return QuantizeBoth(large_matrix(rows, cols, torch.bfloat16), scheme, other, block)


SAMPLES = {"quantize_both": _samples}
WORKLOADS = {"quantize_both": _workloads}
