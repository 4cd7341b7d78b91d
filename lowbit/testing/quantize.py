"""Calls of the ops that quantize and dequantize: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops.quantize import (
    BlockRange,
    Dequantize,
    FakeQuantize,
    FakeQuantizeBackward,
    GlobalScale,
    Quantize,
    QuantizeGlobal,
    QuantizeStatic,
)
from lowbit.ops.spec import FLOATS, as_rows, dtype_name, matrix_shape
from lowbit.tensor import packing
from lowbit.testing.inputs import (
    Workload,
    large_matrix,
    random_matrix,
    recipe_schemes,
    sample_matrices,
    schemes,
    specials,
)


def _matrices(device: str) -> list[Tensor]:
    return [*sample_matrices(device), random_matrix(20, 70, device, seed=9, extremes=True)]


def ragged_matrices(device: str = "cpu") -> list[Tensor]:
    """One of each dtype, whose rows end within a block and within a byte."""
    shapes = zip(((7, 45), (1, 129), (33, 3)), FLOATS, strict=True)
    return [random_matrix(*shape, device, seed, extremes=True).to(dtype) for seed, (shape, dtype) in enumerate(shapes)]


def damaged_matrices(device: str = "cpu") -> list[Tensor]:
    """A matrix with every kind of damage here and there, one of tiny numbers, one of huge ones, and special ones."""
    generator = torch.Generator().manual_seed(0)
    mixed = random_matrix(5, 37, seed=11, extremes=True)
    mixed[1] = 0.0
    mixed[2, ::2] *= 2.0**-126
    tiny = torch.randn(3, 19, generator=generator) * 2.0**-136
    tiny[1] *= 2.0**-12
    tiny[2, 3] = -0.0
    largest = torch.finfo(torch.float32).max
    huge = torch.randn(2, 35, generator=generator).sign() * torch.rand(2, 35, generator=generator) * largest
    huge[0, 0], huge[0, 1] = largest, -largest
    return [x.to(device) for x in (mixed, tiny, huge, specials()[None, :])]


def _global_scale_of(x: Tensor, scheme: scaling.Scheme) -> Tensor | None:
    return reference.global_scale(as_rows(x.cpu()), scheme).to(x.device) if scheme.global_scale else None


def _global_scale_samples(device: str) -> Iterator[GlobalScale]:
    for name in ("nvfp4", "nf4:e4m3", "int4:group32:e4m3:full", "nvfp4:global_row"):
        for x in _matrices(device):
            yield GlobalScale(x, name)


def _quantize_global_samples(device: str) -> Iterator[QuantizeGlobal]:
    for name in ("nvfp4:global_row", "nvfp4", "int8:row:e4m3:global_row:ceil", "int4:group32:e4m3:full", "nf4:e4m3"):
        for x in _matrices(device):
            yield QuantizeGlobal(x, name)


def _range_samples(device: str) -> Iterator[BlockRange]:
    for call in _quantize_samples(device):
        if call.rounding == "nearest":
            yield BlockRange(call.x, call.scheme)


def _quantize_samples(device: str) -> Iterator[Quantize]:
    """Every scheme meets two matrices, and a ragged or damaged one; over all schemes every matrix is met many times."""
    matrices, rng = _matrices(device), torch.tensor([5, 2], device=device)
    others = [*ragged_matrices(device), *damaged_matrices(device)]
    for index, scheme in enumerate(schemes()):
        several = (
            matrices[index % len(matrices)],
            matrices[(index * 5 + 3) % len(matrices)],
            others[index % len(others)],
        )
        for x in several:
            yield Quantize(x, scheme.name, _global_scale_of(x, scheme), factors=_factors_for(x, index))
            pitch = 4096 if index % 2 else None
            yield Quantize(x, scheme.name, _global_scale_of(x, scheme), "stochastic", rng, 9, 1 << 33, pitch)


def _factors_for(x: Tensor, index: int) -> Tensor | None:
    """Of the rows, of the columns, or none."""
    rows, cols = matrix_shape(x)
    shape = ((rows, 1), (1, cols), None)[index % 3]
    return None if shape is None else random_matrix(*shape, seed=index).to(x.device)


def _static_samples(device: str) -> Iterator[QuantizeStatic]:
    for call in _quantize_samples(device):
        scheme = scaling.scheme(call.scheme)
        other = random_matrix(*matrix_shape(call.x), seed=77)  # scales of another tensor: some elements overflow
        global_scale = call.global_scale
        scale, zero = reference.block_scales(other, scheme, None if global_scale is None else global_scale.cpu())
        zero = None if zero is None else zero.to(device)
        yield QuantizeStatic(call.x, call.scheme, scale.to(device), zero, global_scale, *call[3:8])


def _dequantize_samples(device: str) -> Iterator[Dequantize]:
    for index, call in enumerate(_quantize_samples(device)):
        scheme, x = scaling.scheme(call.scheme), as_rows(call.x.cpu())
        global_scale = None if call.global_scale is None else call.global_scale.cpu()
        if call.rounding == "nearest":
            codes, scale, zero = reference.quantize(x, scheme, global_scale, None)
            stored = packing.pack(codes, scheme.format.bits)
            zero = None if zero is None else zero.to(device)
            dtype = FLOATS[(index + index // 6) % 3]  # of 6 calls a scheme has: each matrix meets every dtype
            yield Dequantize(
                stored.to(device), call.scheme, x.shape[1], scale.to(device), zero, call.global_scale, dtype
            )


def _fake_samples(device: str) -> Iterator[FakeQuantize]:
    for call in _quantize_samples(device):
        yield FakeQuantize(call.x, call.scheme, None, None, call.global_scale, *call[3:8])
    for static in _static_samples(device):
        yield FakeQuantize(*static)


def _backward_samples(device: str) -> Iterator[FakeQuantizeBackward]:
    for call in _fake_samples(device):
        if call.rounding == "nearest":
            grad = random_matrix(*matrix_shape(call.x), device, seed=3).reshape(call.x.shape).to(call.x.dtype)
            yield FakeQuantizeBackward(grad, *call[:5])


def _large(
    make: Callable[[Tensor, scaling.Scheme], Any], only: Callable[[scaling.Scheme], bool] = lambda scheme: True
) -> Callable[[int, int], Iterator[Workload]]:
    """Workloads of ``make(x, scheme)`` for fp32 and bf16 matrices and the schemes that recipes use."""

    def workloads(rows: int, cols: int) -> Iterator[Workload]:
        for scheme in filter(only, recipe_schemes()):
            for dtype in (torch.float32, torch.bfloat16):
                x = large_matrix(rows, cols, dtype)
                yield Workload(dtype_name(dtype), scheme.name, partial(make, x, scheme))

    return workloads


def _large_global_scale(x: Tensor, scheme: scaling.Scheme) -> Tensor | None:
    return torch.ops.lowbit.global_scale(x, scheme.name) if scheme.global_scale else None


def _large_parts(x: Tensor, scheme: scaling.Scheme) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, scale, zero point and global scale of ``x``, by whatever kernel serves it."""
    global_scale = _large_global_scale(x, scheme)
    codes, scale, zero = torch.ops.lowbit.quantize(x, scheme.name, global_scale)
    return codes, scale, zero if scheme.affine else None, global_scale


