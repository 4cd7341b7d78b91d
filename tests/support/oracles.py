"""Oracles that share no code with lowbit: exact rationals, rounding boundaries, a scalar Philox, ml_dtypes.

They are written from the words of docs/numerics.md, whose sections are cited, and read of a ``Format`` or ``Scheme``
only the facts of its table row (bits, exponent, mantissa, bias, kind of NaN, codebook; block, scale format, options).
A number is a ``Fraction``, or a float where it is Inf or NaN; fp32 patterns are integers.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lowbit.formats import FORMATS, Format
from lowbit.scaling import Scheme

Number = Fraction | float

#: Formats that ml_dtypes has too, by our name.
ML_DTYPES: dict[str, Any] = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "int8": np.int8,
    "uint8": np.uint8,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}

F32_INF, F32_NAN, SIGN = 0x7F800000, 0x7FC00000, 0x80000000


# -- binary floating point in rationals --------------------------------------------------------------------------------
class Binary(NamedTuple):
    """An IEEE binary interchange format: widths of its exponent and mantissa fields."""

    exponent: int
    mantissa: int

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def inf(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa


FP32, BF16, FP16 = Binary(8, 23), Binary(8, 7), Binary(5, 10)
BINARY = {"float32": FP32, "bfloat16": BF16, "float16": FP16}


def floor_log2(value: Fraction) -> int:
    """The largest e with ``2**e <= value``, for a positive value."""
    above, below = value.as_integer_ratio()
    e = above.bit_length() - below.bit_length()
    return e if (above >= below << e if e >= 0 else above << -e >= below) else e - 1


@cache
def power(e: int) -> Fraction:
    return Fraction(1 << e) if e >= 0 else Fraction(1, 1 << -e)


def quanta(value: Fraction, e: int) -> int:
    """The whole number nearest to ``value / 2**e``, of two the even one; in integers, which are quick."""
    above, below = value.as_integer_ratio()
    whole, rest = divmod(above, below << e) if e >= 0 else divmod(above << -e, below)
    middle = 2 * rest - (below << max(e, 0))
    return whole + (middle > 0 or (middle == 0 and whole % 2 == 1))


def onto_grid(value: Fraction, mantissa: int, emin: int) -> Fraction:
    """``value >= 0`` to the nearest multiple of its quantum, ties to the even one; the exponent has no upper end."""
    if value == 0:
        return value
    e = max(floor_log2(value), emin) - mantissa
    return quanta(value, e) * power(e)


def to_bits(value: Number, binary: Binary = FP32, negative: bool = False) -> int:
    """The pattern of ``value`` rounded to nearest even; ``negative`` gives a zero or a NaN its sign."""
    sign = 1 << (binary.bits - 1)
    if isinstance(value, float) and math.isnan(value):
        return binary.inf | (1 << (binary.mantissa - 1)) | (sign if negative else 0)
    negative = value < 0 or (value == 0 and negative)
    sign = sign if negative else 0
    if isinstance(value, float) and math.isinf(value):
        return sign | binary.inf
    if value == 0:
        return sign
    exact, emin = abs(Fraction(value)), 1 - binary.bias
    e = max(floor_log2(exact), emin)
    return sign | min(((e - emin) << binary.mantissa) + quanta(exact, e - binary.mantissa), binary.inf)


def from_bits(bits: int, binary: Binary = FP32) -> Number:
    """The number of a pattern; the sign of a zero is lost."""
    sign = -1 if bits >> (binary.bits - 1) & 1 else 1
    field, fraction = bits >> binary.mantissa & ((1 << binary.exponent) - 1), bits & ((1 << binary.mantissa) - 1)
    if field == (1 << binary.exponent) - 1:
        return math.nan if fraction else sign * math.inf
    if field == 0:
        return sign * fraction * power(1 - binary.bias - binary.mantissa)
    return sign * (fraction + (1 << binary.mantissa)) * power(field - binary.bias - binary.mantissa)


def fp32(value: Number) -> Number:
    """``value`` rounded to fp32."""
    return from_bits(to_bits(value))


# -- formats (sections 2 to 4) -----------------------------------------------------------------------------------------
@cache
def value_of(f: Format, code: int) -> Number:
    """The value of a code; the sign of a zero or NaN is lost."""
    if f.kind == "integer":
        return Fraction(code - (1 << f.bits) if f.signed and code >= 1 << (f.bits - 1) else code)
    if f.kind == "codebook":
        return Fraction(f.codebook[code])
    if f.kind == "exponent":
        return math.nan if code == 255 else power(code - 127)
    sign = -1 if code >> (f.exponent + f.mantissa) else 1
    field, fraction = code >> f.mantissa & ((1 << f.exponent) - 1), code & ((1 << f.mantissa) - 1)
    top = field == (1 << f.exponent) - 1
    if top and f.nan == "ieee":
        return math.nan if fraction else sign * math.inf
    if top and f.nan == "all_ones" and fraction == (1 << f.mantissa) - 1:
        return math.nan
    if field == 0:
        return sign * Fraction(fraction, 1 << f.mantissa) * power(1 - f.bias)
    return sign * (1 + Fraction(fraction, 1 << f.mantissa)) * power(field - f.bias)


@cache
def magnitudes(f: Format) -> tuple[Fraction, ...]:
    """Finite values of a float format's codes without sign, in code order."""
    values = (value_of(f, code) for code in range(1 << (f.bits - 1)))
    return tuple(v for v in values if isinstance(v, Fraction))


