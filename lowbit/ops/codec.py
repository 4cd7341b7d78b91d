"""The ops without scales: encode, decode, pack, unpack.  Source: docs/numerics.md sections 2 to 4, 7, 8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import formats
from lowbit.ops.samples import element_formats, large_matrix, sample_matrices
from lowbit.ops.spec import (
    FLOATS,
    Cost,
    OpSpec,
    Out,
    Workload,
    dtype_name,
    require,
    require_codes,
    require_float,
    require_rounding,
)
from lowbit.tensor import packing


class Encode(NamedTuple):
    x: Tensor
    format: str
    rounding: str = "nearest"
    saturate: bool = True
    seed: int = 0
    step: int = 0
    stream: int = 0
    offset: int = 0
    pitch: int | None = None


class Decode(NamedTuple):
    codes: Tensor
    format: str
    dtype: torch.dtype = torch.float32


class Pack(NamedTuple):
    codes: Tensor
    bits: int


class Unpack(NamedTuple):
    packed: Tensor
    bits: int
    cols: int


def _check_encode(call: Encode) -> None:
    require_float("encode", "x", call.x)
    format = formats.find(call.format)
    format.require_codes("lowbit.encode")
    require(
        format.kind != "exponent",
        f"lowbit.encode: {format.name} holds scales, which are made by quantize(x, 'FORMAT:SCALING:e8m0')",
    )
    require_rounding("encode", call.rounding, format)


def _encode_samples(device: str) -> Iterator[Encode]:
    for x in sample_matrices(device):
        for format in element_formats():
            yield Encode(x, format.name)
            if format.kind != "codebook":
                yield Encode(x, format.name, "stochastic", False, seed=7, step=3, stream=11, offset=5, pitch=1000)


def _check_decode(call: Decode) -> None:
    require_codes("decode", "codes", call.codes)
    formats.find(call.format).require_codes("lowbit.decode")
    require(call.dtype in FLOATS, f"lowbit.decode: dtype must be float32, bfloat16 or float16, got {call.dtype}")


def _decode_samples(device: str) -> Iterator[Decode]:
    for name, format in formats.FORMATS.items():
        if format.bits <= 8:
            codes = torch.arange(1 << format.bits, dtype=torch.uint8, device=device)
            for dtype in FLOATS:
                yield Decode(codes.repeat(3).reshape(3, -1)[:, 1:], name, dtype)


def _check_pack(call: Pack | Unpack) -> None:
    codes = call.codes if isinstance(call, Pack) else call.packed
    op = "pack" if isinstance(call, Pack) else "unpack"
    require_codes(op, "codes" if isinstance(call, Pack) else "packed", codes)
    require(1 <= call.bits <= 8, f"lowbit.{op}: bits must be 1 to 8, got {call.bits}")
    require(codes.dim() >= 1, f"lowbit.{op}: needs at least one axis, got a scalar")
    if isinstance(call, Unpack):
        expected = packing.packed_cols(call.cols, call.bits)
        require(
            call.packed.shape[-1] == expected,
            f"lowbit.unpack: {call.cols} codes of {call.bits} bits take {expected} bytes a row, "
            f"got {call.packed.shape[-1]}",
        )


def _pack_samples(device: str) -> Iterator[Pack]:
    for bits in range(1, 9):
        for shape in ((3, 64), (5, 13), (2, 1), (7,)):
            numbers = torch.arange(torch.Size(shape).numel(), device=device) * 37 % (1 << bits)
            yield Pack(numbers.to(torch.uint8).reshape(shape), bits)


def _unpack_samples(device: str) -> Iterator[Unpack]:
    for call in _pack_samples(device):
        yield Unpack(packing.pack(call.codes, call.bits), call.bits, call.codes.shape[-1])


def _pack_outputs(call: Pack) -> list[Out]:
    return [((*call.codes.shape[:-1], packing.packed_cols(call.codes.shape[-1], call.bits)), torch.uint8)]


# -- workloads ---------------------------------------------------------------------------------------------------------
def _encode_workloads(rows: int, cols: int) -> Iterator[Workload]:
    x = large_matrix(rows, cols)
    for format in element_formats():
        yield Workload("", format.name, partial(Encode, x, format.name))
        if format.kind != "codebook":
            yield Workload("stochastic", format.name, partial(Encode, x, format.name, "stochastic"))


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


SPECS = (
    OpSpec(
        "encode", Encode, ("out",), lambda call: [(tuple(call.x.shape), torch.uint8)], _check_encode, _encode_samples,
        lambda call: Cost(0, call.x.numel() * (call.x.element_size() + 1)), _encode_workloads,
    ),
    OpSpec(
        "decode", Decode, ("out",), lambda call: [(tuple(call.codes.shape), call.dtype)],
        _check_decode, _decode_samples,
        lambda call: Cost(0, call.codes.numel() * (1 + call.dtype.itemsize)), _decode_workloads,
    ),
    OpSpec(
        "pack", Pack, ("out",), _pack_outputs, _check_pack, _pack_samples,
        lambda call: Cost(0, call.codes.numel() * (8 + call.bits) // 8), _pack_workloads,
    ),
    OpSpec(
        "unpack", Unpack, ("out",), lambda call: [((*call.packed.shape[:-1], call.cols), torch.uint8)],
        _check_pack, _unpack_samples, lambda call: Cost(0, call.packed.numel() * (8 + call.bits) // call.bits),
        _unpack_workloads,
    ),
)  # fmt: skip
