// The numerics specification, one element at a time, for CPU and GPU: docs/numerics.md, whose sections are cited.
//
// Rounding and scales are integer arithmetic on fp32 bit patterns. What is left to floating point is one fp32 division,
// product, sum or difference at a time, to nearest even, subnormals honoured, never contracted.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/params.h"

namespace lowbit {

constexpr uint32_t kSign = 0x80000000u, kMagnitude = 0x7fffffffu, kInf = 0x7f800000u, kNan = 0x7fc00000u;
constexpr uint32_t kOne = 0x3f800000u;
constexpr uint32_t kMinScale = 0x00800000u;   // 2^-126, the least normal fp32
constexpr uint32_t kMaxFinite = 0x7f7fffffu;  // the largest finite fp32

LOWBIT_HD uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return b;
}
LOWBIT_HD float float_of(uint32_t b) {
    float x;
    memcpy(&x, &b, 4);
    return x;
}
LOWBIT_HD bool is_nan(uint32_t bits) { return (bits & kMagnitude) > kInf; }

LOWBIT_HD float clamp(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

// Correctly rounded.
LOWBIT_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// floor(log2(v)), v > 0.
LOWBIT_HD int floor_log2(uint32_t v) {
#if defined(__CUDA_ARCH__)
    return 31 - __clz(static_cast<int>(v));
#else
    return 31 - __builtin_clz(v);
#endif
}

// A positive fp32 as significand * 2^(exponent - 23); subnormals have exponent -126 and no hidden bit.
struct Parts {
    uint32_t significand;
    int exponent;
};
LOWBIT_HD Parts parts_of(uint32_t magnitude) {
    const uint32_t field = magnitude >> 23, fraction = magnitude & 0x7fffffu;
    return field == 0 ? Parts{fraction, -126} : Parts{fraction | 0x800000u, static_cast<int>(field) - 127};
}

// -- rounding (sections 2 and 7) --------------------------------------------------------------------------------------

// significand / 2^shift to nearest even. Shifts of 26 and more give zero.
LOWBIT_HD uint32_t shift_nearest(uint32_t significand, int shift) {
    if (shift > 25) return 0;
    const uint32_t kept = significand >> shift;
    return (significand + ((1u << shift) >> 1) - (shift > 0) + ((shift > 0) & kept & 1u)) >> shift;
}

// significand / 2^shift, rounded up if the fraction's first 16 bits plus 16 random bits carry.
LOWBIT_HD uint32_t shift_stochastic(uint32_t significand, int shift, uint32_t noise) {
    if (shift > 40) shift = 40;
    const uint64_t kept = static_cast<uint64_t>(significand) >> shift;
    const uint64_t rest = static_cast<uint64_t>(significand) - (kept << shift);
    return static_cast<uint32_t>(kept + ((((rest << 16) >> shift) + noise) >> 16));
}

// Codes on the grid of a format with unbounded exponent, for a finite magnitude or Inf.
struct Grid {
    int mantissa;
    int emin;
};
LOWBIT_HD int grid_shift(int exponent, Grid g) { return 23 - g.mantissa + (g.emin > exponent ? g.emin - exponent : 0); }
LOWBIT_HD uint32_t grid_base(int exponent, Grid g) {
    return static_cast<uint32_t>(exponent > g.emin ? exponent - g.emin : 0) << g.mantissa;
}
LOWBIT_HD uint32_t round_nearest(uint32_t magnitude, Grid g) {
    const Parts p = parts_of(magnitude);
    return grid_base(p.exponent, g) + shift_nearest(p.significand, grid_shift(p.exponent, g));
}
LOWBIT_HD uint32_t round_stochastic(uint32_t magnitude, Grid g, uint32_t noise) {
    const Parts p = parts_of(magnitude);
    return grid_base(p.exponent, g) + shift_stochastic(p.significand, grid_shift(p.exponent, g), noise);
}
LOWBIT_HD Grid grid_of(const FormatParams& f) { return {f.mantissa, 1 - f.bias}; }

// -- float formats (sections 2 and 6) ---------------------------------------------------------------------------------

// What overflow becomes: the largest finite code when saturating, else Inf, else NaN, else the largest all the same.
LOWBIT_HD uint32_t overflow_code(const FormatParams& f, bool saturate) {
    if (saturate || f.nan_code < 0) return static_cast<uint32_t>(f.max_code);
    return static_cast<uint32_t>(f.inf_code >= 0 ? f.inf_code : f.nan_code);
}

LOWBIT_HD uint32_t nan_code_of(const FormatParams& f, uint32_t bits) {
    if (f.nan_code < 0) return static_cast<uint32_t>(f.max_code);  // FP6 and FP4: +max whatever the sign
    return static_cast<uint32_t>(f.nan_code) | ((bits >> 31) << (f.bits - 1));
}

// fp32 bits to a code. `noise` (16 random bits) counts only where `stochastic`.
LOWBIT_HD uint32_t encode_float(uint32_t bits, const FormatParams& f, bool saturate, bool stochastic, uint32_t noise) {
    const uint32_t magnitude = bits & kMagnitude;
    if (magnitude > kInf) return nan_code_of(f, bits);
    uint32_t code = stochastic ? round_stochastic(magnitude, grid_of(f), noise) : round_nearest(magnitude, grid_of(f));
    if (code > static_cast<uint32_t>(f.max_code)) code = overflow_code(f, saturate);
    return code | ((bits >> 31) << (f.bits - 1));
}

// fp32 bits of the value of `magnitude`, a code without sign on a grid with unbounded exponent.
LOWBIT_HD uint32_t grid_value(uint32_t magnitude, Grid g) {
    const uint32_t field = magnitude >> g.mantissa, fraction = magnitude & ((1u << g.mantissa) - 1u);
    if (field > 0) {
        return (static_cast<uint32_t>(static_cast<int>(field) - 1 + g.emin + 127) << 23) |
               (fraction << (23 - g.mantissa));
    }
    if (fraction == 0) return 0;
    const int top = floor_log2(fraction);
    return (static_cast<uint32_t>(g.emin - g.mantissa + top + 127) << 23) | ((fraction << (23 - top)) & 0x7fffffu);
}

// A code's value as fp32 bits; NaN is 0x7fc00000 with the code's sign.
LOWBIT_HD uint32_t decode_float(uint32_t code, const FormatParams& f) {
    const uint32_t magnitude = code & ((1u << (f.bits - 1)) - 1u), sign = ((code >> (f.bits - 1)) & 1u) << 31;
    if (magnitude > static_cast<uint32_t>(f.max_code)) {
        return sign | (static_cast<int32_t>(magnitude) == f.inf_code ? kInf : kNan);
    }
    return sign | grid_value(magnitude, grid_of(f));
}

// -- integers and codebooks (sections 3, 4 and 7) ---------------------------------------------------------------------

LOWBIT_HD float decode_integer(uint32_t code, const FormatParams& f) {
    const uint32_t sign = f.is_signed ? 1u << (f.bits - 1) : 0u;
    return static_cast<float>(static_cast<int32_t>((code & ((1u << f.bits) - 1u)) ^ sign) - static_cast<int32_t>(sign));
}

LOWBIT_HD float round_integer(float v, bool stochastic, uint32_t noise) {
    if (!stochastic) return rintf(v);
    const uint32_t bits = bits_of(v), magnitude = bits & kMagnitude;
    if (magnitude >= 0x4b000000u) return v;  // 2^23 and above are whole already
    const Parts p = parts_of(magnitude);
    const uint32_t n = shift_stochastic(p.significand, 23 - p.exponent, noise);
    return float_of(bits_of(static_cast<float>(n)) | (bits & kSign));
}

// `v` is x / scale.
LOWBIT_HD uint32_t encode_integer(float v, const FormatParams& f, float zero_point, bool stochastic, uint32_t noise) {
    float q = zero_point;
    if (!is_nan(bits_of(v))) {
        q = clamp(round_integer(v, stochastic, noise) + zero_point, static_cast<float>(f.qmin),
                  static_cast<float>(f.qmax));
    }
    return static_cast<uint32_t>(static_cast<int32_t>(q)) & ((1u << f.bits) - 1u);
}

// Whether v = x / scale is encoded without clamping; NaN is not.
LOWBIT_HD bool integer_in_range(float v, const FormatParams& f, float zero_point) {
    const float q = rintf(v) + zero_point;
    return q >= static_cast<float>(f.qmin) && q <= static_cast<float>(f.qmax);
}

// Book: thresholds, values and weights of a FormatRow (format_table.h), and their numbers.
template <class Book>
LOWBIT_HD uint32_t encode_codebook(float v, const Book& book, bool stochastic, uint32_t noise) {
    if (is_nan(bits_of(v))) return static_cast<uint32_t>(book.zero_code);
    uint32_t code = 0;
    if (!stochastic) {
        for (int k = 0; k < book.num_thresholds; ++k) code += v > float_of(book.thresholds[k]);
        return code;
    }
    v = clamp(v, float_of(book.values[0]), float_of(book.values[book.num_thresholds]));
    for (int k = 1; k <= book.num_thresholds; ++k) code += v >= float_of(book.values[k]);
    const float above = v - float_of(book.values[code]);
    const uint32_t fraction = static_cast<uint32_t>(above * float_of(book.weights[code]));
    return code + (((fraction < 65535u ? fraction : 65535u) + noise) >> 16);
}

// -- 16-bit floats ----------------------------------------------------------------------------------------------------

LOWBIT_HD uint32_t widen_bf16(uint16_t h) { return static_cast<uint32_t>(h) << 16; }
LOWBIT_HD uint32_t widen_fp16(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu, sign = (h & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return sign | kInf | ((magnitude & 0x3ffu) << 13);
    return sign | grid_value(magnitude, Grid{10, -14});
}

// fp32 to nearest even, overflow to Inf; NaN is canonical and keeps its sign.
LOWBIT_HD uint16_t narrow_bf16(uint32_t bits) {
    if (is_nan(bits)) return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | 0x7fc0u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
LOWBIT_HD uint16_t narrow_fp16(uint32_t bits) {
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & kMagnitude;
    if (magnitude > kInf) return static_cast<uint16_t>(sign | 0x7e00u);
    const uint32_t code = round_nearest(magnitude, Grid{10, -14});
    return static_cast<uint16_t>(sign | (code > 0x7c00u ? 0x7c00u : code));
}

// -- scales (section 5) -----------------------------------------------------------------------------------------------

// A positive fp32, zero or Inf rounded towards +Inf to a float format, its largest finite value at most.
LOWBIT_HD uint32_t round_up(uint32_t bits, Grid g, uint32_t max_code) {
    const Parts p = parts_of(bits);
    int shift = grid_shift(p.exponent, g);
    if (shift > 30) shift = 30;
    const uint32_t code = grid_base(p.exponent, g) + ((p.significand + (1u << shift) - 1u) >> shift);
    return code > max_code ? max_code : code;
}
LOWBIT_HD uint16_t round_up_bf16(uint32_t bits) { return static_cast<uint16_t>(round_up(bits, {7, -126}, 0x7f7fu)); }
LOWBIT_HD uint16_t round_up_fp16(uint32_t bits) { return static_cast<uint16_t>(round_up(bits, {10, -14}, 0x7bffu)); }

// The E8M0 code of 2^(floor_log2(amount) - floor_log2(divisor)), one more where the fraction of amount is above
// `raise_above`; both are positive and finite.
LOWBIT_HD uint32_t e8m0_code(uint32_t amount, uint32_t divisor, uint32_t raise_above) {
    const int top = floor_log2(amount & kMagnitude);
    const int exponent = amount >= kMinScale ? static_cast<int>(amount >> 23) - 127 : top - 149;
    const uint32_t mantissa = amount >= kMinScale ? amount & 0x7fffffu : (amount << (23 - top)) & 0x7fffffu;
    int e = exponent - (static_cast<int>(divisor >> 23) - 127);
    if (mantissa > raise_above) e += 1;
    e = e < -127 ? -127 : e > 127 ? 127 : e;
    return static_cast<uint32_t>(e + 127);
}
LOWBIT_HD uint32_t e8m0_value(uint32_t code) { return code == 255 ? kNan : code == 0 ? 0x00400000u : code << 23; }

// The divisor of elements: the scale, but Inf for a scale of zero; its sign is the scale's.
LOWBIT_HD float divisor_of(float scale) {
    const uint32_t bits = bits_of(scale);
    return (bits & kMagnitude) == 0 ? float_of(bits | kInf) : scale;
}

// |x| / |divisor| with sign(x) xor sign(divisor), so that a NaN has the sign that the rules give it.
LOWBIT_HD float quotient(float x, float divisor) {
    const uint32_t sign = (bits_of(x) ^ bits_of(divisor)) & kSign;
    const float q = divide(float_of(bits_of(x) & kMagnitude), float_of(bits_of(divisor) & kMagnitude));
    return float_of((bits_of(q) & kMagnitude) | sign);
}

// -- stochastic rounding (section 7) ----------------------------------------------------------------------------------

struct Words {
    uint32_t w[4];
};

// Philox4x32-10. Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
LOWBIT_HD Words philox(uint64_t block, uint32_t step, uint32_t stream, uint64_t seed) {
    uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = step, c3 = stream;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
        const uint32_t h0 = static_cast<uint32_t>(p0 >> 32), h1 = static_cast<uint32_t>(p1 >> 32);
        c0 = h1 ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(p1);
        c2 = h0 ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The 16 random bits of the element with that index in the whole tensor.
LOWBIT_HD uint32_t noise16(uint64_t index, const Rng& rng) {
    const Words words = philox(index >> 3, rng.step, rng.stream, rng.seed);
    const uint32_t j = static_cast<uint32_t>(index & 7u);
    return (words.w[j >> 1] >> (16u * (j & 1u))) & 0xffffu;
}

}  // namespace lowbit