@cache
def _code_of(f: Format) -> dict[Fraction, int]:
    return {value: code for code, value in enumerate(magnitudes(f))}


@cache
def largest(f: Format) -> Fraction:
    if f.kind == "float":
        return magnitudes(f)[-1]
    return max(v for code in range(1 << f.bits) if isinstance(v := value_of(f, code), Fraction))


@cache
def middles(f: Format) -> tuple[Fraction, ...]:
    """Halfway between neighbouring entries of a codebook."""
    return tuple((low + high) / 2 for low, high in pairwise(Fraction(v) for v in f.codebook))


def limits(f: Format) -> tuple[int, int]:
    """qmin and qmax of an integer format."""
    return (-(1 << (f.bits - 1)), (1 << (f.bits - 1)) - 1) if f.signed else (0, (1 << f.bits) - 1)


def nan_code(f: Format, negative: bool) -> int:
    """The code of a NaN: every magnitude bit set, sign kept; FP6 and FP4: the maximum; codebooks: nearest 0."""
    if f.kind == "codebook":
        return min(range(1 << f.bits), key=lambda c: abs(value_of(f, c)))
    if f.kind == "integer":
        return 0
    if f.nan == "none":
        return len(magnitudes(f)) - 1
    return (1 << (f.bits - 1)) - 1 | (negative << (f.bits - 1))


def encode(f: Format, bits: int, saturate: bool = True, zero_point: int = 0, noise: int | None = None) -> int:
    """The code of an fp32 pattern, by sections 2 to 4, and 7 where ``noise`` (16 random bits) is given."""
    x, negative = from_bits(bits), bool(bits & SIGN)
    if f.kind == "integer":
        return _encode_integer(f, x, zero_point, noise)
    if isinstance(x, float) and math.isnan(x):
        return nan_code(f, negative)
    if f.kind == "codebook":
        if noise is None:
            return bisect_left(middles(f), x)  # how many of them are less than x
        return _noisy_entry(f.codebook, x, noise)
    sign = negative << (f.bits - 1)
    if not math.isinf(x):
        a = abs(Fraction(x))
        rounded = onto_grid(a, f.mantissa, 1 - f.bias) if noise is None else _noisy(a, f.mantissa, 1 - f.bias, noise)
        if rounded <= largest(f):
            return _code_of(f)[rounded] | sign
    if saturate or f.nan == "none":
        return (len(magnitudes(f)) - 1) | sign
    inf_code = ((1 << f.exponent) - 1) << f.mantissa
    return (inf_code if f.nan == "ieee" else (1 << (f.bits - 1)) - 1) | sign


