"""Panels: codes of a matrix in the order in which kernels of ``linear`` read a weight; the plain layout is rows.

``[N, K]`` codes of 8 or 4 bits become uint8 ``[P, D, 32, 4]``: P panels of 32 rows, D dwords of depth, and in each the
4 bytes of every row. With 8 bits, byte ``i`` of dword ``d`` is code ``4d + i``; with 4 bits, its low nibble is code
``8d + i`` and its high nibble code ``8d + 4 + i``, so that the low and the high nibbles of a dword are two dwords of
one-byte codes. Codes of signed integers are held with their sign bit flipped, as an unsigned number with an offset;
all others as they are. What lies past the last row or column is 0.

Codes of a matrix with four axes are panels: the layout is told by the shape, so that no tag can be lost or go stale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import Format
from lowbit.scaling import packed_cols

__all__ = ["are_panels", "from_panels", "panels_shape", "to_panels"]

#: Rows of a panel, and bytes of depth that one row has side by side.
_ROWS, _DWORD = 32, 4

#: Exchanges within a dword of 4-bit codes, as (shift, mask): the bits of the mask change places with those ``shift``
#: above them. First the two middle bytes, then the two middle nibbles of either half: codes 0 4 1 5 2 6 3 7.
_INTERLEAVE = ((8, 0x0000FF00), (4, 0x00F000F0))


def are_panels(codes: Tensor) -> bool:
    """Whether these codes of a matrix are in panels; else they are rows."""
    return codes.dim() == 4


def panels_shape(rows: int, cols: int, bits: int) -> tuple[int, int, int, int]:
    """The shape of ``[rows, cols]`` codes in panels. Raises ValueError for codes that are not of 8 or 4 bits."""
    if bits not in (4, 8):
        raise ValueError(f"panels hold codes of 8 or 4 bits, not of {bits}")
    return -(-rows // _ROWS), -(-cols * bits // (8 * _DWORD)), _ROWS, _DWORD


def to_panels(codes: Tensor, format: Format, cols: int) -> Tensor:
    """The panels of stored ``codes [N, packed cols]``."""
    rows, used = codes.shape
    panels, depth, *_ = panels_shape(rows, cols, format.bits)
    edge = (0, depth * _DWORD - used, 0, panels * _ROWS - rows)
    padded = torch.nn.functional.pad(_flipped(codes, format, cols).contiguous(), edge)
    dwords = padded.view(panels, _ROWS, depth, _DWORD).view(torch.int32).squeeze(-1)
    if format.bits == 4:
        for shift, mask in _INTERLEAVE:
            dwords = _exchanged(dwords, shift, mask)
    return _turned(dwords).unsqueeze(-1).view(torch.uint8)


def from_panels(panels: Tensor, format: Format, rows: int, cols: int) -> Tensor:
    """The stored codes ``[rows, packed cols]`` of which ``to_panels`` made ``panels``; bits past the last are 0."""
    dwords = _turned(panels.contiguous().view(torch.int32).squeeze(-1))
    if format.bits == 4:
        for shift, mask in reversed(_INTERLEAVE):
            dwords = _exchanged(dwords, shift, mask)
    padded = dwords.unsqueeze(-1).view(torch.uint8).view(panels.shape[0] * _ROWS, panels.shape[1] * _DWORD)
    return _flipped(padded[:rows, : packed_cols(cols, format.bits)], format, cols)


def _turned(dwords: Tensor) -> Tensor:
    """A copy with the last two axes, a panel's rows and its depth, exchanged."""
    return dwords.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _flipped(codes: Tensor, format: Format, cols: int) -> Tensor:
    """A copy with the sign bits of signed integers flipped, and the bits of a row past its last code 0."""
    signs = {8: 0x80, 4: 0x88}[format.bits] if format.kind == "integer" and format.signed else 0
    flipped = codes ^ signs
    if cols * format.bits % 8:
        flipped[:, -1] &= 0x0F
    return flipped


def _exchanged(dwords: Tensor, shift: int, mask: int) -> Tensor:
    moved = (dwords ^ (dwords >> shift)) & mask
    return dwords ^ moved ^ (moved << shift)
