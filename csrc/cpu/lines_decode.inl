// Numbers from codes: docs/numerics.md section 6. Part of lines_body.inl.

// (value - zero) * factor, with one NaN; only integers have zero points. `clean`: no product is another NaN than that.
template <Factors::Mode mode, bool clean = false>
LOWBIT_INLINE inline F scaled(F value, const Factor& factor, bool has_zeros) {
    if (mode == Factors::kNone) return value;
    const F product = (has_zeros ? value - factor.zero : value) * factor.by;
    if (clean) return product;
    return product == product ? product : (F)splat(kNan);
}

// What a code is in an output type: of values that are computed, every one in turn; all fit the output as they are.
template <class Values>
struct Computed {
    const Values value;
    explicit Computed(const Decoder& d) : value(d) {}
    template <class Type, Factors::Mode mode, bool clean = false>
    LOWBIT_INLINE U bits(F number, const Factor& factor) const {
        const U bits = (U)scaled<mode, clean>(number, factor, Values::kZeros);
        return mode == Factors::kNone ? bits : Type::round(bits);
    }
    template <class Type, Factors::Mode mode>
    LOWBIT_INLINE U at(U code, const Factor& factor) const {
        return bits<Type, mode>(value(code), factor);
    }
    // Of 2 * kLanes codes.
    template <class Type, Factors::Mode mode, bool clean>
    LOWBIT_INLINE void pair(const uint8_t* codes, const Factor* factor, typename Type::Element* out) const {
        F first, second;
        value.template pair<clean>(codes, first, second);
        Type::put_pair(out, bits<Type, mode, clean>(first, factor[0]), bits<Type, mode, clean>(second, factor[1]));
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
    template <bool>
    LOWBIT_INLINE void pair(const uint8_t* codes, F& first, F& second) const {
        first = (*this)(widen(load<B>(codes)));
        second = (*this)(widen(load<B>(codes + kLanes)));
    }
};

// Formats that are a part of fp16 but for the bias and the specials: the processor widens them.
template <bool has_specials>
struct HalfValues : FloatValues {
    typedef uint16_t Words __attribute__((vector_size(sizeof(U))));
    const Words part, most, infinite, up16, sign_up16, sign16, inf16, nan16;
    const F rebias16;
    static U words(uint32_t word) { return held(word | word << 16); }
    explicit HalfValues(const Decoder& d)
        : FloatValues(d),
          part((Words)words((1u << (d.format.bits - 1)) - 1u)),
          most((Words)words(static_cast<uint32_t>(d.format.max_code))),
          infinite((Words)words(static_cast<uint32_t>(d.format.inf_code) & 0xffffu)),
          up16((Words)words(1u << (10 - d.format.mantissa))),
          sign_up16((Words)words(1u << (16 - d.format.bits))),
          sign16((Words)words(0x8000u)),
          inf16((Words)words(0x7c00u)),
          nan16((Words)words(0x7e00u)),
          rebias16((F)held(static_cast<uint32_t>(127 + 15 - d.format.bias) << 23)) {}
    static bool serves(const FormatParams& f) {
        return f.exponent <= 5 && f.max_code >> f.mantissa < 31 && (f.nan_code >= 0) == has_specials;
    }

