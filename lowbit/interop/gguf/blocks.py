"""GGUF's block types: the bytes of a block as a row of fields, which encode and decode the parts of a ``Quantized``.

Source: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lowbit.interop.layouts import from_runs, runs
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized

__all__ = ["BLOCK_TYPES", "BlockType", "block_type", "from_blocks", "to_blocks"]

#: The parts of a Quantized by block: ``codes [n, size]``, unsigned; other parts ``[n, count]``.
Parts = dict[str, Tensor]


class Field(Protocol):
    """Some bytes of a block."""

    def nbytes(self, size: int) -> int:
        """The number of bytes in a block of ``size`` elements."""

    def write(self, parts: Parts) -> Tensor:
        """The bytes ``[n, nbytes]`` of n blocks."""

    def read(self, raw: Tensor, parts: Parts) -> None:
        """Fill ``parts`` from the bytes ``[n, nbytes]``."""


class Codes(NamedTuple):
    """``width`` bits of each code, from bit ``shift`` on, in the order of ``layouts.runs``."""

    width: int
    run: int
    shift: int = 0

    def nbytes(self, size: int) -> int:
        return size * self.width // 8

    def write(self, parts: Parts) -> Tensor:
        return runs(parts["codes"] >> self.shift & ((1 << self.width) - 1), self.width, self.run)

    def read(self, raw: Tensor, parts: Parts) -> None:
        codes = from_runs(raw, self.width, self.run) << self.shift
        parts["codes"] = codes | parts["codes"] if "codes" in parts else codes


class Numbers(NamedTuple):
    """The elements of a part in its own dtype."""

    part: str
    dtype: torch.dtype
    each: int = 1
    """Elements in a block."""

    def nbytes(self, size: int) -> int:
        return self.each * self.dtype.itemsize

    def write(self, parts: Parts) -> Tensor:
        return parts[self.part].to(self.dtype).contiguous().view(torch.uint8)

    def read(self, raw: Tensor, parts: Parts) -> None:
        parts[self.part] = raw.contiguous().view(self.dtype)


class SixBits(NamedTuple):
    """8 scales and 8 minima of 6 bits. Four bytes have the upper 2 bits of the last four, in their own upper bits."""

    def nbytes(self, size: int) -> int:
        return 12

    def write(self, parts: Parts) -> Tensor:
        (scale, last_scale), (low, last_low) = (parts[name].split(4, 1) for name in ("scale", "zero_point"))
        return torch.cat(
            (scale | last_scale >> 4 << 6, low | last_low >> 4 << 6, last_scale & 15 | (last_low & 15) << 4), 1
        )

    def read(self, raw: Tensor, parts: Parts) -> None:
        scale, low, last = raw.split(4, 1)
        parts["scale"] = torch.cat((scale & 63, last & 15 | scale >> 6 << 4), 1)
        parts["zero_point"] = torch.cat((low & 63, last >> 4 | low >> 6 << 4), 1)


class BlockType(NamedTuple):
    """A block type.

    Attributes:
        name: Its name in ``gguf.GGMLQuantizationType``.
        scheme: The scheme of its codes and scales. Schemes with another rounding of scales have the same type.
        size: Elements of a block, which lie in one row.
        fields: The bytes of a block.
    """

    name: str
    scheme: Scheme
    size: int
    fields: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(field.nbytes(self.size) for field in self.fields)

    @property
    def sign(self) -> int:
        """The code of zero in offset binary, or 0 if codes are unsigned or no integers."""
        format = self.scheme.format
        return 1 << (format.bits - 1) if format.kind == "integer" and format.signed and format.bits < 8 else 0


_HALF = torch.float16
_BYTE = torch.uint8

#: One row per type that a scheme has.
BLOCK_TYPES: dict[str, BlockType] = {
    row.name: row
    for row in (
        BlockType("Q4_0", find_scheme("int4:group32:fp16"), 32, (Numbers("scale", _HALF), Codes(4, 16))),
        BlockType("Q4_1", find_scheme("uint4:group32:fp16:min"), 32,
                  (Numbers("scale", _HALF), Numbers("zero_point", _HALF), Codes(4, 16))),
        BlockType("Q5_0", find_scheme("int5:group32:fp16"), 32,
                  (Numbers("scale", _HALF), Codes(1, 1, shift=4), Codes(4, 16))),
        BlockType("Q5_1", find_scheme("uint5:group32:fp16:min"), 32,
                  (Numbers("scale", _HALF), Numbers("zero_point", _HALF), Codes(1, 1, shift=4), Codes(4, 16))),
        BlockType("Q8_0", find_scheme("int8:group32:fp16"), 32, (Numbers("scale", _HALF), Codes(8, 32))),
        BlockType("MXFP4", find_scheme("mxfp4"), 32, (Numbers("scale", _BYTE), Codes(4, 16))),
        BlockType("NVFP4", find_scheme("nvfp4"), 64, (Numbers("scale", _BYTE, 4), Codes(4, 8))),
        BlockType("Q4_K", find_scheme("q4_k"), 256,
                  (Numbers("d", _HALF), Numbers("dmin", _HALF), SixBits(), Codes(4, 32))),
        BlockType("Q5_K", find_scheme("q5_k"), 256,
                  (Numbers("d", _HALF), Numbers("dmin", _HALF), SixBits(), Codes(1, 32, shift=4), Codes(4, 32))),
        BlockType("Q6_K", find_scheme("q6_k"), 256,
                  (Codes(4, 64), Codes(2, 32, shift=4), Numbers("scale", _BYTE, 16), Numbers("d", _HALF))),
    )
}  # fmt: skip


def _kind(scheme: Scheme) -> tuple[Any, ...]:
    """The properties of a scheme that decoding depends on."""
    return (
        scheme.format.name, scheme.block, scheme.scale_format.name, scheme.affine, scheme.minimum, scheme.global_scale,
    )  # fmt: skip


_BY_KIND = {_kind(row.scheme): row for row in BLOCK_TYPES.values()}


def block_type(scheme: Scheme) -> BlockType | None:
    """The type that stores codes and scales of ``scheme``, or None."""
    return _BY_KIND.get(_kind(scheme))


def to_blocks(q: Quantized) -> Tensor:
    """The blocks of a matrix.

    Args:
        q: A matrix ``[rows, cols]`` in the scheme of a type; ``cols`` is a multiple of its ``size``. A global scale of
            the whole tensor is not in the blocks.

    Returns:
        uint8 ``[rows, cols / size * nbytes]``.
    """
    row = block_type(q.scheme)
    assert row is not None and q.shape[1] % row.size == 0
    rows, cols = q.shape
    blocks = rows * cols // row.size
    parts: Parts = {"codes": (unpack(q.codes, q.scheme.format.bits, cols) ^ row.sign).reshape(blocks, row.size)}
    parts |= {name: part.reshape(blocks, -1) for name, part in (("scale", q.scale), ("zero_point", q.zero_point))
              if part is not None}  # fmt: skip
    if q.scheme.global_scale == "superblock":
        assert q.global_scale is not None
        for name, part in zip(("d", "dmin"), q.global_scale.split(cols // row.size, 1), strict=False):
            parts[name] = part.reshape(blocks, 1)
    return torch.cat([field.write(parts) for field in row.fields], 1).view(rows, -1)


def from_blocks(
    row: BlockType, raw: Tensor, cols: int, dtype: torch.dtype, global_scale: Tensor | None = None
) -> Quantized:
    """The matrix ``[rows, cols]`` in blocks, with their codes and scales.

    Args:
        row: The type.
        raw: uint8 ``[rows, cols / size * nbytes]``.
        cols: Columns of the matrix.
        dtype: The dtype that ``dequantize`` returns.
        global_scale: fp32 ``[1, 1]``, for a type whose blocks do not have it.
    """
    rows = len(raw)
    blocks = raw.reshape(-1, row.nbytes)
    parts: Parts = {}
    for field, part in zip(row.fields, blocks.split([field.nbytes(row.size) for field in row.fields], 1), strict=True):
        field.read(part, parts)
    if row.scheme.global_scale == "superblock":
        global_scale = torch.cat([parts[name].float().view(rows, -1) for name in ("d", "dmin") if name in parts], 1)
    zero_point = parts.get("zero_point")
    return Quantized(
        pack(parts["codes"].reshape(rows, cols) ^ row.sign, row.scheme.format.bits),
        parts["scale"].reshape(rows, -1),
        None if zero_point is None else zero_point.reshape(rows, -1),
        global_scale, row.scheme, torch.Size((rows, cols)), dtype,
    )  # fmt: skip
