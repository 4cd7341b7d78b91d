"""Device functions: compute stored scales from block extremes, and convert stored scales to fp32.

Scales travel as fp32 bit patterns (int32). ``SCALE`` is ``spec.scale_spec``: ``(id, rounding, affine, global_scale,
divisor, floor_log2(divisor), full, global_scale divisor, zero_scale)``. ``rounding``: for E8M0 the fraction above which
the exponent is rounded up; for E4M3 whether codes are rounded up. ``global_scale``: 0 none, 1 per tensor, 2 per row.
``zero_scale``: fp32 bits of the scale of a block of zeros, 0 or 1.

Source: docs/numerics.md section 5.
"""

import triton
import triton.language as tl

from lowbit.formats import find
from lowbit.kernels import bits
from lowbit.kernels.spec import format_spec
from lowbit.scaling import SCALE_FORMATS

#: FMT of the float format of block scales under a global scale.
E4M3 = tl.constexpr(format_spec(find(next(row.name for row in SCALE_FORMATS.values() if row.id == 4))))


@triton.jit
def make(high, low, global_scale, FMT: tl.constexpr, SCALE: tl.constexpr):
    """Stored scale (raw int32), its fp32 bits, and the zero point of blocks.

    ``high`` and ``low``: fp32 bits of max(0, max) and max(0, -min), or both are the amax if the scale needs only that.
    Inf and NaN are kept. ``global_scale``: the fp32 global scale, used if the scheme has one.
    """
    non_finite = tl.maximum(high, low) >= 0x7F800000
    extent = tl.maximum(high, low)
    if SCALE[2]:
        span = high.to(tl.float32, bitcast=True) + low.to(tl.float32, bitcast=True)
        extent = tl.minimum(span.to(tl.int32, bitcast=True), 0x7F7FFFFF)
    extent = tl.where(non_finite, 0, extent)
    if SCALE[0] == 3:
        raw, scale = _make_e8m0(extent, non_finite, SCALE)
    elif SCALE[0] == 4:
        raw, scale = _make_e4m3(extent, non_finite, global_scale, SCALE)
    else:
        raw, scale = _make_float(extent, non_finite, SCALE)
    if SCALE[6]:
        # The element of largest magnitude gets the least code: if it is positive, the scale is negative.
        turned = (high > low) & (non_finite == 0)
        sign: tl.constexpr = 7 if SCALE[0] == 4 else 31 if SCALE[0] == 0 else 15
        raw ^= turned.to(tl.int32) << sign
        scale ^= turned.to(tl.int32) << 31
    zero_point = tl.zeros_like(raw)
    if SCALE[2]:
        # low is the magnitude of the minimum, so qmin - lo / scale is a sum.
        wanted = FMT[9] + tl.div_rn(low.to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True))
        wanted = tl.where(wanted < 1048576.0, wanted, 1048576.0)
        # Adding 1.5 * 2**23 leaves the integer, rounded to nearest even, in the mantissa.
        nearest = (wanted + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        zero_point = tl.where(non_finite, 0, tl.minimum(tl.maximum(nearest, FMT[9]), FMT[10]))
    return raw, scale, zero_point


@triton.jit
def _make_float(extent, non_finite, SCALE: tl.constexpr):
    scale = tl.div_rn(extent.to(tl.float32, bitcast=True), SCALE[4]).to(tl.int32, bitcast=True)
    scale = tl.where(extent == 0, SCALE[8], tl.minimum(tl.maximum(scale, 0x00800000), 0x7F7FFFFF))
    if SCALE[0] == 1:
        raw = tl.minimum((scale + 0xFFFF) >> 16, 0x7F7F)
        scale = raw << 16
        raw = tl.where(non_finite, 0x7FC0, raw)
    elif SCALE[0] == 2:
        # Round up to fp16's grid; the scale is a normal fp32 number or 0.
        exponent = (scale >> 23) - 127
        shift = tl.minimum(13 + tl.maximum(-14 - exponent, 0), 24)
        n = (((scale & 0x7FFFFF) | 0x800000) + ((1 << shift) - 1)) >> shift
        raw = tl.where(scale == 0, 0, tl.minimum(((tl.maximum(exponent, -14) + 14) << 10) + n, 0x7BFF))
        scale = raw.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        raw = tl.where(non_finite, 0x7E00, raw)
    else:
        raw = tl.where(non_finite, 0x7FC00000, scale)
    return raw, tl.where(non_finite, 0x7FC00000, scale)


@triton.jit
def _make_e8m0(extent, non_finite, SCALE: tl.constexpr):
    # Subnormals are integers times 2**-149; conversion to fp32 normalizes them.
    small = extent.to(tl.float32).to(tl.int32, bitcast=True)
    normal = extent >= 0x00800000
    code = (tl.where(normal, extent, small) >> 23) - SCALE[5]
    code = tl.where(normal, code, code - 149)
    code += ((tl.where(normal, extent, small) & 0x7FFFFF) > SCALE[1]).to(tl.int32)
    # The biased exponent of 2**e is the code; numerics.md's e is code - 127.
    code = tl.where(extent == 0, SCALE[8] >> 23, tl.minimum(tl.maximum(code, 0), 254))
    code = tl.where(non_finite, 255, code)
    return code, tl.where(non_finite, 0x7FC00000, tl.where(code == 0, 0x00400000, code << 23))


@triton.jit
def _make_e4m3(extent, non_finite, global_scale, SCALE: tl.constexpr):
    ratio = tl.div_rn(extent.to(tl.float32, bitcast=True), SCALE[4])
    above = global_scale.to(tl.int32, bitcast=True)
    sign = (above >> 31) & 1
    limit = above & 0x7FFFFFFF
    limit = tl.where(limit == 0, 0x7F800000, limit).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(ratio, limit).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    sign = tl.zeros_like(wanted) + sign
    if SCALE[1]:
        code = _round_up_e4m3(wanted) | (sign << 7)
    else:
        code = bits.encode_float(sign, wanted, 0, E4M3, True, False)
    scale = _product(bits.decode(code, 0, E4M3), global_scale)
    return tl.where(non_finite, 0x7F, code), tl.where(non_finite, 0x7FC00000, scale)


@triton.jit
def _round_up_e4m3(magnitude):
    """The E4M3 code of unsigned fp32 bits, rounded up, at most the largest value. Zero and NaN are kept."""
    binade = tl.maximum(magnitude >> 23, 121)
    shift = tl.minimum(binade - (magnitude >> 23) + 20, 30)
    kept = (((magnitude & 0x7FFFFF) | 0x800000) + ((1 << shift) - 1)) >> shift
    code = tl.minimum(((binade - 121) << 3) + kept, 0x7E)
    return tl.where(magnitude > 0x7F800000, 0x7F, tl.where(magnitude == 0, 0, code))


@triton.jit
def _product(block, global_scale):
    """fp32 bits of a block scale (fp32 bits) times the global scale. A NaN has the sign of the product too."""
    sign = (block ^ global_scale.to(tl.int32, bitcast=True)) & -0x80000000
    product = (block.to(tl.float32, bitcast=True) * global_scale).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(product > 0x7F800000, 0x7FC00000, product) | sign


@triton.jit
def make_global(amax, DIVISOR: tl.constexpr):
    """fp32 global scales from the fp32 bits of the largest finite magnitudes."""
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), DIVISOR).to(tl.int32, bitcast=True)
    scale = tl.where(amax == 0, 0x3F800000, tl.minimum(tl.maximum(scale, 0x00800000), 0x7F7FFFFF))
    return scale.to(tl.float32, bitcast=True)