def _noisy(a: Fraction, mantissa: int, emin: int, noise: int) -> Fraction:
    """Up with the probability of the fraction's first 16 bits."""
    if a == 0:
        return a
    quantum = power(max(floor_log2(a), emin) - mantissa)
    below = a // quantum
    first16 = int((a / quantum - below) * 65536)
    return (below + (first16 + noise >> 16)) * quantum


def _noisy_entry(book: tuple[float, ...], x: Number, noise: int) -> int:
    """The entry at or below x, or the next with the probability of the distance; each operation rounded to fp32."""
    if not book[0] <= x < book[-1]:
        return 0 if x < book[0] else len(book) - 1
    code = bisect_right(book, x) - 1
    low, high = Fraction(book[code]), Fraction(book[code + 1])
    units = fp32(fp32(Fraction(x) - low) * fp32(65536 / (high - low)))
    return code + (min(math.floor(units), 65535) + noise >> 16)


def _encode_integer(f: Format, x: Number, zero_point: int, noise: int | None) -> int:
    low, high = limits(f)
    if isinstance(x, float):
        q = zero_point if math.isnan(x) else high if x > 0 else low
    elif noise is None:
        q = round(x) + zero_point
    else:
        below = int(abs(x))
        n = below + (int((abs(x) - below) * 65536) + noise >> 16)
        q = (-n if x < 0 else n) + zero_point
    return min(max(q, low), high) & ((1 << f.bits) - 1)


def ml_encode(name: str, x: np.ndarray, saturate: bool) -> np.ndarray:
    """Codes of fp32 numbers by ml_dtypes, for formats that it converts to by rounding to nearest even."""
    dtype = ML_DTYPES[name]
    limit = float(ml_dtypes.finfo(dtype).max)
    y = np.clip(x, -limit, limit) if saturate else x
    with np.errstate(invalid="ignore", over="ignore"):
        return y.astype(dtype).view(np.uint8)


# -- stochastic rounding (section 7) -----------------------------------------------------------------------------------
def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, figure 2 and table 2 of Salmon et al., SC 2011."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [right >> 32 ^ c[1] ^ k[0], right % 2**32, left >> 32 ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0], c[1], c[2], c[3]


def noise(index: int, seed: int, step: int = 0, stream: int = 0) -> int:
    """The 16 random bits of the element with that index in the whole tensor."""
    index, seed = index % 2**64, seed % 2**64
    block = index // 8
    words = philox((block % 2**32, block >> 32, step % 2**32, stream % 2**32), (seed % 2**32, seed >> 32))
    output = b"".join(word.to_bytes(4, "little") for word in words)
    return int.from_bytes(output[2 * (index % 8) :][:2], "little")


def training_seed(seed: int, micro_batch: int, replica: int) -> int:
    """The seed with which training rounds activations and gradients; of weights, the one of 0 and 0."""
    tag = zlib.crc32(b"lowbit.train")
    words = philox((micro_batch, replica, 0, tag), (seed % 2**64 % 2**32, seed % 2**64 >> 32))
    return words[0] | words[1] << 32


# -- scales (section 5) ------------------------------------------------------------------------------------------------
class Block(NamedTuple):
    """One block's stored scale (pattern of its storage format), zero point, and whether it holds Inf or NaN."""

    stored: int
    zero_point: int
    broken: bool


def fp32_scale(amount: Fraction, divisor: Fraction) -> Fraction:
    """``fp32(amount / divisor)``, 2**-126 at least and the largest finite fp32 at most; 1 for an amount of 0."""
    most = Fraction(from_bits(0x7F7FFFFF))
    return min(max(Fraction(fp32(min(amount / divisor, most))), power(-126)), most) if amount else Fraction(1)


def round_up(value: Fraction, binary: Binary) -> int:
    """The pattern of the least number of a 16-bit format that is >= ``value``; its largest finite one at most."""
    bits = to_bits(value, binary)
    found = from_bits(bits, binary)
    return min(bits + (found < value), binary.inf - 1)


