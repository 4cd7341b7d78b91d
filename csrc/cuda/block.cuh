// Blocks and their scales: what a block's maxima become, and what stored scales mean. docs/numerics.md section 5.
#pragma once

#include "cuda/element.cuh"

namespace lowbit {
namespace cuda {

// What a scale depends on: the largest magnitude bits among a block's negative and its other elements. Inf and NaN win,
// since the maximum is an integer's.
struct Extremes {
    uint32_t negative, positive;

    LOWBIT_HD void add(uint32_t bits) {
        const uint32_t magnitude = bits & kMagnitude;
        if ((bits & kSign) != 0) {
            negative = magnitude > negative ? magnitude : negative;
        } else {
            positive = magnitude > positive ? magnitude : positive;
        }
    }
    LOWBIT_HD void add(const Extremes& other) {
        negative = other.negative > negative ? other.negative : negative;
        positive = other.positive > positive ? other.positive : positive;
    }
    LOWBIT_HD uint32_t amax() const { return negative > positive ? negative : positive; }
};

// A scheme as kernels take it: block sizes clipped to the matrix, divisors as fp32 bits.
struct Blocks {
    Codec codec;
    uint32_t rows, cols;              // of a block
    uint32_t block_rows, block_cols;  // numbers of blocks
    uint32_t divisor, outer_divisor;  // Scheme.amax_divisor and outer_divisor
    int32_t scale_format, ceil, affine;
    bool whole_octets;  // no octet holds elements of two blocks

