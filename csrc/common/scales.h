// Scales of blocks, for CPU and GPU: from a block's maxima to the stored number, and back. docs/numerics.md section 5.
#pragma once

#include "common/numerics.h"
#include "format_table.h"

namespace lowbit {

// What a scheme's scales are computed with, worked out once a call.
struct ScaleRule {
    uint32_t divisor, global_scale_divisor;               // fp32 bits of Scheme.amax_divisor and global_scale_divisor
    uint32_t raise_above;                                 // Scheme.raise_above, of E8M0 scales
    uint32_t zero_scale;                                  // fp32 bits of Scheme.zero_scale
    float qmin, qmax;                                     // of zero points
    int32_t scale_format, ceil, affine, full, is_signed;  // `ceil`: of E4M3 scales
    int32_t both_ends;  // made from the largest positive and the largest negative magnitude, not from the amax alone
};

// A block's scale: as stored, and the fp32 number that it means; the zero point as a float.
struct BlockScale {
    uint32_t stored;
    float value, zero_point;
};

// E4M3, in which scales below a global one are stored.
LOWBIT_HD FormatParams e4m3_format() {
    constexpr FormatParams format = kFormats[kIndex_fp8_e4m3].params;
    return format;
}

// fp32 bits of the value nearest zero.
static inline uint32_t least_value(const FormatParams& f) {
    const FormatRow* row = f.kind == kKindCodebook ? find_format(f) : nullptr;
    return row ? row->values[row->zero_code] : 0u;
}

// The largest finite value of a format for elements.
static inline float largest_value(const FormatParams& f) {
    if (f.kind == kKindInteger) return static_cast<float>(f.qmax);
    if (f.kind == kKindFloat) return float_of(decode_float(static_cast<uint32_t>(f.max_code), f));
    const FormatRow* row = find_format(f);
    return row ? float_of(row->values[f.max_code]) : 1.0f;
}

static inline ScaleRule scale_rule(const SchemeParams& s) {
    constexpr uint32_t kNever = 0x7fffffu, kSevenAndAQuarter = 0x680000u;  // fractions: of no number, of 7.25
    const FormatParams &f = s.format, e4m3 = e4m3_format();
    const float qmin = static_cast<float>(f.qmin), qmax = static_cast<float>(f.qmax);
    const float divisor = s.affine ? qmax - qmin : s.full ? -qmin : largest_value(f);
    const float global_scale = divisor * float_of(decode_float(static_cast<uint32_t>(e4m3.max_code), e4m3));
    ScaleRule r = {};
    r.divisor = bits_of(divisor);
    r.global_scale_divisor = bits_of(global_scale);
    r.raise_above = s.scale_rounding == kScaleFloor  ? kNever
                    : s.scale_rounding == kScaleCeil ? r.divisor & 0x7fffffu
                                                     : kSevenAndAQuarter;
    r.zero_scale = least_value(f) == 0 ? kOne : 0u;
    r.qmin = qmin;
    r.qmax = qmax;
    r.scale_format = s.scale_format;
    r.ceil = s.scale_rounding == kScaleCeil;
    r.affine = s.affine;
    r.full = s.full;
    r.both_ends = s.affine | s.full;
    r.is_signed = f.is_signed;
    return r;
}

// -- the number ------------------------------------------------------------------------------------------------------

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
            return static_cast<uint32_t>(e4m3_format().nan_code);
    }
}

// The one fp32 scale that a stored one stands for.
LOWBIT_HD float scale_value(uint32_t stored, int32_t scale_format, const float* global_scale) {
    uint32_t bits = stored;
    if (scale_format == kScaleBf16) bits = widen_bf16(static_cast<uint16_t>(stored));
    if (scale_format == kScaleFp16) bits = widen_fp16(static_cast<uint16_t>(stored));
    if (scale_format == kScaleE8m0) bits = e8m0_value(stored);
    if (scale_format == kScaleE4m3) bits = decode_float(stored, e4m3_format());
    if (global_scale == nullptr) return float_of(bits);
    const uint32_t sign = (bits ^ bits_of(*global_scale)) & kSign;  // a NaN's too
    return float_of((bits_of(float_of(bits) * *global_scale) & kMagnitude) | sign);
}

// fp32 bits of a quotient as a scale: a normal number, and `zero_scale` for a block of zeros.
LOWBIT_HD uint32_t normal_scale(uint32_t amount, uint32_t divisor, uint32_t zero_scale) {
    const uint32_t scale = bits_of(divide(float_of(amount), float_of(divisor)));
    return amount == 0 ? zero_scale : scale < kMinScale ? kMinScale : scale > kMaxFinite ? kMaxFinite : scale;
}

