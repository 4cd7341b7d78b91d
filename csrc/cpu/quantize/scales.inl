// Scales of blocks, a vector of blocks at a time: docs/numerics.md section 5, and common/scales.h, whose steps these
// are. Part of row_kernels_body.inl.

// The E8M0 code of amount / divisor.
inline U e8m0_codes(U amount, const ScaleRule& rule) {
    const auto small = amount < kMinScale;
    const U bits = small ? (U)((F)amount * splat(16777216.0f)) : amount;  // 2^24 makes a subnormal normal
    const int32_t raise_above = static_cast<int32_t>(rule.raise_above);
    I e = (I)(bits >> 23) - (small ? I{} + 24 : I{}) - static_cast<int32_t>(rule.divisor >> 23);
    e -= (I)(bits & 0x7fffffu) > raise_above;
    e = e < -127 ? I{} - 127 : e > 127 ? I{} + 127 : e;
    return amount == 0u ? splat(rule.zero_scale >> 23) : (U)(e + 127);
}

// A zero, a positive normal fp32 or Inf rounded towards +Inf to bf16, or to a format of fewer binades with `mantissa`
// bits, whose least normal number has the exponent field `least`: `most` at most.
inline U round_up_to_bf16(U bits) { return smaller((bits + 0xffffu) >> 16, splat(0x7f7fu)); }
template <uint32_t mantissa, uint32_t least, uint32_t most>
inline U round_up_to(U bits) {
    const U field = bits >> 23, binade = larger(field, splat(least)), significand = (bits & 0x7fffffu) | 0x800000u;
    const U shift = smaller(binade - field + (23u - mantissa), splat(30u));
    const U one = splat(1u);
    const U code = ((binade - least) << mantissa) + ((significand + (one << shift) - 1u) >> shift);
    return bits == 0u ? U{} : smaller(code, splat(most));
}
inline U round_up_to_fp16(U bits) { return round_up_to<10, 127 - 14, 0x7bffu>(bits); }
// Of any sign, and any fp32 number: zero and NaN stay what they are.
inline U round_up_to_e4m3(U bits) {
    const U magnitude = bits & kMagnitude, sign = (bits >> 31) << 7;
    const U code = round_up_to<3, 127 - 6, 0x7eu>(magnitude);
    return (magnitude > kInf ? splat(0x7fu) : code) | sign;
}

// For one way to store them.
template <int32_t scale_format>
struct ScaleCodes {
    const ScaleRule& rule;
    const float* const global_scale;
    const F divisor, outside;          // the global scale
    const U limit, global_scale_sign;  // and what is divided by for it, as divisor_of() has it; its sign
    const FloatNearest encode;
    const FloatValues decode;
    ScaleCodes(const ScaleRule& r, const float* global_scale)
        : rule(r),
          global_scale(global_scale),
          divisor(splat(float_of(r.divisor))),
          outside(splat(global_scale ? *global_scale : 1.0f)),
          limit(splat(bits_of(divisor_of(global_scale ? *global_scale : 1.0f)) & kMagnitude)),
          global_scale_sign(splat(bits_of(global_scale ? *global_scale : 1.0f) & kSign)),
          encode(e4m3_encoder()),
          decode(e4m3_decoder()) {}

    static const Encoder& e4m3_encoder() {
        static const Encoder encoder = make_encoder(e4m3_format(), true, false);
        return encoder;
    }
    static const Decoder& e4m3_decoder() {
        static const Decoder decoder(e4m3_format());
        return decoder;
    }

    LOWBIT_INLINE U stored(U amount) const {
        if (scale_format == kScaleE8m0) return e8m0_codes(amount, rule);
        const U quotient = (U)((F)amount / divisor);
        if (scale_format == kScaleE4m3) {
            const U bits = global_scale ? ((U)((F)quotient / (F)limit) & kMagnitude) | global_scale_sign : quotient;
            if (rule.ceil) return round_up_to_e4m3(bits);
            return encode.codes<false>({bits & kMagnitude, bits, F{}}, F{}, U{});
        }
        const U normal = smaller(larger(quotient, splat(kMinScale)), splat(kMaxFinite));
        const U scale = amount == 0u ? splat(rule.zero_scale) : normal;
        if (scale_format == kScaleBf16) return round_up_to_bf16(scale);
        return scale_format == kScaleFp16 ? round_up_to_fp16(scale) : scale;
    }
    LOWBIT_INLINE F value(U stored) const {
        U bits = stored;
        if (scale_format == kScaleBf16) bits = stored << 16;
        if (scale_format == kScaleFp16) bits = (U)widen_half(narrow_words(stored));
        if (scale_format == kScaleE4m3) bits = (U)decode(stored);
        if (scale_format == kScaleE8m0) {
            bits = stored == 255u ? splat(kNan) : stored == 0u ? splat(0x00400000u) : stored << 23;
        }
        if (!global_scale) return (F)bits;
        return (F)(((U)((F)bits * outside) & kMagnitude) | ((bits ^ global_scale_sign) & kSign));
    }
    LOWBIT_INLINE void keep(F value, F inverse, int64_t i, const ScaleRow& row) const {
        const U bits = (U)value;
        store(row.value + i, value);
        store(row.divisor + i, (bits & kMagnitude) == 0u ? bits | kInf : bits);
        if (row.inverse) store(row.inverse + i, inverse);
    }
};

// Lanes of all ones where a scale is not plain, `exact` being has_inverse().
inline I not_plain(F value, F inverse, U amax, bool exact) {
    if (exact) return value != value;
    const I outside =
        ~((value >= splat(kLeastPlain)) & (value <= splat(kMostPlain)) & ((F)amax * inverse < splat(kMostQuotient)));
    return (U)value == 0u ? I{} : outside;
}