def _large_stored(x: Tensor, scheme: scaling.Scheme) -> Dequantize:
    codes, scale, zero_point, global_scale = _large_parts(x, scheme)
    return Dequantize(codes, scheme.name, x.shape[1], scale, zero_point, global_scale, x.dtype)


SAMPLES = {
    "global_scale": _global_scale_samples, "quantize_global": _quantize_global_samples,
    "block_range": _range_samples, "quantize": _quantize_samples, "quantize_static": _static_samples,
    "dequantize": _dequantize_samples, "fake_quantize": _fake_samples, "fake_quantize_backward": _backward_samples,
}  # fmt: skip
WORKLOADS = {
    "global_scale": _large(lambda x, s: GlobalScale(x, s.name), only=lambda s: bool(s.global_scale)),
    "quantize_global": _large(
        lambda x, s: QuantizeGlobal(x, s.name), only=lambda s: bool(s.global_scale) and not s.affine
    ),
    "block_range": _large(lambda x, s: BlockRange(x, s.name)),
    "quantize": _large(lambda x, s: Quantize(x, s.name, _large_global_scale(x, s))),
    "quantize_static": _large(lambda x, s: QuantizeStatic(x, s.name, *_large_parts(x, s)[1:])),
    "dequantize": _large(_large_stored),
    "fake_quantize": _large(lambda x, s: FakeQuantize(x, s.name, global_scale=_large_global_scale(x, s))),
    "fake_quantize_backward": _large(
        lambda x, s: FakeQuantizeBackward(x, x, s.name, global_scale=_large_global_scale(x, s))
    ),
}
