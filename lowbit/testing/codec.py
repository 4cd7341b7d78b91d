"""Calls of ``encode``, ``decode``, ``pack`` and ``unpack``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lowbit import formats
from lowbit.ops.codec import Decode, Encode, Pack, Transpose, Unpack
from lowbit.ops.spec import FLOATS, dtype_name
from lowbit.tensor import packing
from lowbit.testing.inputs import Workload, element_formats, large_matrix, sample_matrices


def _encode_samples(device: str) -> Iterator[Encode]:
    rng = torch.tensor([7, 3], device=device)
    for x in sample_matrices(device):
        for format in element_formats():
            yield Encode(x, format.name)
            yield Encode(x, format.name, "stochastic", False, rng, stream=11, offset=5, pitch=1000)


def _decode_samples(device: str) -> Iterator[Decode]:
    for name, format in formats.FORMATS.items():
        if format.bits <= 8:
            codes = torch.arange(1 << format.bits, dtype=torch.uint8, device=device)
            for dtype in FLOATS:
                yield Decode(codes.repeat(3).reshape(3, -1)[:, 1:], name, dtype)


def _pack_samples(device: str) -> Iterator[Pack]:
    for bits in range(1, 9):
        for shape in ((3, 64), (5, 13), (2, 1), (7,)):
            numbers = torch.arange(torch.Size(shape).numel(), device=device) * 37 % (1 << bits)
            yield Pack(numbers.to(torch.uint8).reshape(shape), bits)


def _unpack_samples(device: str) -> Iterator[Unpack]:
    for call in _pack_samples(device):
        yield Unpack(packing.pack(call.codes, call.bits), call.bits, call.codes.shape[-1])


def _transpose_samples(device: str) -> Iterator[Transpose]:
    for bits in range(1, 9):
        for rows, cols in ((3, 64), (64, 64), (70, 13), (1, 9), (130, 5)):
            codes = _some_codes(rows, cols, bits)
            packed = packing.pack(codes, bits).to(device)
            yield Transpose(packed, bits, cols)
            yield Transpose(packed.t().contiguous().t(), bits, cols)


def _encode_workloads(rows: int, cols: int) -> Iterator[Workload]:
    x = large_matrix(rows, cols)
    for format in element_formats():
        yield Workload("", format.name, partial(Encode, x, format.name))
        drawn = partial(Encode, x, format.name, "stochastic", rng=torch.zeros(2, dtype=torch.int64))
        yield Workload("stochastic", format.name, drawn)


def _some_codes(rows: int, cols: int, bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8, generator=generator)


def _decode_workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(format: formats.Format, dtype: torch.dtype) -> Decode:
        return Decode(_some_codes(rows, cols, format.bits), format.name, dtype)

    for format in element_formats():
        for dtype in (torch.float32, torch.bfloat16):
            yield Workload(f"to {dtype_name(dtype)}", format.name, partial(make, format, dtype))


def _packed_bits() -> list[int]:
    return sorted({format.bits for format in element_formats() if format.bits < 8})


def _pack_workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(bits: int) -> Pack:
        return Pack(_some_codes(rows, cols, bits), bits)

    for bits in _packed_bits():
        yield Workload("", f"{bits} bits", partial(make, bits))


def _unpack_workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(bits: int) -> Unpack:
        return Unpack(_some_codes(rows, packing.packed_cols(cols, bits), 8), bits, cols)

    for bits in _packed_bits():
        yield Workload("", f"{bits} bits", partial(make, bits))


def _transpose_workloads(rows: int, cols: int) -> Iterator[Workload]:
    def make(bits: int) -> Transpose:
        return Transpose(_some_codes(rows, packing.packed_cols(cols, bits), 8), bits, cols)

    for bits in _packed_bits():
        yield Workload("", f"{bits} bits", partial(make, bits))


SAMPLES = {
    "encode": _encode_samples, "decode": _decode_samples, "pack": _pack_samples, "unpack": _unpack_samples,
    "transpose": _transpose_samples,
}  # fmt: skip
WORKLOADS = {
    "encode": _encode_workloads, "decode": _decode_workloads, "pack": _pack_workloads, "unpack": _unpack_workloads,
    "transpose": _transpose_workloads,
}  # fmt: skip
