"""Codecs: encode, decode, pack and unpack. Source: docs/numerics.md sections 2 to 4, 7 and 8."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import formats
from lowbit.functional.arguments import random_bits
from lowbit.op_calls import call, fill
from lowbit.rounding import Rounding


def _name(format: str | formats.Format) -> str:
    """The name of a format. The op checks that a format of this name exists."""
    return format if isinstance(format, str) else formats.find(format).name


def encode(
    x: Tensor,
    format: str | formats.Format,
    rounding: str | Rounding = "nearest",
    saturate: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Encodes ``x`` in ``format`` without scales, one code per byte.

    NaN becomes the canonical NaN with the same sign. In formats without NaN it becomes the maximum (codebooks: the
    entry nearest to 0; integers: 0). -0 keeps its sign.

    Args:
        x: float32, bfloat16 or float16 tensor of any shape.
        format: A format or its name.
        rounding: ``"nearest"`` (ties to even), ``"stochastic"`` or a ``Rounding``. The random bits depend only on the
            seed, step and stream of the ``Rounding`` and on the element's position. ``"stochastic"`` is
            ``Rounding()``, which draws a seed from torch's generator in each call. Under ``torch.vmap`` each sample
            is a separate call, whose positions start at ``offset`` again.
        saturate: True clips values that are too large to the format's maximum. False returns Inf or NaN for them, if
            the format has these.
        out: uint8 tensor that receives the codes.

    Returns:
        uint8 codes in the shape of ``x``.

    Raises:
        TypeError: ``x`` has another dtype.
        ValueError: The format or the rounding is unknown.

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
    """Decodes ``codes`` of ``format`` without scales.

    Values are exact in fp32 and then rounded to ``dtype`` (nearest, ties to even).

    Args:
        codes: uint8, one code per byte. Bits above the format's width are ignored.
        format: A format or its name.
        dtype: dtype of the result.
        out: Tensor of this dtype that receives the values.

    Returns:
        The values in the shape of ``codes``.

    Raises:
        TypeError: ``codes`` are not uint8.

    Source: docs/numerics.md section 6.
    """
    name = _name(format)
    if out is None:
        values: Tensor = call("decode", codes, name, dtype)
        return values
    fill("decode", codes, name, dtype, out=out)
    return out


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes, one little-endian bit stream per row.

    Args:
        codes: uint8 ``[..., cols]``, one code per byte.
        bits: Bits per code.

    Returns:
        uint8 ``[..., ceil(cols * bits / 8)]``.

    Source: docs/numerics.md section 8.
    """
    packed: Tensor = call("pack", codes, bits)
    return packed


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Unpacks the result of ``pack``.

    Args:
        packed: uint8 ``[..., ceil(cols * bits / 8)]``.
        bits: Bits per code.
        shape: Shape of the codes that were packed; at least one axis.

    Returns:
        uint8 codes of ``shape``, one per byte.

    Raises:
        ValueError: ``packed`` does not hold this number of codes, or ``shape`` is not a shape.
    """
    if not isinstance(shape, (tuple, list)) or not shape:
        raise ValueError(f"unpack: expected the shape of the codes that were packed, such as (4, 64), got {shape!r}")
    codes: Tensor = call("unpack", packed, bits, shape[-1])
    if codes.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"unpack: {list(packed.shape)} holds {list(codes.shape)} codes of {bits} bits, not {list(shape)}"
        )
    return codes.reshape(shape)