@triton.jit
def load_global_scale(ptr, at, ok, blocks_c, SCALE: tl.constexpr):
    """The global scales of blocks with linear indices ``at``: one for all, or one per row."""
    if SCALE[3] == 2:
        return tl.load(ptr + at // blocks_c, ok, 1.0)
    elif SCALE[3]:
        return tl.load(ptr)
    else:
        return tl.full([], 1.0, tl.float32)


@triton.jit
def widen(raw, global_scale, SCALE: tl.constexpr):
    """fp32 bits of stored scales, with their signs. ``global_scale``: fp32, used if the scheme has one."""
    if SCALE[0] == 3:
        code = raw.to(tl.int32)
        return tl.where(code == 255, 0x7FC00000, tl.where(code == 0, 0x00400000, code << 23))
    elif SCALE[0] == 4:
        return _product(bits.decode(raw.to(tl.int32), 0, E4M3), global_scale)
    else:
        sign, magnitude = bits.split(raw, SCALE[0])
        return magnitude | (sign << 31)


@triton.jit
def divide(sign, magnitude, scale, SCALE: tl.constexpr):
    """``x / scale`` as (sign, magnitude): |x| / |scale| rounded to fp32. A zero scale divides like Inf."""
    sign = sign ^ ((scale >> 31) & 1)
    scale = scale & 0x7FFFFFFF
    if SCALE[0] == 3:
        # Multiplying by 2**-e is bit-identical to dividing by 2**e: both round the same number.
        inverse = tl.where(scale == 0x00400000, 0x7F000000, 0x7F000000 - scale)
        inverse = tl.where(inverse == 0, 0x00400000, inverse)
        inverse = tl.where(scale > 0x7F800000, scale, inverse)
        quotient = magnitude.to(tl.float32, bitcast=True) * inverse.to(tl.float32, bitcast=True)
    else:
        scale = tl.where(scale == 0, 0x7F800000, scale)
        quotient = tl.div_rn(magnitude.to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True))
    return sign, quotient.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def multiply(value, scale, DTYPE: tl.constexpr):
    """``value * scale`` (both fp32 bits) in fp32, as an output pattern."""
    product = value.to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)
    return bits.narrow(product.to(tl.int32, bitcast=True), DTYPE, False)
