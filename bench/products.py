"""Benchmarks matmuls that ``lowbit bench`` skips: other shapes, mixed formats, and weight-only in all narrow formats.

``lowbit bench products`` writes products.md, products.csv and products.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from lowbit.bench import run as bench
from lowbit.bench import work
from lowbit.ops import OPS
from lowbit.testing import WORKLOADS, Workload, linear, matmul

#: (M, N, K) of matmuls with two quantized operands.
SHAPES = ((2048, 2048, 2048), (512, 4096, 4096), (2048, 4096, 1024))

#: Schemes of both operands, for ``scaled_mm`` and for a layer from float to float.
PAIRS = (
    ("fp8_e4m3:tensor", "fp8_e4m3:tensor"), ("fp8_e4m3:row", "fp8_e4m3:row"), ("fp8_e4m3:row", "fp8_e5m2:row"),
    ("fp8_e4m3:group128", "fp8_e4m3:block128x128"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"),
)  # fmt: skip
LAYERS = (("int8:row", "int8:row"), ("int8:row", "int4:group128"))

#: Weight-only schemes; below, the input rows, and the rows and columns of the weight.
WEIGHTS = (
    "int8:row", "fp8_e4m3:row", "fp6_e3m2:row", "int4:group32", "int4:group128", "nf4", "fp4_e2m1:group32", "mxfp4",
    "nvfp4",
)  # fmt: skip
ROWS = (1, 4, 16, 128, 512)
WEIGHT_SIZE = (4096, 4096)


def workloads() -> Iterator[tuple[str, Workload]]:
    """Workloads with their ops."""
    others = {(op, w.variant, w.subject) for op in ("linear", "scaled_mm") for w in WORKLOADS[op](*bench.SIZE)}
    yield from ((op, w) for op, w in _all() if (op, w.variant, w.subject) not in others)


def _all() -> Iterator[tuple[str, Workload]]:
    for shape in SHAPES:
        yield from (("scaled_mm", matmul.workload(*shape, a, b)) for a, b in PAIRS)
        yield from (("linear", linear.workload(*shape, a, b, torch.float32)) for a, b in LAYERS)
    for m in ROWS:
        for scheme in WEIGHTS:
            dtypes = (torch.bfloat16, torch.float32, torch.float16) if scheme == "int4:group128" else (
                torch.bfloat16, torch.float32)  # fmt: skip
            yield from (("linear", linear.workload(m, *WEIGHT_SIZE, None, scheme, dtype)) for dtype in dtypes)


def run(directory: Path) -> Path:
    """Measure all, write the results, and return the path of ``products.md``."""
    items = [work.item(OPS[op], w) for op, w in workloads()]
    shapes = "Products are M x N x K; weights that `lowbit bench` measures are in its results"
    return bench.run(items, directory, name="products", shapes=shapes)[0]