    // `clean`: NaN without a sign.
    template <bool clean>
    LOWBIT_INLINE void pair(const uint8_t* codes, F& first, F& second) const {
        const Words code = (Words)widen_words(codes), m = code & part, negative = (code * sign_up16) & sign16;
        Words half = (m * up16) | negative;
        if (has_specials) {
            const Words special = m == infinite ? inf16 | negative : clean ? nan16 : nan16 | negative;
            half = m > most ? special : half;
        }
        first = first_halves((U)half) * rebias16;
        second = second_halves((U)half) * rebias16;
    }
};

struct IntegerValues {
    static constexpr bool kZeros = true;
    const U mask, sign;
    explicit IntegerValues(const Decoder& d)
        : mask(splat((1u << d.format.bits) - 1u)), sign(splat(d.format.is_signed ? 1u << (d.format.bits - 1) : 0u)) {}
    LOWBIT_INLINE F operator()(U code) const { return __builtin_convertvector((I)((code & mask) ^ sign) - (I)sign, F); }
    template <bool>
    LOWBIT_INLINE void pair(const uint8_t* codes, F& first, F& second) const {
        first = (*this)(widen(load<B>(codes)));
        second = (*this)(widen(load<B>(codes + kLanes)));
    }
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
    template <class Type, Factors::Mode mode, bool>
    LOWBIT_INLINE void pair(const uint8_t* codes, const Factor* factor, typename Type::Element* out) const {
        Type::put_pair(out, at<Type, mode>(widen(load<B>(codes)), factor[0]),
                       at<Type, mode>(widen(load<B>(codes + kLanes)), factor[1]));
    }
};

template <class Type, Factors::Mode mode, bool clean, class Values>
void decode_line(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, typename Type::Element* out) {
    const Values values(d);
    for_quads<mode, false>(
        f, n,
        [&](int64_t i, const Factor(&factor)[4]) LOWBIT_INLINE {
            values.template pair<Type, mode, clean>(codes + i, factor, out + i);
            values.template pair<Type, mode, clean>(codes + i + 2 * kLanes, factor + 2, out + i + 2 * kLanes);
        },
        [&](int64_t i, const Factor& factor)
            LOWBIT_INLINE { Type::put(out + i, values.template at<Type, mode>(widen(load<B>(codes + i)), factor)); },
        [&](int64_t i, const Factors& rest) {
            const Padded<uint8_t> last(codes + i, n - i, rest, nullptr);
            typename Type::Element numbers[kLanes];
            decode_line<Type, mode, clean, Values>(d, last.x, kLanes, last.factors, numbers);
            __builtin_memcpy(out + i, numbers, static_cast<size_t>(n - i) * sizeof *out);
        });
}

// Whether no product is NaN but of a NaN: factors are finite, and not zero where Inf may meet them.
inline bool all_clean(const Decoder& d, int64_t n, const Factors& f) {
    const uint32_t least = d.format.inf_code >= 0 ? 1 : 0;
    bool clean = true;
    for (int64_t b = 0, end = f.lead; end - f.width < n; ++b, end += f.width)
        clean &= (bits_of(f.each[b]) & kMagnitude) - least < kInf - least;
    return clean;
}

template <class Type, class Values>
void decode_factors(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out) {
    auto* p = static_cast<typename Type::Element*>(out);
    if (f.mode == Factors::kNone) return decode_line<Type, Factors::kNone, false, Values>(d, codes, n, f, p);
    if (f.mode == Factors::kEach) return decode_line<Type, Factors::kEach, false, Values>(d, codes, n, f, p);
    if (all_clean(d, n, f)) return decode_line<Type, Factors::kBlocks, true, Values>(d, codes, n, f, p);
    decode_line<Type, Factors::kBlocks, false, Values>(d, codes, n, f, p);
}

void decode(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out, Dtype dtype) {
    const bool wide_book = d.format.kind == kKindCodebook && d.format.bits > 4;
    if (d.format.kind == kKindExponent || wide_book) return lines_scalar().decode(d, codes, n, f, out, dtype);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (d.format.bits <= 4) return decode_factors<Type, Tabulated>(d, codes, n, f, out);
        if (d.format.kind == kKindInteger) return decode_factors<Type, Computed<IntegerValues>>(d, codes, n, f, out);
        if (HalfValues<true>::serves(d.format))
            return decode_factors<Type, Computed<HalfValues<true>>>(d, codes, n, f, out);
        if (HalfValues<false>::serves(d.format))
            return decode_factors<Type, Computed<HalfValues<false>>>(d, codes, n, f, out);
        return decode_factors<Type, Computed<FloatValues>>(d, codes, n, f, out);
    });
}
