// Numbers from codes: docs/numerics.md section 6. Part of lines_body.inl.

// (value - zero) * factor, with one NaN; only integers have zero points.
template <Factors::Mode mode>
LOWBIT_INLINE inline F scaled(F value, const Factor& factor, bool has_zeros) {
    if (mode == Factors::kNone) return value;
    const F product = (has_zeros ? value - factor.zero : value) * factor.by;
    return product == product ? product : (F)splat(kNan);
}

// What a code is in an output type: of values that are computed, every one in turn; all fit the output as they are.
template <class Values>
struct Computed {
    const Values value;
    explicit Computed(const Decoder& d) : value(d) {}
    template <class Type, Factors::Mode mode>
    LOWBIT_INLINE U at(U code, const Factor& factor) const {
        const U bits = (U)scaled<mode>(value(code), factor, Values::kZeros);
        return mode == Factors::kNone ? bits : Type::round(bits);
    }
};

struct FloatValues {
    static constexpr bool kZeros = false;
    const U magnitude, max_code, inf_code, rebias, normal, up, sign_up, sign, inf, nan;
    const F least;  // the least positive value
    const bool special;
    explicit FloatValues(const Decoder& d)
        : magnitude(held((1u << (d.format.bits - 1)) - 1u)),
          max_code(held(static_cast<uint32_t>(d.format.max_code))),
          inf_code(held(static_cast<uint32_t>(d.format.inf_code))),
          rebias(held(static_cast<uint32_t>(127 - d.format.bias) << 23)),
          normal(held(1u << d.format.mantissa)),
          up(held(static_cast<uint32_t>(23 - d.format.mantissa))),
          sign_up(held(static_cast<uint32_t>(32 - d.format.bits))),
          sign(held(kSign)),
          inf(held(kInf)),
          nan(held(kNan)),
          least((F)held(grid_value(1, grid_of(d.format)))),
          special(d.format.nan_code >= 0) {}

    LOWBIT_INLINE F operator()(U code) const {
        const U m = code & magnitude;
        const F subnormal = __builtin_convertvector((I)m, F) * least;
        U bits = m < normal ? (U)subnormal : (m << up) + rebias;
        if (special) bits = m > max_code ? (m == inf_code ? inf : nan) : bits;
        return (F)(bits | ((code << sign_up) & sign));
    }
};

struct IntegerValues {
    static constexpr bool kZeros = true;
    const U mask, sign;
    explicit IntegerValues(const Decoder& d)
        : mask(splat((1u << d.format.bits) - 1u)), sign(splat(d.format.is_signed ? 1u << (d.format.bits - 1) : 0u)) {}
    LOWBIT_INLINE F operator()(U code) const { return __builtin_convertvector((I)((code & mask) ^ sign) - (I)sign, F); }
};

// Of 16 values at most: the table as a whole, once a block.
struct Tabulated {
    Table table;
    explicit Tabulated(const Decoder& d) { __builtin_memcpy(table, d.table, sizeof table); }
    template <class Type, Factors::Mode mode>
    LOWBIT_INLINE U at(U code, const Factor& factor) const {
        if (mode == Factors::kEach) return Type::round((U)scaled<mode>(lookup(table, code), factor, true));
        Table rounded;
        for (int k = 0; k < 16 / kLanes; ++k) rounded[k] = (F)Type::round((U)scaled<mode>(table[k], factor, true));
        return (U)lookup(rounded, code);
    }
};

template <class Type, Factors::Mode mode, class Values>
void decode_line(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, typename Type::Element* out) {
    const Values values(d);
    for_lanes<mode>(
        f, n,
        [&](int64_t i, const Factor& factor)
            LOWBIT_INLINE { Type::put(out + i, values.template at<Type, mode>(widen(load<B>(codes + i)), factor)); },
        [&](int64_t i, const Factors& rest) {
            const Padded<uint8_t> last(codes + i, n - i, rest, nullptr);
            typename Type::Element numbers[kLanes];
            decode_line<Type, mode, Values>(d, last.x, kLanes, last.factors, numbers);
            __builtin_memcpy(out + i, numbers, static_cast<size_t>(n - i) * sizeof *out);
        });
}

template <class Type, class Values>
void decode_factors(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out) {
    auto* p = static_cast<typename Type::Element*>(out);
    switch (f.mode) {
        case Factors::kNone:
            return decode_line<Type, Factors::kNone, Values>(d, codes, n, f, p);
        case Factors::kEach:
            return decode_line<Type, Factors::kEach, Values>(d, codes, n, f, p);
        default:
            return decode_line<Type, Factors::kBlocks, Values>(d, codes, n, f, p);
    }
}

void decode(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out, Dtype dtype) {
    const bool wide_book = d.format.kind == kKindCodebook && d.format.bits > 4;
    if (d.format.kind == kKindExponent || wide_book) return lines_scalar().decode(d, codes, n, f, out, dtype);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (d.format.bits <= 4) return decode_factors<Type, Tabulated>(d, codes, n, f, out);
        if (d.format.kind == kKindInteger) return decode_factors<Type, Computed<IntegerValues>>(d, codes, n, f, out);
        return decode_factors<Type, Computed<FloatValues>>(d, codes, n, f, out);
    });
}
