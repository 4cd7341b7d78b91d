// Numbers from codes: docs/numerics.md section 6. Part of lines_body.inl.

struct FloatValues {
    const U magnitude, max_code, inf_code, rebias;
    const F least;  // the least positive value
    const int mantissa, sign_bit;
    const bool special;
    explicit FloatValues(const Decoder& d)
        : magnitude(splat((1u << (d.format.bits - 1)) - 1u)),
          max_code(splat(static_cast<uint32_t>(d.format.max_code))),
          inf_code(splat(static_cast<uint32_t>(d.format.inf_code))),
          rebias(splat(static_cast<uint32_t>(127 - d.format.bias) << 23)),
          least(splat(float_of(grid_value(1, grid_of(d.format))))),
          mantissa(d.format.mantissa),
          sign_bit(d.format.bits - 1),
          special(d.format.nan_code >= 0) {}

    F operator()(U code) const {
        const U m = code & magnitude;
        const F subnormal = __builtin_convertvector((I)m, F) * least;
        U bits = (m >> mantissa) == 0u ? (U)subnormal : (m << (23 - mantissa)) + rebias;
        if (special) bits = m > max_code ? (m == inf_code ? splat(kInf) : splat(kNan)) : bits;
        return (F)(bits | ((code >> sign_bit) << 31));
    }
};

struct IntegerValues {
    const U mask, sign;
    explicit IntegerValues(const Decoder& d)
        : mask(splat((1u << d.format.bits) - 1u)), sign(splat(d.format.is_signed ? 1u << (d.format.bits - 1) : 0u)) {}
    F operator()(U code) const { return __builtin_convertvector((I)((code & mask) ^ sign) - (I)sign, F); }
};

struct TableValues {
    const float* table;
    explicit TableValues(const Decoder& d) : table(reinterpret_cast<const float*>(d.table)) {}
    F operator()(U code) const { return lookup(table, code); }
};

template <class Type, Factors::Mode mode, class Values>
void decode_line(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, typename Type::Element* out) {
    if (n < kLanes) {
        uint8_t padded[kLanes] = {};
        float each[kLanes] = {}, zeros[kLanes] = {};
        typename Type::Element values[kLanes];
        Factors g = f;
        __builtin_memcpy(padded, codes, n);
        if (mode == Factors::kEach) {
            __builtin_memcpy(each, f.each, n * 4);
            if (f.zeros) __builtin_memcpy(zeros, f.zeros, n * 4);
            g.each = each;
            g.zeros = zeros;
        }
        decode_line<Type, mode, Values>(d, padded, kLanes, g, values);
        __builtin_memcpy(out, values, n * sizeof *out);
        return;
    }
    const Values value(d);
    const Factor<mode> factor(f);
    auto step = [&](int64_t i) {
        F v = value(widen(load<B>(codes + i)));
        if (mode != Factors::kNone) {
            v = (v - factor.zero_at(i)) * factor.at(i);
            v = ((U)v & kMagnitude) > splat(kInf) ? (F)splat(kNan) : v;
        }
        Type::write(out + i, (U)v);
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) step(i);
    if (i < n) step(n - kLanes);
}

template <class Type, class Values>
void decode_factors(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out) {
    auto* p = static_cast<typename Type::Element*>(out);
    switch (f.mode) {
        case Factors::kNone:
            return decode_line<Type, Factors::kNone, Values>(d, codes, n, f, p);
        case Factors::kOne:
            return decode_line<Type, Factors::kOne, Values>(d, codes, n, f, p);
        case Factors::kEach:
            return decode_line<Type, Factors::kEach, Values>(d, codes, n, f, p);
    }
}

void decode(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out, Dtype dtype) {
    const bool wide_book = d.format.kind == kKindCodebook && d.format.bits > 4;
    if (d.format.kind == kKindExponent || wide_book) return lines_scalar().decode(d, codes, n, f, out, dtype);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (d.format.kind == kKindInteger) return decode_factors<Type, IntegerValues>(d, codes, n, f, out);
        if (d.format.bits <= 4) return decode_factors<Type, TableValues>(d, codes, n, f, out);
        return decode_factors<Type, FloatValues>(d, codes, n, f, out);
    });
}
