"""Calls of ``linear``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.ops.linear import Linear
from lowbit.ops.spec import FLOATS, dtype_name
from lowbit.testing import matmul
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, recipe_pairs, schemes


def make_call(x: Tensor, weight: Tensor, input: str | None, scheme: str, **more: object) -> Linear:
    """A call on the reference's quantization of a float weight ``[N, K]`` (tests, benchmarks)."""
    b = matmul.make_call(weight, weight, None, scheme)
    arguments = {"bias": None, "input": input, **more}
    return Linear(x, b.b, scheme, b.b_scale, b.b_zero_point, b.b_global_scale, **arguments)  # type: ignore[arg-type]


def _samples(device: str) -> Iterator[Linear]:
    """Every scheme as a weight's and as an input's; inputs of any rank."""
    texts = [s.name for s in schemes()]
    shapes = cycle([((1, 33), 5), ((2, 3, 64), 19), ((130,), 3), ((17, 7), 33), ((2, 2, 4, 96), 16)])
    dtypes = cycle(FLOATS)
    for step in (None, 0, 5, 44):
        for index, scheme in enumerate(texts):
            shape, n = next(shapes)
            x = random_matrix(torch.Size(shape[:-1]).numel(), shape[-1], device, seed=index).reshape(shape)
            weight = random_matrix(n, shape[-1], device, seed=index + 1000)
            bias = random_matrix(1, n, device, seed=7)[0] if index % 2 else None
            given = None if step is None else texts[(index + step) % len(texts)]
            dtype = next(dtypes)
            yield make_call(x.to(dtype), weight, given, scheme, bias=bias, out_dtype=dtype)


#: Rows of x that benchmarks multiply: tokens as they are generated, and a batch of them.
BENCHED_ROWS = (1, 4, 16, 512)


def example(m: int, n: int, k: int, input: str | None, scheme: str, dtype: torch.dtype) -> Linear:
    """A layer ``[n, k]`` on ``x [m, k]`` of ``dtype``, both Gaussian, for benchmarks."""
    weight, kind = large_matrix(n, k), scaling.scheme(scheme)
    global_scale = torch.ops.lowbit.global_scale(weight, scheme) if kind.global_scale else None
    codes, scale, zero = torch.ops.lowbit.quantize(weight, scheme, global_scale)
    x = large_matrix(m, k, dtype)
    return Linear(x, codes, scheme, scale, zero if kind.affine else None, global_scale, None, input, dtype)


def workload(m: int, n: int, k: int, input: str | None, scheme: str, dtype: torch.dtype) -> Workload:
    arrow = f" -> {input}" if input else ""
    call = partial(example, m, n, k, input, scheme, dtype)
    return Workload(f"{m}x{n}x{k}", f"{dtype_name(dtype)}{arrow} x {scheme}", call)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    """Every recipe's layer with a weight ``[rows, cols]`` on bf16 input, and on fp32 where the input is quantized."""
    pairs = dict.fromkeys((input.name if input else None, weight.name) for input, weight in recipe_pairs())
    for m in BENCHED_ROWS:
        for input, scheme in pairs:
            for dtype in (torch.bfloat16, torch.float32):
                if dtype == torch.bfloat16 or input is not None:
                    yield workload(m, rows, cols, input, scheme, dtype)


SAMPLES = {"linear": _samples}
WORKLOADS = {"linear": _workloads}