// The E4M3 code of a block's scale below a global one.
LOWBIT_HD uint32_t e4m3_code(uint32_t bits, bool ceil) {
    const FormatParams e4m3 = e4m3_format();
    if (!ceil || is_nan(bits)) return encode_float(bits, e4m3, true, false, 0);
    return round_up(bits & kMagnitude, grid_of(e4m3), static_cast<uint32_t>(e4m3.max_code)) | (bits >> 31) << 7;
}

// The sign bit of a stored scale.
LOWBIT_HD uint32_t scale_sign(int32_t scale_format) {
    return scale_format == kScaleFp32 ? kSign : scale_format == kScaleE4m3 ? 0x80u : 0x8000u;
}

// The stored scale of an amount (amax, or range of affine blocks): fp32 bits, positive or zero, finite.
LOWBIT_HD uint32_t stored_scale(uint32_t amount, const ScaleRule& r, const float* global_scale) {
    if (r.scale_format == kScaleE8m0) {
        return amount == 0 ? r.zero_scale >> 23 : e8m0_code(amount, r.divisor, r.raise_above);
    }
    if (r.scale_format == kScaleE4m3) {
        const float ratio = divide(float_of(amount), float_of(r.divisor));
        return e4m3_code(bits_of(global_scale == nullptr ? ratio : quotient(ratio, divisor_of(*global_scale))),
                         r.ceil != 0);
    }
    const uint32_t scale = normal_scale(amount, r.divisor, r.zero_scale);
    if (r.scale_format == kScaleBf16) return round_up_bf16(scale);
    return r.scale_format == kScaleFp16 ? round_up_fp16(scale) : scale;
}

// From a block's largest positive and negative magnitudes (fp32 bits; which is which only counts where both_ends()).
LOWBIT_HD BlockScale make_scale(uint32_t high, uint32_t low, const ScaleRule& r, const float* global_scale) {
    BlockScale out = {nan_scale(r.scale_format), 0.0f, 0.0f};
    const uint32_t amax = high > low ? high : low;
    if (amax < kInf) {
        uint32_t amount = r.affine != 0 ? bits_of(float_of(high) + float_of(low)) : amax;
        out.stored = stored_scale(amount < kMaxFinite ? amount : kMaxFinite, r, global_scale);
        if (r.full != 0 && high > low) out.stored ^= scale_sign(r.scale_format);
    }
    out.value = scale_value(out.stored, r.scale_format, global_scale);
    if (r.affine != 0 && amax < kInf) {
        out.zero_point = clamp(rintf(r.qmin + divide(float_of(low), out.value)), r.qmin, r.qmax);
    }
    return out;
}

// fp32 bits of a global scale, for the largest finite magnitude of what it spans.
LOWBIT_HD uint32_t make_global_scale(uint32_t amax, const ScaleRule& r) {
    return normal_scale(amax, r.global_scale_divisor, kOne);
}

// -- memory ----------------------------------------------------------------------------------------------------------

LOWBIT_HD int scale_bytes(int32_t scale_format) {
    return scale_format == kScaleFp32 ? 4 : scale_format == kScaleBf16 || scale_format == kScaleFp16 ? 2 : 1;
}

// Keeps number `index` of scales (and zero points).
LOWBIT_HD void write_scale(void* scales, void* zero_points, int64_t index, const ScaleRule& r, const BlockScale& s) {
    switch (scale_bytes(r.scale_format)) {
        case 4:
            static_cast<uint32_t*>(scales)[index] = s.stored;
            break;
        case 2:
            static_cast<uint16_t*>(scales)[index] = static_cast<uint16_t>(s.stored);
            break;
        default:
            static_cast<uint8_t*>(scales)[index] = static_cast<uint8_t>(s.stored);
    }
    if (r.affine != 0) static_cast<uint8_t*>(zero_points)[index] = static_cast<uint8_t>(static_cast<int>(s.zero_point));
}

// Number `index` of scales, as it is stored.
LOWBIT_HD uint32_t load_scale(const void* scales, int64_t index, int32_t scale_format) {
    switch (scale_bytes(scale_format)) {
        case 4:
            return static_cast<const uint32_t*>(scales)[index];
        case 2:
            return static_cast<const uint16_t*>(scales)[index];
        default:
            return static_cast<const uint8_t*>(scales)[index];
    }
}

LOWBIT_HD BlockScale read_scale(const void* scales, const void* zero_points, const float* global_scale, int64_t index,
                                const ScaleRule& r) {
    BlockScale out = {load_scale(scales, index, r.scale_format), 0.0f, 0.0f};
    out.value = scale_value(out.stored, r.scale_format, global_scale);
    if (r.affine != 0) {
        const uint8_t zero_point = static_cast<const uint8_t*>(zero_points)[index];
        out.zero_point = r.is_signed ? static_cast<int8_t>(zero_point) : zero_point;
    }
    return out;
}

}  // namespace lowbit