    LOWBIT_HD int64_t index(uint32_t row, uint32_t col) const {
        return static_cast<int64_t>(row / rows) * block_cols + col / cols;
    }
};

// A block's scale: as stored, and the fp32 number that it means; zero point as a float.
struct BlockScale {
    uint32_t stored;
    float value;
    float zero_point;
};

// E4M3, in which the inner of two levels of scales is stored.
LOWBIT_HD FormatParams inner_format() {
    constexpr FormatParams format = kFormats[kIndex_fp8_e4m3].params;
    return format;
}

// fp32 bits of a stored scale, the outer level left out.
LOWBIT_HD uint32_t decode_scale(uint32_t stored, int32_t scale_format) {
    switch (scale_format) {
        case kScaleFp32:
            return stored;
        case kScaleBf16:
            return widen_bf16(static_cast<uint16_t>(stored));
        case kScaleFp16:
            return widen_fp16(static_cast<uint16_t>(stored));
        case kScaleE8m0:
            return e8m0_value(stored);
        default:
            return decode_float(stored, inner_format());
    }
}

LOWBIT_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// The stored scale of an amount (amax, or range of affine blocks): positive fp32 bits or zero, finite.
LOWBIT_HD uint32_t store_scale(uint32_t amount, const Blocks& b, const float* outer) {
    if (b.scale_format == kScaleE8m0) return amount == 0 ? 127u : e8m0_code(amount, b.divisor, b.ceil != 0);
    const float ratio = divide(float_of(amount), float_of(b.divisor));
    if (outer != nullptr) return encode_float(bits_of(divide(ratio, *outer)), inner_format(), true, false, 0);
    uint32_t scale = bits_of(ratio);
    scale = amount == 0 ? kOne : scale < kMinScale ? kMinScale : scale;
    if (b.scale_format == kScaleBf16) return round_up_bf16(scale);
    return b.scale_format == kScaleFp16 ? round_up_fp16(scale) : scale;
}

LOWBIT_HD uint32_t nan_scale(int32_t scale_format) {
    switch (scale_format) {
        case kScaleFp32:
            return kNan;
        case kScaleBf16:
            return 0x7fc0u;
        case kScaleFp16:
            return 0x7e00u;
        case kScaleE8m0:
            return 0xffu;
        default:
            return static_cast<uint32_t>(inner_format().nan_code);
    }
}

LOWBIT_HD float scale_value(uint32_t stored, int32_t scale_format, const float* outer) {
    const float value = float_of(decode_scale(stored, scale_format));
    return outer == nullptr ? value : value * *outer;
}

LOWBIT_HD float clamp_code(float q, const FormatParams& f) {
    const float low = static_cast<float>(f.qmin), high = static_cast<float>(f.qmax);
    return q < low ? low : q > high ? high : q;
}

LOWBIT_HD BlockScale make_scale(const Extremes& e, const Blocks& b, const float* outer) {
    BlockScale out = {nan_scale(b.scale_format), 0.0f, 0.0f};
    const bool broken = e.amax() >= kInf;
    if (!broken && b.affine != 0) {
        const float low = float_of(e.negative == 0 ? 0u : e.negative | kSign), high = float_of(e.positive);
        uint32_t range = bits_of(high - low);
        range = range > kMaxFinite ? kMaxFinite : range;
        out.stored = store_scale(range, b, nullptr);
        out.value = scale_value(out.stored, b.scale_format, nullptr);
        const FormatParams& f = b.codec.format;
        out.zero_point = clamp_code(rintf(static_cast<float>(f.qmin) - divide(low, out.value)), f);
        return out;
    }
    if (!broken) out.stored = store_scale(e.amax(), b, outer);
    out.value = scale_value(out.stored, b.scale_format, outer);
    return out;
}

// fp32 bits of the outer scale, for the largest finite magnitude of a tensor.
LOWBIT_HD uint32_t make_outer_scale(uint32_t amax, uint32_t outer_divisor) {
    const uint32_t scale = bits_of(divide(float_of(amax), float_of(outer_divisor)));
    return amax == 0 ? kOne : scale < kMinScale ? kMinScale : scale;
}

// -- memory ------------------------------------------------------------------------------------------------------

LOWBIT_HD int scale_bytes(int32_t scale_format) {
    return scale_format == kScaleFp32 ? 4 : scale_format == kScaleBf16 || scale_format == kScaleFp16 ? 2 : 1;
}

__device__ __forceinline__ void write_scale(const Scales& to, const Blocks& b, int64_t index, const BlockScale& scale) {
    switch (scale_bytes(b.scale_format)) {
        case 4:
            static_cast<uint32_t*>(to.scale)[index] = scale.stored;
            break;
        case 2:
            static_cast<uint16_t*>(to.scale)[index] = static_cast<uint16_t>(scale.stored);
            break;
        default:
            static_cast<uint8_t*>(to.scale)[index] = static_cast<uint8_t>(scale.stored);
    }
    if (b.affine != 0)
        static_cast<uint8_t*>(to.zero_point)[index] = static_cast<uint8_t>(static_cast<int>(scale.zero_point));
}

__device__ __forceinline__ BlockScale read_scale(const Scales& from, const Blocks& b, int64_t index) {
    BlockScale out = {0, 0.0f, 0.0f};
    switch (scale_bytes(b.scale_format)) {
        case 4:
            out.stored = static_cast<const uint32_t*>(from.scale)[index];
            break;
        case 2:
            out.stored = static_cast<const uint16_t*>(from.scale)[index];
            break;
        default:
            out.stored = static_cast<const uint8_t*>(from.scale)[index];
    }
    out.value = scale_value(out.stored, b.scale_format, from.outer);
    if (b.affine != 0) {
        const uint8_t zero_point = static_cast<const uint8_t*>(from.zero_point)[index];
        out.zero_point = b.codec.format.is_signed ? static_cast<int8_t>(zero_point) : zero_point;
    }
    return out;
}

// The largest finite value of a format, as fp32.
inline float format_max(const Codec& codec) {
    return float_of(decode_any(static_cast<uint32_t>(codec.format.max_code), codec));
}

inline const char* make_blocks(const SchemeParams& scheme, int64_t rows, int64_t cols, Blocks* blocks) {
    const char* error = make_codec(scheme.format, &blocks->codec);
    if (error != nullptr) return error;
    if (rows > INT32_MAX || cols > INT32_MAX) return "lowbit CUDA kernels take at most 2^31 - 1 rows and columns";
    Blocks& b = *blocks;
    b.rows = static_cast<uint32_t>(scheme.block_rows < rows ? scheme.block_rows : rows);
    b.cols = static_cast<uint32_t>(scheme.block_cols < cols ? scheme.block_cols : cols);
    b.block_rows = static_cast<uint32_t>((rows + b.rows - 1) / b.rows);
    b.block_cols = static_cast<uint32_t>((cols + b.cols - 1) / b.cols);
    const float max = format_max(b.codec);
    const FormatParams& f = scheme.format;
    b.divisor = bits_of(scheme.affine ? static_cast<float>(f.qmax - f.qmin) : max);
    b.outer_divisor =
        bits_of(max * float_of(decode_float(static_cast<uint32_t>(inner_format().max_code), inner_format())));
    b.scale_format = scheme.scale_format;
    b.ceil = scheme.ceil;
    b.affine = scheme.affine;
    b.whole_octets = b.block_cols == 1 || b.cols % 8 == 0;
    return nullptr;
}

}  // namespace cuda
}  // namespace lowbit
