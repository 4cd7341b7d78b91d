"""Sub-byte packing: each row of codes is a little-endian bit stream, padded with zero bits to whole bytes.

Source: docs/numerics.md section 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.scaling import packed_cols

__all__ = ["pack", "packed_cols", "unpack"]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs ``codes`` (uint8 ``[..., cols]``, one per byte) into uint8 ``[..., packed_cols(cols, bits)]``.

    Code ``j`` of a row takes bits ``[bits*j, bits*(j+1))`` of the row's bit stream, so the first 4-bit code is the
    low half of a byte. Bits of a code above ``bits`` are dropped.
    """
    if bits == 8:
        return codes.clone()
    cols = codes.shape[-1]
    stream = (codes[..., None] >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    stream = torch.nn.functional.pad(stream.flatten(-2), (0, packed_cols(cols, bits) * 8 - cols * bits))
    return _from_bits(stream.unflatten(-1, (packed_cols(cols, bits), 8)))


def unpack(packed: Tensor, bits: int, cols: int) -> Tensor:
    """Unpacks ``packed`` (``[..., packed_cols(cols, bits)]``) to uint8 codes ``[..., cols]``, one per byte."""
    if bits == 8:
        return packed.clone()
    stream = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return _from_bits(stream.flatten(-2)[..., : cols * bits].unflatten(-1, (cols, bits)))


def _from_bits(bits: Tensor) -> Tensor:
    weight = 1 << torch.arange(bits.shape[-1], dtype=torch.uint8, device=bits.device)
    return (bits * weight).sum(-1, dtype=torch.uint8)
