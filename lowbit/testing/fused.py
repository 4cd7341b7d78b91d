"""Calls of ``rms_norm``, ``swiglu`` and ``rotary``, and of their gradients: small ones for tests, large ones for
benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from lowbit.ops.fused import (
    ACTIVATIONS,
    RMSNorm,
    RMSNormBackward,
    Rotary,
    Swiglu,
    SwigluBackward,
)
from lowbit.ops.spec import FLOATS, dtype_name
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, sample_matrices

#: One row, numbers of columns between powers of two, and rows of several blocks of 64.
_SHAPES = ((1, 1), (3, 257), (64, 33), (130, 40), (2, 2050))


def _matrices(device: str) -> Iterator[Tensor]:
    yield from sample_matrices(device)
    for index, (rows, cols) in enumerate(_SHAPES):
        yield torch.randn(rows, cols, generator=torch.Generator().manual_seed(index)).to(device, FLOATS[index % 3])


def _like(x: Tensor, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """Gaussian numbers of the shape of ``x``, some of them special."""
    cols = x.shape[-1] if x.dim() else 1
    made = random_matrix(x.numel() // max(cols, 1), cols, seed=seed, extremes=x.numel() > 100)
    return made.reshape(x.shape).to(x.device, dtype or x.dtype)


def _norm_samples(device: str) -> Iterator[RMSNorm]:
    for index, x in enumerate(_matrices(device)):
        weight = _like(x[..., :0].new_empty(x.shape[-1:]), index, FLOATS[index // 2 % 3])
        yield RMSNorm(x, weight, (1e-6, 1e-5, 0.0)[index % 3], index % 2)


def _norm_backward_samples(device: str) -> Iterator[RMSNormBackward]:
    for index, call in enumerate(_norm_samples(device)):
        wide = call.x.float()
        rstd = ((wide * wide).mean(-1) + call.eps).rsqrt()
        grad = _like(call.x, 50 + index, FLOATS[index % 3])
        yield RMSNormBackward(grad, call.x, call.weight, rstd, call.offset, index % 5 != 4)


def _swiglu_samples(device: str) -> Iterator[Swiglu]:
    for index, x in enumerate(_matrices(device)):
        for activation in ACTIVATIONS:
            yield Swiglu(x, _like(x, index), activation)
    for activation, dtype in product(ACTIVATIONS, FLOATS):  # where exp overflows, vanishes, and is subnormal
        gate = torch.linspace(-110, 110, 4001, device=device).to(dtype)
        yield Swiglu(gate, torch.ones_like(gate), activation)
        yield Swiglu(gate / 16, torch.full_like(gate, -3.0), activation)


def _swiglu_backward_samples(device: str) -> Iterator[SwigluBackward]:
    for index, call in enumerate(_swiglu_samples(device)):
        yield SwigluBackward(_like(call.gate, 90 + index, FLOATS[index % 3]), *call)


def _rotary_samples(device: str) -> Iterator[Rotary]:
    """Layouts of transformers ([batch, heads, tokens, n], as a view) and others, tables of one batch and of each."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x = numbers(2, 5, 3, 16)
    for interleaved, dtype in product((False, True), FLOATS):
        yield Rotary(x.to(dtype).transpose(1, 2), numbers(5, 8), numbers(5, 8), interleaved)
        yield Rotary(x.to(dtype), numbers(2, 5, 1, 8).to(dtype), numbers(2, 5, 1, 8).to(dtype), interleaved)
        yield Rotary(x[:, :, 0].to(dtype), numbers(2, 5, 3).half(), numbers(2, 5, 3).half(), interleaved)
        yield Rotary(x[0, 0].t().to(dtype), numbers(1, 1), numbers(1, 1), interleaved)
    odd = random_matrix(21, 70, device, seed=3, extremes=True)
    yield Rotary(odd, _like(odd[:, :33], 4), _like(odd[:, :33], 5))
    yield Rotary(odd.bfloat16()[:, 1:68], _like(odd[:, :33], 6)[:, ::3], _like(odd[:, :33], 7)[:, ::3], True)


# -- large ones --------------------------------------------------------------------------------------------------------
def _norm_workloads(rows: int, cols: int) -> Iterator[Workload]:
    for dtype in FLOATS[:2]:
        yield Workload("", dtype_name(dtype), partial(_large_norm, rows, cols, dtype))


def _norm_backward_workloads(rows: int, cols: int) -> Iterator[Workload]:
    for dtype in FLOATS[:2]:
        yield Workload("", dtype_name(dtype), partial(_large_norm_backward, rows, cols, dtype))


def _large_norm(rows: int, cols: int, dtype: torch.dtype) -> RMSNorm:
    x = large_matrix(rows, cols, dtype)
    return RMSNorm(x, x[0], 1e-6)


def _large_norm_backward(rows: int, cols: int, dtype: torch.dtype) -> RMSNormBackward:
    x = large_matrix(rows, cols, dtype)
    return RMSNormBackward(x, x, x[0], torch.ones(rows))


def _swiglu_workloads(rows: int, cols: int, backward: bool = False) -> Iterator[Workload]:
    for activation, dtype in product(ACTIVATIONS, FLOATS[:2]):
        make = partial(_large_gates, rows, cols, dtype, activation, backward)
        yield Workload("", f"{activation} {dtype_name(dtype)}", make)


def _large_gates(rows: int, cols: int, dtype: torch.dtype, activation: str, backward: bool) -> Swiglu | SwigluBackward:
    x = large_matrix(rows, cols, dtype)
    return SwigluBackward(x, x, x, activation) if backward else Swiglu(x, x, activation)


def _rotary_workloads(rows: int, cols: int) -> Iterator[Workload]:
    """Heads of 128 columns, or fewer."""
    for interleaved, dtype in product((False, True), FLOATS[:2]):
        make = partial(_large_rotary, rows, cols, dtype, interleaved)
        yield Workload("", f"{dtype_name(dtype)}{' interleaved' * interleaved}", make)


def _large_rotary(rows: int, cols: int, dtype: torch.dtype, interleaved: bool) -> Rotary:
    size = min(cols, 128)
    angles = torch.arange(rows * (size // 2)).reshape(rows, 1, -1) / 100
    heads = large_matrix(rows, cols - cols % size, dtype).unflatten(1, (-1, size))
    return Rotary(heads, angles.cos(), angles.sin(), interleaved)


SAMPLES = {
    "rms_norm": _norm_samples,
    "rms_norm_backward": _norm_backward_samples,
    "swiglu": _swiglu_samples,
    "swiglu_backward": _swiglu_backward_samples,
    "rotary": _rotary_samples,
}
WORKLOADS = {
    "rms_norm": _norm_workloads,
    "rms_norm_backward": _norm_backward_workloads,
    "swiglu": _swiglu_workloads,
    "swiglu_backward": partial(_swiglu_workloads, backward=True),
    "rotary": _rotary_workloads,
}
