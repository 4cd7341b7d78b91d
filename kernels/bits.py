"""Device functions: fp32 bit patterns to codes and back.

They use integer operations and fp32 operations that are exact or rounded to nearest, so all targets are bit-identical.
A number is ``(sign, magnitude)``: int32 0 or 1, and the int32 bit pattern of its absolute value. ``FMT`` is
``spec.format_spec``. ``DTYPE`` is a value of ``spec.DTYPES``: 0 fp32, 1 bf16, 2 fp16. The 16-bit types are loaded and
stored as int16, because conversions of NaN lose its sign.

Source: docs/numerics.md sections 2 to 4 and 6.
"""

import triton
import triton.language as tl

#: ``CONVERT`` for no hardware conversion. Triton 3.6 does not support a string as a default.
NO_CONVERSION = tl.constexpr("")

#: Converts four fp32 numbers to four bytes of one FP4 code each. The instruction packs two codes, the first above.
FP4 = tl.constexpr(
    "{ .reg .b8 low, high; .reg .b32 word, upper; "
    "cvt.rn.satfinite.e2m1x2.f32 low, $2, $1; cvt.rn.satfinite.e2m1x2.f32 high, $4, $3; "
    "mov.b32 word, {low, low, high, high}; shr.u32 upper, word, 4; "
    "and.b32 word, word, 0x000f000f; and.b32 upper, upper, 0x0f000f00; or.b32 $0, word, upper; }"
)
FP4_REGISTERS = tl.constexpr("=r,r,r,r,r")


@triton.jit
def split(raw, DTYPE: tl.constexpr):
    """Sign and fp32 magnitude bits of loaded bit patterns (int32 for fp32, int16 for bf16 and fp16)."""
    if DTYPE == 0:
        wide = raw
    elif DTYPE == 1:
        wide = raw.to(tl.int32) << 16
    else:
        half = (raw & 0x7FFF).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        wide = half | ((raw.to(tl.int32) >> 15) << 31)
    return (wide >> 31) & 1, wide & 0x7FFFFFFF


@triton.jit
def narrow(bits, DTYPE: tl.constexpr, KEEP_SIGN: tl.constexpr):
    """The output pattern of fp32 ``bits``: nearest even, Inf on overflow, canonical quiet NaN."""
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 31) & 1
    nan = magnitude > 0x7F800000
    if not KEEP_SIGN:
        sign = tl.where(nan, 0, sign)
    if DTYPE == 0:
        return tl.where(nan, 0x7FC00000, magnitude) | (sign << 31)
    elif DTYPE == 1:
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        return (tl.where(nan, 0x7FC0, rounded) | (sign << 15)).to(tl.int16)
    else:
        half = magnitude.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return (tl.where(nan, 0x7E00, half) | (sign << 15)).to(tl.int16)


