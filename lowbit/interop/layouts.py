"""Orders of low-bit codes in the bytes of other programs, as pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["from_runs", "runs"]


def runs(codes: Tensor, width: int, run: int) -> Tensor:
    """Pack codes of 1, 2, 4 or 8 bits: each byte has ``8 / width`` codes that are ``run`` elements apart.

    With ``run=1`` neighboring codes share a byte, the first one in the lowest bits. With ``run=16`` and ``width=4``
    byte j of a block of 32 has the codes j and j + 16.

    Args:
        codes: uint8 ``[..., n]``; n is a multiple of ``run * 8 / width``.
        width: Bits of a code.
        run: Distance of the codes in a byte.

    Returns:
        uint8 ``[..., n * width / 8]``.
    """
    each = 8 // width
    groups = codes.unflatten(-1, (-1, each, run))
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (groups << shifts[:, None]).sum(-2, dtype=torch.uint8).flatten(-2)
    return packed


def from_runs(packed: Tensor, width: int, run: int) -> Tensor:
    """The inverse of ``runs``: uint8 ``[..., n]``."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    groups = packed.unflatten(-1, (-1, 1, run)) >> shifts[:, None] & ((1 << width) - 1)
    codes: Tensor = groups.flatten(-3)
    return codes
