"""Reference of encode and decode: bit patterns, and random bits of stochastic rounding (sections 1 to 4, 7)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.formats import FORMATS, Format
from lowbit.scaling import Scheme
from lowbit.tensor import packing

F32_SIGN, F32_MAGNITUDE, F32_INF, F32_NAN = 0x80000000, 0x7FFFFFFF, 0x7F800000, 0x7FC00000


class Rng(NamedTuple):
    """The inputs of stochastic rounding (section 7); ``pitch`` is the row length of the whole tensor."""

    seed: int
    step: int = 0
    stream: int = 0
    offset: int = 0
    pitch: int | None = None


# -- bits (sections 1, 2) ------------------------------------------------------------------------------------------
def to_bits(x: Tensor) -> Tensor:
    """The fp32 bit patterns of ``x`` (fp32, bf16 or fp16) as int64 in ``[0, 2**32)``; NaN keeps its sign."""
    bits = x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    if x.dtype != torch.float16:
        return bits
    return (
        bits & F32_MAGNITUDE | (x.contiguous().view(torch.int16).long() & 0x8000) << 16
    )  # torch drops the sign of NaN


def from_bits(bits: Tensor) -> Tensor:
    """fp32 numbers from int64 bit patterns."""
    return bits.where(bits < F32_SIGN, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def require_subnormals(x: Tensor) -> None:
    """Raises RuntimeError if torch flushes subnormal numbers, which would change results."""
    tiny = torch.full((1,), 1e-39)
    if x.device.type == "cpu" and x.numel() and bool(tiny * 1 == 0):
        raise RuntimeError(
            "the reference backend cannot run under torch.set_flush_denormal(True), which would change its results; "
            "switch it off, or install the compiled extension (lowbit doctor says how), which is immune to it"
        )


def round_magnitude(magnitude: Tensor, format: Format, noise: Tensor | None = None) -> Tensor:
    """Codes of a float format with unbounded exponent, for fp32 ``magnitude`` bits (sign cleared, no NaN).

    Rounds to nearest even, or stochastically with ``noise`` (16 random bits per element).
    """
    field, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    significand = fraction.where(field == 0, fraction | (1 << 23))
    exponent = (field - 127).clamp(min=-126)
    shift = (23 - format.mantissa + (format.emin - exponent).clamp(min=0)).clamp(max=40)
    kept = significand >> shift
    rest = significand - (kept << shift)
    if noise is None:
        half = (1 << shift) >> 1
        kept = kept + ((rest > half) | ((rest == half) & (rest > 0) & (kept % 2 == 1))).long()
    else:
        kept = kept + ((((rest << 16) >> shift) + noise) >> 16)
    return ((exponent.clamp(min=format.emin) - format.emin) << format.mantissa) + kept


def encode_magnitude(bits: Tensor, format: Format, saturate: bool, noise: Tensor | None = None) -> Tensor:
    """Codes of a float format for fp32 ``bits``, with NaN, overflow and sign (section 2)."""
    magnitude, negative = bits & F32_MAGNITUDE, bits >= F32_SIGN
    code = round_magnitude(magnitude.clamp(max=F32_INF), format, noise)
    over = format.max_code
    if not saturate and (format.has_inf or format.has_nan):
        over = format.inf_code if format.has_inf else format.nan_code
    code = torch.where(code > format.max_code, over, code)
    sign = negative.long() << (format.bits - 1)
    if format.has_nan:
        return torch.where(magnitude > F32_INF, format.nan_code, code) | sign
    return torch.where(magnitude > F32_INF, format.max_code, code | sign)


def cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds fp32 to ``dtype`` (nearest even) with integer arithmetic; every NaN becomes canonical (section 6)."""
    bits = to_bits(y)
    bits = torch.where((bits & F32_MAGNITUDE) > F32_INF, F32_NAN, bits)
    if dtype == torch.float32:
        return from_bits(bits)
    format = next(f for f in FORMATS.values() if f.torch_dtype == str(dtype).removeprefix("torch."))
    code = round_magnitude(bits & F32_MAGNITUDE, format)
    nan_code = format.inf_code | (1 << (format.mantissa - 1))
    code = torch.where((bits & F32_MAGNITUDE) > F32_INF, nan_code, code.clamp(max=format.inf_code))
    code = code + ((bits >= F32_SIGN).long() << 15)
    return code.where(code < 1 << 15, code - (1 << 16)).to(torch.int16).view(dtype)


