"""Calls of ``linear_packed``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product

import torch
from torch import Tensor

from lowbit.ops.packed import LinearPacked
from lowbit.ops.spec import FLOATS
from lowbit.scaling import Scheme, scheme
from lowbit.tensor import prepack
from lowbit.tensor.quantized import Quantized
from lowbit.testing import linear
from lowbit.testing.inputs import Workload, random_matrix, recipe_pairs


def make_call(x: Tensor, weight: Tensor, input: str, kind: str, **more: object) -> LinearPacked:
    """A call on the reference's quantization of a float weight ``[N, K]`` (tests, benchmarks)."""
    call = linear.make_call(x, weight, input, kind, **more)
    made = (call.weight, call.scale, call.zero_point, call.global_scale)
    q = Quantized(*made, scheme(kind), weight.shape, weight.dtype)
    return LinearPacked(x, prepack.prepack(q, scheme(input)), weight.shape[0], call.bias, call.out_dtype)


#: Weights and inputs of every kind that has a packed layout.
_WEIGHTS = (
    "int8:row", "int4:row", "int4:group32", "int4:group128", "int8:group32:bf16", "uint8:row:affine",
    "uint4:group32:affine", "uint4:group16:affine:e8m0:ceil", "int4:group7",
)  # fmt: skip


_INPUTS = ("int8:row", "uint8:row:affine", "int8:group32", "int8:tensor")


def _samples(device: str) -> Iterator[LinearPacked]:
    """Panels with less than one row, dword or block, and with more than one of each; sums that int32 does not hold."""
    shapes = cycle((((3, 33), 5), ((2, 2, 256), 70), ((7,), 1), ((20, 96), 33), ((1, 300), 64)))
    pairs = [(next(shapes), pair) for pair in product(_INPUTS, _WEIGHTS) for _ in range(2)]
    for (shape, n), (input, kind) in (*pairs, (((2, 33000), 3), ("int8:row", "int8:row"))):
        x = random_matrix(torch.Size(shape[:-1]).numel(), shape[-1], device, seed=n).reshape(shape)
        weight, bias = random_matrix(n, shape[-1], device, seed=n + 1), random_matrix(1, n, device, seed=7)[0]
        dtype = FLOATS[(n + len(kind)) % 3]
        yield make_call(x.to(dtype), weight, input, kind, bias=bias, out_dtype=dtype)


def example(m: int, n: int, k: int, input: Scheme, kind: Scheme, dtype: torch.dtype) -> LinearPacked:
    """A layer ``[n, k]`` on ``x [m, k]`` of ``dtype``, both Gaussian, for benchmarks."""
    call = linear.example(m, n, k, input.name, kind.name, dtype)
    made = (call.weight, call.scale, call.zero_point, call.global_scale)
    q = Quantized(*made, kind, torch.Size((n, k)), dtype)
    return LinearPacked(call.x, prepack.prepack(q, input), n, None, dtype)


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    """The layers of recipes with integer weights and inputs."""
    for m, (input, kind) in product(linear.BENCHED_ROWS, recipe_pairs()):
        if input is not None and prepack.refusal(kind, input) is None:
            make = partial(example, m, rows, cols, input, kind, torch.float32)
            yield Workload(f"{m}x{rows}x{cols}", f"fp32 -> {input} x {kind}, packed", make)


SAMPLES = {"linear_packed": _samples}
WORKLOADS = {"linear_packed": _workloads}