@triton.jit
def encode_float(sign, magnitude, random, FMT: tl.constexpr, SATURATE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes of a float format. ``random``: uint16 as int32, used if STOCHASTIC."""
    BITS: tl.constexpr = FMT[1]
    MANTISSA: tl.constexpr = FMT[3]
    EMIN: tl.constexpr = 1 - FMT[4]
    MAX: tl.constexpr = FMT[6]
    NAN: tl.constexpr = FMT[8]
    if STOCHASTIC or EMIN - MANTISSA > 104:
        code = _round_any(magnitude, random, EMIN, MANTISSA, STOCHASTIC)
    else:
        # Normal numbers: round the fp32 pattern, then shift its exponent. The last bit is the mantissa's, or the hidden
        # bit (odd) for a format without mantissa. Subnormals: adding the power of two whose unit is the format's
        # smallest step leaves the code, rounded to nearest even, in the mantissa.
        DROP: tl.constexpr = 23 - MANTISSA
        odd = (magnitude >> DROP) & 1 if MANTISSA > 0 else 1
        normal = (magnitude + ((1 << (DROP - 1)) - 1) + odd) >> DROP
        UNIT: tl.constexpr = (EMIN - MANTISSA + 150) << 23
        small = magnitude.to(tl.float32, bitcast=True) + 2.0 ** (EMIN - MANTISSA + 23)
        small = small.to(tl.int32, bitcast=True) - UNIT
        code = tl.where(magnitude < (EMIN + 127) << 23, small, normal - ((EMIN + 126) << MANTISSA))
    if SATURATE:
        code = tl.minimum(code, MAX)
    elif FMT[7] >= 0:
        code = tl.minimum(code, FMT[7])
    elif NAN >= 0:
        code = tl.where(code > MAX, NAN, code)
    else:
        code = tl.minimum(code, MAX)
    nan = magnitude > 0x7F800000
    if NAN >= 0:
        return tl.where(nan, NAN, code) | (sign << (BITS - 1))
    else:
        return tl.where(nan, MAX, code | (sign << (BITS - 1)))


@triton.jit
def convert_float(sign, magnitude, CONVERT: tl.constexpr):
    """FP8 and FP4 codes by the GPU's conversion instruction: to nearest, saturating.

    For FP8 it loses the sign of NaN. FP4 has no NaN: NaN becomes the largest number.

    Source: PTX ISA, cvt.rn.satfinite, to which Triton compiles a cast to FP8.
    """
    wide = magnitude | (sign << 31)
    if CONVERT == "e2m1":
        return tl.inline_asm_elementwise(FP4, FP4_REGISTERS, [wide], tl.int8, True, 4).to(tl.int32)
    value = wide.to(tl.float32, bitcast=True)
    if CONVERT == "e4m3":
        code = value.to(tl.float8e4nv)
    else:
        code = value.to(tl.float8e5)
    return code.to(tl.uint8, bitcast=True).to(tl.int32) | (sign << 7)


@triton.jit
def _round_any(magnitude, random, EMIN: tl.constexpr, MANTISSA: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes on a float format's grid with unbounded exponent, for any rounding: see docs/numerics.md section 7."""
    field = magnitude >> 23
    exponent = tl.maximum(field, 1) - 127
    significand = tl.where(field > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
    shift = 23 - MANTISSA + tl.maximum(EMIN - exponent, 0)
    if STOCHASTIC:
        whole = tl.minimum(shift, 24)
        n = significand >> whole
        fraction = (significand - (n << whole)) >> (tl.minimum(shift, 40) - 16)
        n += (fraction + random) >> 16
    else:
        whole = tl.minimum(shift, 25)
        n = (significand + ((1 << (whole - 1)) - 1) + ((significand >> whole) & 1)) >> whole
    return ((tl.maximum(exponent, EMIN) - EMIN) << MANTISSA) + n


@triton.jit
def clip(magnitude):
    """Magnitudes as fp32, at most 2**20, also for NaN: above every qmax + zero point, and later steps stay exact."""
    value = magnitude.to(tl.float32, bitcast=True)
    return tl.where(value < 1048576.0, value, 1048576.0)


@triton.jit
def round_integer(sign, magnitude):
    """The nearest integers (int32, clipped), ties to even: adding 2**23 leaves the integer in the mantissa."""
    n = (clip(magnitude) + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(sign != 0, -n, n)


@triton.jit
def encode_integer(sign, magnitude, random, zero_point, FMT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes of an integer format: round, add the zero point, clamp. NaN becomes the zero point."""
    if STOCHASTIC:
        value = clip(magnitude)
        n = value.to(tl.int32)
        n += (((value - n.to(tl.float32)) * 65536.0).to(tl.int32) + random) >> 16
        n = tl.where(sign != 0, -n, n)
    else:
        n = round_integer(sign, magnitude)
    q = tl.minimum(tl.maximum(n + zero_point, FMT[9]), FMT[10])
    return tl.where(magnitude > 0x7F800000, zero_point, q) & ((1 << FMT[1]) - 1)


@triton.jit
def constants(FMT: tl.constexpr, FIELD: tl.constexpr):
    """fp32 constants (a power of two of them) as a tensor for ``look_up``, made by compares and selects once per tile.

    Compares and selects per element would take the compiler a minute. The format and its field are passed, because in
    Triton 3.6 a function within a kernel cannot take a tuple of numbers.
    """
    place = tl.arange(0, len(FMT[FIELD]))
    table = tl.full(place.shape, FMT[FIELD][0], tl.float32)
    for k in tl.static_range(1, len(FMT[FIELD])):
        table = tl.where(place == k, FMT[FIELD][k], table)
    return table


@triton.jit
def look_up(table, index):
    """The entries of a one-dimensional table at ``index``, of any shape."""
    return tl.reshape(tl.gather(table, tl.ravel(index), 0), index.shape)


@triton.jit
def encode_codebook(sign, magnitude, random, FMT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes of a codebook: the number of thresholds below the number. NaN becomes the entry nearest zero.

    Stochastic: the largest entry at or below the number, or the next one. Both use bisection.
    """
    value = (magnitude | (sign << 31)).to(tl.float32, bitcast=True)
    code = tl.zeros_like(magnitude)
    if STOCHASTIC:
        value = tl.minimum(tl.maximum(value, FMT[14][0]), FMT[14][-1])
        entries = constants(FMT, 14)
    else:
        cuts = constants(FMT, 13)
    BITS: tl.constexpr = FMT[1]
    for k in tl.static_range(BITS):
        above = code + (1 << (BITS - 1 - k))
        if STOCHASTIC:
            code = tl.where(value >= look_up(entries, above), above, code)
        else:
            code = tl.where(value > look_up(cuts, above), above, code)
    if STOCHASTIC:
        part = (value - look_up(entries, code)) * look_up(constants(FMT, 15), code)
        code += (tl.minimum(part.to(tl.int32), 65535) + random) >> 16
    return tl.where(magnitude > 0x7F800000, FMT[12], code)


@triton.jit
def encode(
    sign, magnitude, random, zero_point,
    FMT: tl.constexpr, SATURATE: tl.constexpr, STOCHASTIC: tl.constexpr, CONVERT: tl.constexpr = NO_CONVERSION,
):  # fmt: skip
    """Codes (int32) of numbers that are divided by their scale. CONVERT: for ``convert_float``, if supported."""
    if CONVERT != "":
        return convert_float(sign, magnitude, CONVERT)
    elif FMT[0] == 0:
        return encode_float(sign, magnitude, random, FMT, SATURATE, STOCHASTIC)
    elif FMT[0] == 1:
        return encode_integer(sign, magnitude, random, zero_point, FMT, STOCHASTIC)
    else:
        return encode_codebook(sign, magnitude, random, FMT, STOCHASTIC)


@triton.jit
def decode(code, zero_point, FMT: tl.constexpr):
    """fp32 bits (int32) of the values of codes (int32). NaN is 0x7fc00000 with the code's sign."""
    BITS: tl.constexpr = FMT[1]
    MANTISSA: tl.constexpr = FMT[3]
    BIAS: tl.constexpr = FMT[4]
    if FMT[0] == 0:
        magnitude = code & ((1 << (BITS - 1)) - 1)
        if BIAS >= 0:
            # Shifted to fp32's fields, only the exponent bias is wrong; a subnormal code becomes a subnormal pattern.
            pattern = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True)
            bits = (pattern * 2.0 ** (127 - BIAS)).to(tl.int32, bitcast=True)
        else:
            small = (magnitude.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA)).to(tl.int32, bitcast=True)
            normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
            bits = tl.where(magnitude >> MANTISSA == 0, small, normal)
        if FMT[8] >= 0:
            bits = tl.where(magnitude > FMT[6], 0x7FC00000, bits)
        if FMT[7] >= 0:
            bits = tl.where(magnitude == FMT[7], 0x7F800000, bits)
        return bits | ((code << (32 - BITS)) & -0x80000000)
    elif FMT[0] == 1:
        q = code
        if FMT[5]:
            q = (code << (32 - BITS)) >> (32 - BITS)
        return (q - zero_point).to(tl.float32).to(tl.int32, bitcast=True)
    elif FMT[0] == 2:
        return look_up(constants(FMT, 14), code).to(tl.int32, bitcast=True)
    else:
        bits = tl.where(code == 0, 0x00400000, code << 23)
        return tl.where(code == 255, 0x7FC00000, bits)
