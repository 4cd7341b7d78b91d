"""The ops without scales: encode, decode, pack, unpack, transpose. Source: docs/numerics.md sections 2 to 4, 7, 8."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import formats
from lowbit.ops.spec import (
    FLOATS,
    Cost,
    OpSpec,
    Out,
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
    rng: Tensor | None = None
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
    require_rounding("encode", call)


class Transpose(NamedTuple):
    """``packed [rows, bytes]``: rows of ``cols`` codes of ``bits`` bits. The result has the columns as packed rows."""

    packed: Tensor
    bits: int
    cols: int


def _check_decode(call: Decode) -> None:
    require_codes("decode", "codes", call.codes)
    formats.find(call.format).require_codes("lowbit.decode")
    require(call.dtype in FLOATS, f"lowbit.decode: dtype must be float32, bfloat16 or float16, got {call.dtype}")


def _check_pack(call: Pack | Unpack | Transpose) -> None:
    codes = call.codes if isinstance(call, Pack) else call.packed
    op = {Pack: "pack", Unpack: "unpack", Transpose: "transpose"}[type(call)]
    require_codes(op, "codes" if isinstance(call, Pack) else "packed", codes)
    require(1 <= call.bits <= 8, f"lowbit.{op}: bits must be 1 to 8, got {call.bits}")
    require(codes.dim() >= 1, f"lowbit.{op}: needs at least one axis, got a scalar")
    require(
        codes.dim() == 2 or not isinstance(call, Transpose),
        f"lowbit.transpose: packed must be a matrix [rows, bytes], got {list(codes.shape)}",
    )
    if not isinstance(call, Pack):
        expected = packing.packed_cols(call.cols, call.bits)
        require(
            call.packed.shape[-1] == expected,
            f"lowbit.{op}: {call.cols} codes of {call.bits} bits take {expected} bytes a row, "
            f"got {call.packed.shape[-1]}",
        )


def _pack_outputs(call: Pack) -> list[Out]:
    return [((*call.codes.shape[:-1], packing.packed_cols(call.codes.shape[-1], call.bits)), torch.uint8)]


SPECS = (
    OpSpec(
        "encode", Encode, ("out",), lambda call: [(tuple(call.x.shape), torch.uint8)], _check_encode,
        lambda call: Cost(0, call.x.numel() * (call.x.element_size() + 1)),
    ),
    OpSpec(
        "decode", Decode, ("out",), lambda call: [(tuple(call.codes.shape), call.dtype)],
        _check_decode,
        lambda call: Cost(0, call.codes.numel() * (1 + call.dtype.itemsize)),
    ),
    OpSpec(
        "pack", Pack, ("out",), _pack_outputs, _check_pack,
        lambda call: Cost(0, call.codes.numel() * (8 + call.bits) // 8),
    ),
    OpSpec(
        "unpack", Unpack, ("out",), lambda call: [((*call.packed.shape[:-1], call.cols), torch.uint8)],
        _check_pack, lambda call: Cost(0, call.packed.numel() * (8 + call.bits) // call.bits),
    ),
    OpSpec(
        "transpose", Transpose, ("out",),
        lambda call: [((call.cols, packing.packed_cols(call.packed.shape[0], call.bits)), torch.uint8)],
        _check_pack, lambda call: Cost(0, 2 * call.packed.numel()),
    ),
)  # fmt: skip