# -- stochastic rounding (section 7) -------------------------------------------------------------------------------
def philox4x32(counter: list[Tensor], key: tuple[int | Tensor, int | Tensor]) -> list[Tensor]:
    """Philox4x32-10 of Salmon et al., SC 2011: four 32-bit words as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, low0 = (p0 >> 32) & 0xFFFFFFFF, p0 & 0xFFFFFFFF
        high1, low1 = (p1 >> 32) & 0xFFFFFFFF, p1 & 0xFFFFFFFF
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def noise16(rows: int, cols: int, rng: Rng, device: torch.device) -> Tensor:
    """16 random bits per element of ``[rows, cols]``, which depend only on its index in the whole tensor."""
    pitch = cols if rng.pitch is None else rng.pitch
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    col = torch.arange(cols, dtype=torch.int64, device=device)[None, :]
    index = rng.offset + row * pitch + col  # wraps as uint64 does
    block = (index >> 3) & ((1 << 61) - 1)
    fixed = [torch.full_like(block, word & 0xFFFFFFFF) for word in (rng.step, rng.stream)]
    words = philox4x32(
        [block & 0xFFFFFFFF, block >> 32, *fixed], (rng.seed & 0xFFFFFFFF, (rng.seed >> 32) & 0xFFFFFFFF)
    )
    word = torch.stack(words).gather(0, ((index & 7) >> 1)[None])[0]
    half: Tensor = (word >> (16 * (index & 1))) & 0xFFFF
    return half


# -- elements (sections 2 to 4) ------------------------------------------------------------------------------------
def encode(
    x: Tensor, format: Format, rng: Rng | None = None, saturate: bool = True, zero_point: Tensor | None = None
) -> Tensor:
    """Codes (uint8, one per byte) of ``x [rows, cols]``, which is already divided by its scale.

    With ``rng``, rounding is stochastic. ``zero_point`` broadcasts to ``x``. Special values: sections 2 to 4.
    """
    require_subnormals(x)
    bits = to_bits(x)
    noise = None if rng is None else noise16(x.shape[0], x.shape[1], rng, x.device)
    if format.kind == "float":
        return encode_magnitude(bits, format, saturate, noise).to(torch.uint8)
    if format.kind == "codebook":
        return encode_codebook(x.float(), format, noise).to(torch.uint8)
    zero = torch.zeros((), device=x.device) if zero_point is None else zero_point.float()
    whole = x.float().round() if noise is None else integer_stochastic(x.float(), bits, noise)
    q = (whole + zero).clamp(format.qmin, format.qmax)
    return (q.where(~x.isnan(), zero).to(torch.int64) & ((1 << format.bits) - 1)).to(torch.uint8)


def encode_codebook(x: Tensor, format: Format, noise: Tensor | None = None) -> Tensor:
    """int64 codes of fp32 ``x`` in a codebook: the nearest entry, or a random neighbor by ``noise`` (sections 4, 7)."""

    def table(bits: tuple[int, ...]) -> Tensor:
        return from_bits(torch.tensor(bits, dtype=torch.int64, device=x.device))

    if noise is None:
        code = torch.bucketize(x, table(format.thresholds))  # number of thresholds < x
    else:
        entries, weights = table(format.bits_table), table(format.weights)
        v = x.clamp(entries[0], entries[-1]).where(~x.isnan(), entries[0])
        code = torch.bucketize(v, entries[1:], right=True)  # number of entries <= v
        fraction = ((v - entries[code]) * weights[code]).long().clamp(max=65535)
        code = code + ((fraction + noise) >> 16)
    return code.masked_fill(x.isnan(), format.zero_code)


def integer_stochastic(x: Tensor, bits: Tensor, noise: Tensor) -> Tensor:
    magnitude = bits & F32_MAGNITUDE
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF).where(field == 0, (magnitude & 0x7FFFFF) | (1 << 23))
    shift = (23 - (field - 127).clamp(min=-126)).clamp(0, 40)
    floor = significand >> shift
    rest = significand - (floor << shift)
    rounded = (floor + ((((rest << 16) >> shift) + noise) >> 16)).float()
    return torch.where(magnitude >= 0x4B000000, x, torch.copysign(rounded, x))  # from 2**23 on all are integers


def decode(codes: Tensor, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of ``codes`` (uint8, one per byte) in ``dtype``; NaN keeps the sign of its code."""
    table = torch.tensor(format.bits_table, dtype=torch.int64, device=codes.device)
    bits = table[codes.long() & ((1 << format.bits) - 1)]
    y = cast(from_bits(bits), dtype)
    negative_nan = bits == F32_NAN | F32_SIGN
    if not bool(negative_nan.any()):
        return y
    return torch.where(negative_nan, -y, y) if dtype == torch.float32 else _negate_where(y, negative_nan)


def _negate_where(y: Tensor, where: Tensor) -> Tensor:
    return (y.view(torch.int16) | (where.to(torch.int16) << 15)).view(y.dtype)


def unpack(codes: Tensor, scheme: Scheme, cols: int) -> Tensor:
    """Codes, one per byte, from packed codes ``[rows, packed cols]``."""
    return packing.unpack(codes, scheme.format.bits, cols)
