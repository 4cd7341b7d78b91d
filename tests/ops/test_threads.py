"""No bit of any op depends on the number of threads, on any instruction set: one sweep over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bits import assert_same_bits
from support.samples import samples
from support.variants import NATIVE, Kernel, Variant, kernels, threads
from torch import Tensor

import lowbit as lb
from lowbit.functional import linear
from lowbit.ops import OPS
from lowbit.testing.inputs import random_matrix
from lowbit.testing.matmul import make_call

COUNTS = (1, 2, 3)
SCHEMES = ("fp8_e4m3:row", "fp8_e5m2:tensor", "mxfp4:ceil", "mxfp6", "nvfp4", "int8:row", "uint4:group32:affine:bf16")

#: Operands of products.
PAIRS = (
    ("int8:row", "int8:row"), (None, "int4:group128"), ("fp8_e4m3:row", "fp8_e4m3:row"), ("mxfp4", "mxfp4"),
    (None, "nf4"), ("nvfp4", "nvfp4"), ("fp8_e4m3:group128", "fp8_e4m3:block128x128"), (None, None),
)  # fmt: skip


def products() -> Iterator[Tensor]:
    for m, n, k in ((1, 300, 256), (70, 90, 130), (200, 20, 65)):
        a, b = random_matrix(m, k, seed=1), random_matrix(n, k, seed=2)
        for left, right in PAIRS:
            call = make_call(a, b, left, right, out_dtype=torch.float32)
            yield torch.ops.lowbit.scaled_mm(**call._asdict())


def layers() -> Iterator[Tensor]:
    x, w = random_matrix(70, 515, seed=1), random_matrix(130, 515, seed=2)
    for input, weight in (("int8:row", "int4:group32"), ("int8:row", "int8:row"), (None, "mxfp4")):
        yield linear(x, lb.quantize(w, weight), None, input)


def rounded() -> Iterator[Tensor]:
    """Stochastically: random bits belong to places, not to threads."""
    x = random_matrix(130, 3001, seed=2)
    yield lb.encode(x, "fp8_e5m2", rounding=lb.Rounding(seed=1, offset=13))
    for name in SCHEMES:
        yield lb.quantize(x, name, rounding=lb.Rounding(seed=1)).codes


def gradients() -> Iterator[Tensor]:
    x, grad = random_matrix(140, 4203, seed=8), random_matrix(140, 4203, seed=9)
    for name in ("int8:tensor", "mxfp4", "uint4:group32:affine"):
        yield from torch.ops.lowbit.fake_quantize_backward(grad, x, name)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("made", [products, layers, rounded, gradients])
def test_large_calls(variant: Variant, made: Callable[[], Iterator[Tensor]]):
    found = []
    for count in COUNTS:
        with variant.use(), threads(count):
            found.append(list(made()))
    for other in found[1:]:
        for index, (a, b) in enumerate(zip(found[0], other, strict=True)):
            assert_same_bits(b, a, f"{made.__name__} {index}")


SAMPLED = [kernel for op in OPS for kernel in kernels(op) if kernel.variant.native]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kernel", SAMPLED, ids=str)
def test_samples_of_every_op(kernel: Kernel):
    calls = samples(kernel.op)[::11]
    found: list[list[Any]] = []
    for count in COUNTS:
        with threads(count):
            found.append([kernel.run(call) for call in calls])
    for other in found[1:]:
        for call, a, b in zip(calls, found[0], other, strict=True):
            assert (a is None) == (b is None)
            for x, y in zip(a or (), b or (), strict=True):
                assert_same_bits(y, x, f"{kernel}: {type(call).__name__}")
