"""Weights in the layouts of compressed-tensors: the tensors of a Quantized, and a Quantized from tensors.

Codes and scales are unchanged; only their packing differs. Integer codes are stored with an offset of half their range.
The global scale of NVFP4 is stored as its reciprocal, because readers divide by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.interop.compressed_tensors.schemes import Format
from lowbit.interop.directories.rules import Kind
from lowbit.scaling import Scheme, packed_cols
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized, Scales, scale_dtype, zero_dtype

__all__ = [
    "GROUPS",
    "STORAGES",
    "from_tensors",
    "input_kinds",
    "input_scales",
    "input_tensors",
    "to_tensors",
    "weight_kinds",
]


#: The name of the tensor with the group of each column, if columns are in the order of activations.
GROUPS = "weight_g_idx"


class Storage(NamedTuple):
    """How codes are stored.

    Attributes:
        name: The name of the tensor with the codes.
        dtype: Its dtype.
        cols: ``cols(K, bits)`` is its number of columns.
        store: ``store(codes, scheme, K)`` is the tensor, from packed codes ``[N, packed K]``.
        load: ``load(tensor, scheme, K)`` returns the packed codes.
    """

    name: str
    dtype: torch.dtype
    cols: Callable[[int, int], int]
    store: Callable[[Tensor, Scheme, int], Tensor]
    load: Callable[[Tensor, Scheme, int], Tensor]


def weight_kinds(format: Format, scheme: Scheme, shape: tuple[int, int]) -> dict[str, Kind]:
    """The tensors of a weight ``[N, K]`` by name."""
    rows, cols = shape
    storage, bits = STORAGES[format.storage], scheme.format.bits
    scales = scheme.scale_shape(rows, cols)
    kinds = {
        storage.name: Kind(storage.dtype, (rows, storage.cols(cols, bits))),
        "weight_scale": Kind(_stored_dtype(scheme), (1,) if scheme.block == (None, None) else scales),
    }
    if scheme.global_scale:
        kinds["weight_global_scale"] = Kind(torch.float32, (1,))
    if scheme.affine and format.storage == "words":
        kinds["weight_zero_point"] = Kind(torch.int32, (_words(rows, bits), scales[1]))
    elif scheme.affine:
        kinds["weight_zero_point"] = Kind(torch.int8, scales)
    if format.storage == "words":
        kinds["weight_shape"] = Kind(torch.int64, (2,))
    return kinds


def to_tensors(weight: Quantized, format: Format) -> dict[str, Tensor]:
    """The tensors of a weight ``[N, K]`` by name; groups must divide K.

    Raises:
        ValueError: A zero point is outside of the format.
    """
    scheme, (lines, cols) = weight.scheme, (int(size) for size in weight.shape)
    kinds = weight_kinds(format, scheme, (lines, cols))
    storage = STORAGES[format.storage]
    scale = weight.scale.view(torch.float8_e4m3fn) if scheme.global_scale else weight.scale
    tensors = {
        storage.name: storage.store(weight.codes, scheme, cols),
        "weight_scale": scale.reshape(kinds["weight_scale"].shape),
    }
    if weight.global_scale is not None:
        tensors["weight_global_scale"] = weight.global_scale.reshape(1).reciprocal()
    if weight.zero_point is not None:
        zero = _offset_zero(weight.zero_point, scheme)
        tensors["weight_zero_point"] = (
            _to_words(zero, scheme.format.bits)
            if format.storage == "words"
            else (zero ^ 128).view(torch.int8) + (128 - _half(scheme))
        )
    if format.storage == "words":
        tensors["weight_shape"] = torch.tensor([lines, cols])
    return {name: tensors[name].contiguous() for name in kinds}


def from_tensors(
    tensors: Mapping[str, Tensor], format: Format, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
) -> Quantized:
    """The weight ``[N, K]`` with these tensors, whose dtypes and shapes are those of ``weight_kinds``.

    Raises:
        ValueError: The values contradict the scheme.
    """
    rows, cols = shape
    storage, bits = STORAGES[format.storage], scheme.format.bits
    if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [rows, cols]:
        raise ValueError(f"weight_shape is {tensors['weight_shape'].tolist()}, expected {[rows, cols]}")
    zero_point = global_scale = None
    if scheme.affine:
        stored = tensors["weight_zero_point"]
        zero = (
            _from_words(stored, bits, rows)
            if format.storage == "words"
            else _offset_integers(stored, scheme, "weight_zero_point")
        )
        zero_point = zero.contiguous().view(zero_dtype(scheme))
    if scheme.global_scale:
        global_scale = tensors["weight_global_scale"].reshape(1, 1).reciprocal()
    scale = tensors["weight_scale"].view(scale_dtype(scheme)).reshape(scheme.scale_shape(rows, cols))
    codes = storage.load(tensors[storage.name], scheme, cols)
    return Quantized(codes, scale, zero_point, global_scale, scheme, torch.Size(shape), dtype)


# -- static inputs -----------------------------------------------------------------------------------------------------
def input_kinds(scheme: Scheme) -> dict[str, Kind]:
    """The tensors of static input scales by name."""
    zero = {"input_zero_point": Kind(torch.int8, (1,))} if scheme.affine else {}
    return {"input_scale": Kind(torch.float32, (1,)), **zero}


def input_tensors(scales: Scales, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of static input scales by name."""
    tensors = {"input_scale": scales.scale.reshape(1)}
    if scales.zero_point is not None:
        zero = _offset_zero(scales.zero_point, scheme)
        tensors["input_zero_point"] = ((zero ^ 128).view(torch.int8) + (128 - _half(scheme))).reshape(1)
    return tensors


