#include "cpu/scales.h"

#include <algorithm>
#include <cmath>

#include "common/numerics.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

const FormatParams& e4m3() { return kFormats[kIndex_fp8_e4m3].params; }

// The largest finite value of a format for elements.
float largest_value(const FormatParams& f) {
    if (f.kind == kKindInteger) return static_cast<float>(f.qmax);
    if (f.kind == kKindFloat) return float_of(decode_float(static_cast<uint32_t>(f.max_code), f));
    for (const FormatRow& row : kFormats) {
        if (row.params.kind == f.kind && row.params.bits == f.bits) return float_of(row.values[f.max_code]);
    }
    return 1.0f;
}

int64_t scale_size(int32_t scale_format) {
    return scale_format == kScaleFp32 ? 4 : scale_format == kScaleBf16 || scale_format == kScaleFp16 ? 2 : 1;
}

// Stored bits, in an integer as wide as fp32, of the scale for `amount` (amax or range: finite fp32 bits).
uint32_t stored_scale(const ScaleRule& rule, uint32_t amount, const float* outer) {
    if (rule.scheme.scale_format == kScaleE4m3) {
        float inner = float_of(amount) / rule.divisor;
        if (outer) inner = inner / *outer;
        return encode_float(bits_of(inner), e4m3(), true, false, 0);
    }
    if (rule.scheme.scale_format == kScaleE8m0) {
        return amount == 0 ? 127u : e8m0_code(amount, bits_of(rule.divisor), rule.scheme.ceil != 0);
    }
    const uint32_t scale = amount == 0 ? kOne : std::max(bits_of(float_of(amount) / rule.divisor), kMinScale);
    if (rule.scheme.scale_format == kScaleBf16) return round_up_bf16(scale);
    if (rule.scheme.scale_format == kScaleFp16) return round_up_fp16(scale);
    return scale;
}

uint32_t stored_nan(int32_t scale_format) {
    constexpr uint32_t kByFormat[] = {kNan, 0x7fc0u, 0x7e00u, 0xffu, 0x7fu};
    return kByFormat[scale_format];
}

// The one fp32 scale that stored bits stand for.
float scale_value(const SchemeParams& scheme, uint32_t stored, const float* outer) {
    uint32_t bits = stored;
    switch (scheme.scale_format) {
        case kScaleBf16:
            bits = widen_bf16(static_cast<uint16_t>(stored));
            break;
        case kScaleFp16:
            bits = widen_fp16(static_cast<uint16_t>(stored));
            break;
        case kScaleE8m0:
            bits = e8m0_value(stored);
            break;
        case kScaleE4m3:
            bits = decode_float(stored, e4m3());
            break;
        default:
            break;
    }
    return outer ? float_of(bits) * *outer : float_of(bits);
}

void store_bits(void* out, int64_t index, int64_t size, uint32_t bits) {
    std::memcpy(static_cast<char*>(out) + index * size, &bits, static_cast<size_t>(size));  // little-endian
}

}  // namespace

ScaleRule::ScaleRule(const SchemeParams& s)
    : scheme(s), divisor(s.affine ? static_cast<float>(s.format.qmax - s.format.qmin) : largest_value(s.format)) {}

BlockScale make_scale(const ScaleRule& rule, uint32_t high, uint32_t low, int64_t index, const NewScales& out) {
    const SchemeParams& s = rule.scheme;
    const bool broken = std::max(high, low) >= kInf;
    uint32_t amount = high;
    if (s.affine && !broken) amount = std::min(bits_of(float_of(high) + float_of(low)), kMaxFinite);
    const uint32_t stored = broken ? stored_nan(s.scale_format) : stored_scale(rule, amount, out.outer);
    if (out.scale) store_bits(out.scale, index, scale_size(s.scale_format), stored);
    const float scale = scale_value(s, stored, out.outer);
    float zero = 0.0f;
    if (s.affine) {
        if (!broken) {
            const float q = std::nearbyintf(static_cast<float>(s.format.qmin) - -float_of(low) / scale);
            zero = std::clamp(q, static_cast<float>(s.format.qmin), static_cast<float>(s.format.qmax));
        }
        if (out.zero_point) static_cast<uint8_t*>(out.zero_point)[index] = static_cast<uint8_t>(static_cast<int>(zero));
    }
    return {divisor_of(scale), scale, zero, is_nan(bits_of(scale))};
}

BlockScale load_scale(const SchemeParams& s, int64_t index, const Scales& from) {
    const int64_t size = scale_size(s.scale_format);
    uint32_t stored = 0;
    std::memcpy(&stored, static_cast<const char*>(from.scale) + index * size, static_cast<size_t>(size));
    const float scale = scale_value(s, stored, from.outer);
    float zero = 0.0f;
    if (from.zero_point) {
        zero = s.format.is_signed ? static_cast<float>(static_cast<const int8_t*>(from.zero_point)[index])
                                  : static_cast<float>(static_cast<const uint8_t*>(from.zero_point)[index]);
    }
    return {divisor_of(scale), scale, zero, false};
}

float make_outer_scale(uint32_t finite_amax, const SchemeParams& s) {
    if (finite_amax == 0) return 1.0f;
    const float divisor =
        largest_value(s.format) * float_of(decode_float(static_cast<uint32_t>(e4m3().max_code), e4m3()));
    return float_of(std::max(bits_of(float_of(finite_amax) / divisor), kMinScale));
}

}  // namespace lowbit::cpu