// Adds what the first `count` lanes found.
inline void collect(I& found, I lanes, size_t count) {
    if (count == kLanes) found |= lanes;
    for (size_t k = 0; count < kLanes && k < count; ++k) found[0] |= lanes[k];
}

template <int32_t scale_format>
bool make_scales_of(const uint32_t* high, const uint32_t* low, int64_t n, const ScaleRule& rule,
                    const float* global_scale, void* scales, void* zero_points, const ScaleRow& row) {
    const ScaleCodes<scale_format> codes(rule, global_scale);
    constexpr int bytes = scale_format == kScaleFp32                                 ? 4
                          : scale_format == kScaleBf16 || scale_format == kScaleFp16 ? 2
                                                                                     : 1;
    const F qmin = splat(rule.qmin), qmax = splat(rule.qmax), whole = splat(12582912.0f);
    const bool exact = has_inverse(rule, global_scale);
    I odd{};
    for (int64_t i = 0; i < n; i += kLanes) {
        const U up = load<U>(high + i), down = rule.both_ends ? load<U>(low + i) : U{};
        const U amax = larger(up, down), amount = rule.affine ? (U)((F)up + (F)down) : amax;
        const auto finite = amax < kInf;
        U stored = codes.stored(smaller(amount, splat(kMaxFinite)));
        if (rule.full) stored ^= up > down ? splat(scale_sign(scale_format)) : U{};
        stored = finite ? stored : splat(nan_scale(scale_format));
        const F value = codes.value(stored);
        const size_t count = static_cast<size_t>(n - i < kLanes ? n - i : kLanes);
        const F inverse = value == F{} ? F{} : splat(1.0f) / value;
        collect(odd, not_plain(value, inverse, amax, exact), count);
        codes.keep(value, inverse, i, row);
        if (scales) {
            auto* to = static_cast<char*>(scales) + i * bytes;
            if (bytes == 1) {
                const B narrow = narrow_bytes(stored);
                __builtin_memcpy(to, &narrow, count);
            } else if (bytes == 2) {
                const H narrow = narrow_words(stored);
                __builtin_memcpy(to, &narrow, 2 * count);
            } else {
                __builtin_memcpy(to, &stored, 4 * count);
            }
        }
        if (!rule.affine) continue;
        F zero = qmin + (F)down / value;
        zero = zero < qmin ? qmin : zero > qmax ? qmax : zero;
        zero = finite ? (zero + whole) - whole : F{};
        store(row.zero + i, zero);
        if (!zero_points) continue;
        const B narrow = narrow_bytes((U) __builtin_convertvector(zero, I));
        __builtin_memcpy(static_cast<uint8_t*>(zero_points) + i, &narrow, count);
    }
    return largest(odd & (I)splat(kMagnitude)) == 0;
}

template <int32_t scale_format>
bool read_scales_of(const void* scales, const void* zero_points, int64_t n, const ScaleRule& rule,
                    const float* global_scale, const ScaleRow& row) {
    const ScaleCodes<scale_format> codes(rule, global_scale);
    constexpr int bytes = scale_format == kScaleFp32                                 ? 4
                          : scale_format == kScaleBf16 || scale_format == kScaleFp16 ? 2
                                                                                     : 1;
    I odd{};
    for (int64_t i = 0; i < n; i += kLanes) {
        const size_t count = static_cast<size_t>(n - i < kLanes ? n - i : kLanes);
        const auto* from = static_cast<const char*>(scales) + i * bytes;
        U stored{};
        if (bytes == 1) {
            B narrow{};
            __builtin_memcpy(&narrow, from, count);
            stored = widen(narrow);
        } else if (bytes == 2) {
            H narrow{};
            __builtin_memcpy(&narrow, from, 2 * count);
            stored = widen(narrow);
        } else {
            __builtin_memcpy(&stored, from, 4 * count);
        }
        const F value = codes.value(stored);
        const F inverse = !row.inverse ? F{} : value == F{} ? F{} : splat(1.0f) / value;
        collect(odd, ~((value >= splat(kLeastPlain)) & (value <= splat(kMostGiven))), count);
        codes.keep(value, inverse, i, row);
        if (!rule.affine) continue;
        B narrow{};
        __builtin_memcpy(&narrow, static_cast<const uint8_t*>(zero_points) + i, count);
        const I zero = (I)widen(narrow), sign = I{} + (rule.is_signed ? 0x80 : 0);
        store(row.zero + i, __builtin_convertvector((zero ^ sign) - sign, F));
    }
    return largest(odd & (I)splat(kMagnitude)) == 0;
}

bool make_scales(const uint32_t* high, const uint32_t* low, int64_t n, const ScaleRule& rule, const float* global_scale,
                 void* scales, void* zero_points, const ScaleRow& row) {
    static constexpr decltype(&make_scales_of<0>) kMake[] = {make_scales_of<0>, make_scales_of<1>, make_scales_of<2>,
                                                             make_scales_of<3>, make_scales_of<4>};
    return kMake[rule.scale_format](high, low, n, rule, global_scale, scales, zero_points, row);
}

bool read_scales(const void* scales, const void* zero_points, int64_t n, const ScaleRule& rule,
                 const float* global_scale, const ScaleRow& row) {
    static constexpr decltype(&read_scales_of<0>) kRead[] = {read_scales_of<0>, read_scales_of<1>, read_scales_of<2>,
                                                             read_scales_of<3>, read_scales_of<4>};
    return kRead[rule.scale_format](scales, zero_points, n, rule, global_scale, row);
}
