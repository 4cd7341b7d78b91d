"""Quantized weights in the layouts of ONNX's operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.functional import decode
from lowbit.scaling import Scheme
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized

__all__ = ["Blocks", "blocks", "integers", "scales"]

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


def blocks(weight: Quantized) -> Blocks:
    """The blocks of a weight ``[N, K]`` of integers with scales within rows. The last one is filled with zeros."""
    scheme, (rows, cols) = weight.scheme, (int(size) for size in weight.shape)
    bits = next(width for width in _WIDTHS if width >= scheme.format.bits)
    block, half = block_size(scheme), 1 << (bits - 1)
    count = -(-cols // block)
    offset = integers(weight) + half if scheme.format.signed else unpack(weight.codes, scheme.format.bits, cols)
    codes = torch.nn.functional.pad(offset.to(torch.uint8), (0, count * block - cols), value=half)
    repeats = block_repeats(scheme, cols, block)
    zeros = None
    if weight.zero_point is not None:
        zero = _per_block(weight.zero_point.to(torch.uint8), repeats, count)
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


def scales(weight: Quantized) -> Tensor:
    """The scales of all blocks, fp32 ``[R, C]``, times the global scale."""
    name = weight.scheme.scale_format.name
    scale = weight.scale.float() if weight.scale.is_floating_point() else decode(weight.scale, name)
    return scale if weight.global_scale is None else scale * weight.global_scale
