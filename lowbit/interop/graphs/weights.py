"""Quantized weights as integers and scales, in the layouts of operators."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.functional import decode
from lowbit.scaling import Scheme
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized

__all__ = ["Blocks", "Groups", "block_size", "blocks", "code_numbers", "groups", "integers", "row_scales", "scales"]

#: The bits of MatMulNBits' codes. Other integers are stored in the next wider ones.
_WIDTHS = (2, 4, 8)

#: The widest block for a scale per row, which is repeated.
_ROW_BLOCK = 128


class Blocks(NamedTuple):
    """Integers with a scale per block of a row, as MatMulNBits and GatherBlockQuantized have them.

    Attributes:
        codes: uint8 ``[N, blocks, block * bits / 8]``, with half their range as offset; the first code is in the lowest
            bits.
        scales: fp32 ``[N, blocks]``.
        zero_points: uint8 ``[N, bytes]``, packed like codes; None: half the range.
        bits: Bits of a code.
        block: Columns of a block, a power of two.
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    bits: int
    block: int


def block_size(scheme: Scheme) -> int:
    """The largest power of two that divides the groups of a scheme."""
    group = scheme.block[1]
    return _ROW_BLOCK if group is None else group & -group


def blocks(weight: Quantized, block: int | None = None) -> Blocks:
    """The blocks of a weight ``[N, K]`` of integers with scales within rows. The last one is filled with zeros.

    Args:
        weight: The weight.
        block: Columns of a block: a power of two that divides ``block_size``; None: ``block_size``.
    """
    scheme, (rows, cols) = weight.scheme, (int(size) for size in weight.shape)
    bits = next(width for width in _WIDTHS if width >= scheme.format.bits)
    block, half = block or block_size(scheme), 1 << (bits - 1)
    count = -(-cols // block)
    offset = integers(weight) + half if scheme.format.signed else unpack(weight.codes, scheme.format.bits, cols)
    codes = torch.nn.functional.pad(offset.to(torch.uint8), (0, count * block - cols), value=half)
    repeats = block_repeats(scheme, cols, block)
    zeros = None
    if weight.zero_point is not None:
        stored = weight.zero_point.to(torch.int16) + (half if scheme.format.signed else 0)
        zero = _per_block(stored.to(torch.uint8), repeats, count)
        zeros = pack(zero, bits)
    return Blocks(
        pack(codes.view(rows, count, block), bits), _per_block(scales(weight), repeats, count), zeros, bits, block
    )


def block_repeats(scheme: Scheme, cols: int, block: int) -> int:
    """The number of blocks that share a scale."""
    return -(-(scheme.block[1] or cols) // block)


def _per_block(values: Tensor, repeats: int, count: int) -> Tensor:
    return values.repeat_interleave(repeats, 1)[:, :count].contiguous()


def integers(weight: Quantized) -> Tensor:
    """The integers of a weight, int16 ``[N, K]``; unsigned ones as they are stored."""
    bits, cols = weight.scheme.format.bits, int(weight.shape[1])
    codes = unpack(weight.codes, bits, cols).to(torch.int16)
    return torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes) if weight.scheme.format.signed else codes


def code_numbers(weight: Quantized) -> Tensor:
    """The codes of a weight, uint8 ``[N, K]``."""
    return unpack(weight.codes, weight.scheme.format.bits, int(weight.shape[1]))


class Groups(NamedTuple):
    """A scale per group of columns, for any number of columns.

    Attributes:
        size: Columns of a group: a divisor of the number of columns and of the scheme's groups.
        scales: fp32 ``[N, K / size, 1]``.
        zero_points: int16 ``[N, K / size, 1]``, or None.
    """

    size: int
    scales: Tensor
    zero_points: Tensor | None


def groups(weight: Quantized, power_of_two: bool = False) -> Groups:
    """The scales and zero points of a weight ``[N, K]``, per row and group of columns.

    Args:
        weight: The weight.
        power_of_two: Whether groups within a row must have a power of two columns.

    Raises:
        ValueError: The scheme has minima or superblocks.
    """
    scheme, (rows, cols) = weight.scheme, (int(size) for size in weight.shape)
    if scheme.reference_only:
        raise ValueError(f"graphs have no minima and no superblocks, as {scheme} has")
    high, wide = scheme.block[0] or rows, min(scheme.block[1] or cols, cols)
    size = gcd(cols, wide)
    if power_of_two and size != cols:
        size &= -size
    row, col = torch.arange(rows) // high, torch.arange(0, cols, size) // wide

    def spread(values: Tensor) -> Tensor:
        return values[row][:, col][..., None].contiguous()

    zero = weight.zero_point
    return Groups(size, spread(scales(weight)), None if zero is None else spread(zero.to(torch.int16)))


def row_scales(weight: Quantized) -> Tensor:
    """A scale per row, fp32 ``[N]``, of a scheme with one per row or per matrix."""
    return scales(weight).expand(int(weight.shape[0]), 1).flatten().contiguous()


def scales(weight: Quantized) -> Tensor:
    """The scales of all blocks, fp32 ``[R, C]``, times the global scale."""
    name = weight.scheme.scale_format.name
    scale = weight.scale.float() if weight.scale.is_floating_point() else decode(weight.scale, name)
    return scale if weight.global_scale is None else scale * weight.global_scale