def e8m0(amount: Fraction, divisor: Fraction, rounding: str) -> int:
    """The code of the power of two: ``floor``: OCP MX v1.0; ``ceil``: one more where the mantissa is the greater;
    ``nearest`` (FP4 alone): one more where the amount is above 7.25 times the floored power."""
    if amount == 0:
        return 127
    ea, ed = floor_log2(amount), floor_log2(divisor)
    e = ea - ed
    if rounding == "ceil":
        e += amount / power(ea) > divisor / power(ed)
    if rounding == "nearest":
        assert divisor == 6
        e += amount / power(e) > Fraction(29, 4)
    return min(max(e, -127), 127) + 127


def block_scale(patterns: list[int], scheme: Scheme, global_scale: Fraction | None) -> Block:
    """Scale and zero point of a block of fp32 patterns."""
    f, kind = scheme.format, scheme.scale_format.name
    broken = any(p & 0x7FFFFFFF >= F32_INF for p in patterns)
    if broken:
        stored = {"fp32": F32_NAN, "bf16": 0x7FC0, "fp16": 0x7E00, "e8m0": 0xFF, "fp8_e4m3": 0x7F}[kind]
        return Block(stored, 0, True)
    values = [Fraction(from_bits(p)) for p in patterns]
    low, high = min(Fraction(0), *values), max(Fraction(0), *values)
    if scheme.affine:
        qmin, qmax = limits(f)
        span = fp32(high - low)
        amount = min(Fraction(span), from_bits(0x7F7FFFFF)) if not math.isinf(span) else from_bits(0x7F7FFFFF)
        divisor = Fraction(qmax - qmin)
    else:
        amount, divisor = max(-low, high), divisor_of(scheme)
    if amount == 0 and f.codebook and 0 not in f.codebook and kind != "fp8_e4m3":
        return Block(0, 0, False)  # 0, or of E8M0 the least power
    stored = _store(amount, divisor, scheme, global_scale)
    if scheme.full and high > -low:  # where both are as large, the scale is positive
        stored ^= {"fp32": 1 << 31, "bf16": 1 << 15, "fp16": 1 << 15, "fp8_e4m3": 1 << 7}[kind]
    if not scheme.affine:
        return Block(stored, 0, False)
    scale = Fraction(scale_of(stored, scheme, None))
    zero = round(Fraction(fp32(qmin - fp32(low / scale))))  # quotient, difference and rint: three roundings
    return Block(stored, min(max(zero, qmin), qmax), False)


def divisor_of(scheme: Scheme) -> Fraction:
    """What the amax is divided by: the largest value, or the magnitude of the least code."""
    return Fraction(-limits(scheme.format)[0]) if scheme.full else largest(scheme.format)


def _store(amount: Fraction, divisor: Fraction, scheme: Scheme, global_scale: Fraction | None) -> int:
    kind = scheme.scale_format.name
    if global_scale is not None:
        inner = fp32(Fraction(fp32(amount / divisor)) / global_scale)
        if scheme.rounding == "ceil":
            above = [code for code, value in enumerate(magnitudes(FORMATS["fp8_e4m3"])) if value >= inner]
            return min([*above, 0x7E])
        return encode(FORMATS["fp8_e4m3"], to_bits(inner))
    if kind == "e8m0":
        return e8m0(amount, divisor, scheme.rounding)
    scale = fp32_scale(amount, divisor)
    return to_bits(scale) if kind == "fp32" else round_up(scale, BF16 if kind == "bf16" else FP16)


@cache
def scale_of(stored: int, scheme: Scheme, global_scale: Fraction | None) -> Number:
    """The one fp32 number that a block decodes with."""
    kind = scheme.scale_format.name
    if kind == "e8m0":
        return math.nan if stored == 255 else power(stored - 127)
    if kind == "fp8_e4m3":
        value = value_of(FORMATS["fp8_e4m3"], stored)
        return value if isinstance(value, float) else fp32(value * global_scale) if global_scale is not None else value
    return from_bits(stored, {"fp32": FP32, "bf16": BF16, "fp16": FP16}[kind])