def input_scales(tensors: Mapping[str, Tensor], scheme: Scheme) -> Scales:
    """The static input scales with these tensors. Raises ValueError if the zero point is outside of the format."""
    scale = tensors["input_scale"].float().reshape(1, 1)
    if not scheme.affine:
        return Scales(scale)
    zero = _offset_integers(tensors["input_zero_point"], scheme, "input_zero_point")
    return Scales(scale, zero.reshape(1, 1).view(zero_dtype(scheme)))


# -- codes -------------------------------------------------------------------------------------------------------------
def _stored_dtype(scheme: Scheme) -> torch.dtype:
    return torch.float8_e4m3fn if scheme.global_scale else scale_dtype(scheme)


def _half(scheme: Scheme) -> int:
    """The offset of stored integers, half their range."""
    return 1 << (scheme.format.bits - 1)


def _words(count: int, bits: int) -> int:
    """The 32-bit words of ``count`` codes."""
    return -(-count * bits // 32)


def _to_words(zero: Tensor, bits: int) -> Tensor:
    """Zero points ``[N, C]``, one per byte, packed along N: ``[words, C]``."""
    return _padded(pack(zero.t(), bits)).t()


def _from_words(words: Tensor, bits: int, rows: int) -> Tensor:
    """Zero points ``[N, C]`` from words ``[words, C]``."""
    lines = torch.empty(words.t().shape, dtype=torch.int32, device=words.device).copy_(words.t())
    return unpack(lines.view(torch.uint8)[:, : packed_cols(rows, bits)], bits, rows).t()


def _padded(packed: Tensor) -> Tensor:
    """Bytes ``[R, B]`` as words, with zeros after them."""
    rows, cols = packed.shape
    room = torch.zeros(rows, -(-cols // 4) * 4, dtype=torch.uint8, device=packed.device)
    room[:, :cols] = packed
    return room.view(torch.int32)


def _flips(scheme: Scheme, cols: int, device: torch.device) -> Tensor:
    """The bits of a packed row that differ between two's complement and codes with an offset."""
    flip = _half(scheme) if scheme.format.signed else 0
    return pack(torch.full((1, cols), flip, dtype=torch.uint8, device=device), scheme.format.bits)


def _to_packed_words(codes: Tensor, scheme: Scheme, cols: int) -> Tensor:
    return _padded(codes ^ _flips(scheme, cols, codes.device))


def _from_packed_words(words: Tensor, scheme: Scheme, cols: int) -> Tensor:
    bits = scheme.format.bits
    codes = words.contiguous().view(torch.uint8)[:, : packed_cols(cols, bits)] ^ _flips(scheme, cols, words.device)
    if cols * bits % 8:  # other writers may leave bits after the last code
        codes[:, -1] &= (1 << cols * bits % 8) - 1
    return codes


def _to_int8(codes: Tensor, scheme: Scheme, cols: int) -> Tensor:
    offset = unpack(codes, scheme.format.bits, cols)
    if scheme.format.signed:
        offset = offset ^ _half(scheme)
    return (offset ^ 128).view(torch.int8) + (128 - _half(scheme))


def _from_int8(integers: Tensor, scheme: Scheme, cols: int) -> Tensor:
    return pack(_offset_integers(integers, scheme, "weight"), scheme.format.bits)


def _offset_integers(integers: Tensor, scheme: Scheme, name: str) -> Tensor:
    """int8 values as codes of the scheme, one per byte. Raises ValueError for values outside of its bits."""
    half = _half(scheme)
    if half < 128 and not bool(((integers >= -half) & (integers < half)).all()):
        raise ValueError(f"{name} has values outside of {scheme.format.bits} bits, from {-half} to {half - 1}")
    offset = (integers - (128 - half)).view(torch.uint8) ^ 128
    return offset ^ half if scheme.format.signed else offset


def _offset_zero(zero: Tensor, scheme: Scheme) -> Tensor:
    """Zero points with the offset of codes, uint8. Raises ValueError for zero points outside of the format."""
    format = scheme.format
    if not bool(((zero >= format.qmin) & (zero <= format.qmax)).all()):
        raise ValueError(f"a zero point is outside of {format.name}, {format.qmin} to {format.qmax}")
    return (zero.to(torch.int16) - format.qmin).to(torch.uint8)


def _same(codes: Tensor, scheme: Scheme, cols: int) -> Tensor:
    return codes


#: Storages by name.
STORAGES: dict[str, Storage] = {
    "words": Storage("weight_packed", torch.int32, _words, _to_packed_words, _from_packed_words),
    "int8": Storage("weight", torch.int8, lambda cols, bits: cols, _to_int8, _from_int8),
    "float8": Storage(
        "weight", torch.float8_e4m3fn, lambda cols, bits: cols,
        lambda codes, scheme, cols: codes.view(torch.float8_e4m3fn),
        lambda tensor, scheme, cols: tensor.view(torch.uint8),
    ),
    "bytes": Storage("weight_packed", torch.uint8, packed_cols, _same, _same),
}  # fmt: skip
