"""encode, decode, pack and unpack. Source: docs/numerics.md sections 2 to 4, 7 and 8."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import formats
from lowbit.functional.arguments import random_bits
from lowbit.op_calls import call, fill
from lowbit.rounding import Rounding


def _name(format: str | formats.Format) -> str:
    """What ops know a format by; they find out whether there is such a one."""
    return format if isinstance(format, str) else formats.find(format).name


def encode(
    x: Tensor,
    format: str | formats.Format,
    rounding: str | Rounding = "nearest",
    saturate: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Codes of ``x``, one a byte (uint8, shape of ``x``), without any scale.

    ``rounding``: ``"nearest"`` (ties to even), or a ``Rounding``, which is stochastic and names the random bits: they
    depend on its seed, step and stream and on the element's place alone. ``"stochastic"`` is ``Rounding()``, with a
    seed drawn from torch's generator at each call.
    Under ``torch.vmap`` every sample is a call of its own, which counts from ``offset`` again.
    Too large: the format's maximum, or with ``saturate=False`` Inf or NaN where the format has them. NaN: the canonical
    NaN with its sign; formats without NaN: the maximum (codebooks: the entry nearest 0; integers: 0). -0 keeps its
    sign.

    Raises TypeError for dtypes other than float32, bfloat16, float16; ValueError for an unknown format or rounding.
    Source: docs/numerics.md sections 2, 3, 4, 7.
    """
    rounding, *rng = random_bits(rounding, x)
    args = (_name(format), rounding, saturate, *rng)
    if out is None:
        codes: Tensor = call("encode", x, *args)
        return codes
    fill("encode", x, *args, out=out)
    return out


def decode(
    codes: Tensor, format: str | formats.Format, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """The values of ``codes`` (uint8, one a byte), exact in fp32 and rounded to ``dtype`` (nearest even).

    Bits of a code above the format's width are ignored. Raises TypeError when codes are not uint8.
    Source: docs/numerics.md section 6.
    """
    name = _name(format)
    if out is None:
        numbers: Tensor = call("decode", codes, name, dtype)
        return numbers
    fill("decode", codes, name, dtype, out=out)
    return out


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., cols]`` one a byte to ``[..., ceil(cols*bits/8)]`` bytes: a little-endian bit stream a row.

    Source: docs/numerics.md section 8.
    """
    packed: Tensor = call("pack", codes, bits)
    return packed


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Codes of ``shape`` (at least one axis), one a byte, from what ``pack`` made of them."""
    if not isinstance(shape, (tuple, list)) or not shape:
        raise ValueError(f"unpack: shape must be that of the codes that were packed, such as (4, 64), got {shape!r}")
    codes: Tensor = call("unpack", packed, bits, shape[-1])
    if codes.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"unpack: {list(packed.shape)} holds {list(codes.shape)} codes of {bits} bits, not {list(shape)}"
        )
    return codes.reshape(shape)