def negative_scale(stored: int, scheme: Scheme) -> bool:
    """The sign of a stored scale, which a Fraction of zero does not have."""
    bits = {"fp32": 32, "bf16": 16, "fp16": 16, "e8m0": 9, "fp8_e4m3": 8}[scheme.scale_format.name]
    return bool(stored >> (bits - 1))


def global_scale(patterns: list[int], scheme: Scheme) -> Fraction:
    """The fp32 scale over the block scales of what it spans: finite amax over (divisor * 448)."""
    finite = [abs(Fraction(from_bits(p))) for p in patterns if p & 0x7FFFFFFF < F32_INF]
    amax = max(finite, default=Fraction(0))
    return fp32_scale(amax, divisor_of(scheme) * 448)


# -- tensors -----------------------------------------------------------------------------------------------------------
class Expected(NamedTuple):
    """What quantize must return, and what it must decode to (fp32 patterns)."""

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    global_scale: list[int] | None  # patterns: one for the tensor, or one a row
    decoded: np.ndarray


def quantize(bits: np.ndarray, scheme: Scheme) -> Expected:
    """All of sections 2 to 6 on a small matrix of fp32 patterns ``[rows, cols]``."""
    rows, cols = bits.shape
    r, c = scheme.block[0] or max(rows, 1), scheme.block[1] or max(cols, 1)
    shape = (-(-rows // r), -(-cols // c))
    spans = {None: [], "tensor": [bits], "row": list(bits)}[scheme.global_scale]
    global_scales = [global_scale(span.ravel().tolist(), scheme) for span in spans]
    codes, decoded = np.zeros(bits.shape, np.uint8), np.zeros(bits.shape, np.uint32)
    scale, zero = np.zeros(shape, np.uint32), np.zeros(shape, np.int64)
    for i in range(shape[0]):
        for j in range(shape[1]):
            where = (slice(i * r, (i + 1) * r), slice(j * c, (j + 1) * c))
            above = None if not global_scales else global_scales[i * r if scheme.global_scale == "row" else 0]
            block = block_scale(bits[where].ravel().tolist(), scheme, above)
            scale[i, j], zero[i, j] = block.stored, block.zero_point
            s, minus = scale_of(block.stored, scheme, above), negative_scale(block.stored, scheme)
            pairs = [_element(p, s, minus, block, scheme.format) for p in bits[where].ravel().tolist()]
            codes[where] = np.array([p[0] for p in pairs], np.uint8).reshape(bits[where].shape)
            decoded[where] = np.array([p[1] for p in pairs], np.uint32).reshape(bits[where].shape)
    return Expected(codes, scale, zero, [to_bits(above) for above in global_scales] or None, decoded)


def _element(pattern: int, s: Number, minus: bool, block: Block, f: Format) -> tuple[int, int]:
    if block.broken:
        return nan_code(f, False), F32_NAN
    assert isinstance(s, Fraction)
    negative = bool(pattern & SIGN) ^ minus
    q = to_bits(Fraction(from_bits(pattern)) / s if s else Fraction(0), negative=negative)
    code = encode(f, q, True, block.zero_point)
    return code, decode_scaled(f, code, s, block.zero_point, minus=minus)


def decode_scaled(
    f: Format, code: int, s: Number, zero_point: int = 0, binary: Binary = FP32, minus: bool | None = None
) -> int:
    """The pattern of ``(value - zero point) * s``: fp32, then ``binary``; a NaN is positive and canonical.

    ``minus``: the sign of ``s`` where it is 0.
    """
    value = value_of(f, code)
    if isinstance(value, float) or isinstance(s, float):
        product = float(value) * float(s)
        return to_bits(product if not math.isnan(product) else math.nan, binary)
    value -= zero_point
    negative = f.kind == "float" and bool(code >> (f.bits - 1))
    product = fp32(value * s)
    return to_bits(product, binary, negative ^ (s < 0 if minus is None else minus))
