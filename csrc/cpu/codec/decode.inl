// Numbers from codes: docs/numerics.md section 6. Part of row_kernels_body.inl.

// (value - zero) * factor, with one NaN; only integers have zero points. `clean`: no product is another NaN than that.
template <Factors::Mode mode, bool clean = false>
LOWBIT_INLINE inline F scaled(F value, const Factor& factor, bool has_zeros) {
    if (mode == Factors::kNone) return value;
    const F product = (has_zeros ? value - factor.zero : value) * factor.by;
    return clean ? product : one_nan(product);
}

// What a code is in an output type: of values that are computed, every one in turn; kFits: all fit as they are.
template <class Values>
struct Computed {
    const Values value;
    explicit Computed(const Decoder& d) : value(d) {}
    template <class Type, Factors::Mode mode, bool clean = false>
    LOWBIT_INLINE U bits(F number, const Factor& factor) const {
        const U bits = (U)scaled<mode, clean>(number, factor, Values::kZeros);
        return mode == Factors::kNone && Values::kFits ? bits : Type::round(bits);
    }
    template <class Type, Factors::Mode mode>
    LOWBIT_INLINE U at(U code, const Factor& factor) const {
        return bits<Type, mode>(value(code), factor);
    }
    // Of kQuad codes.
    template <class Type, Factors::Mode mode, bool clean>
    LOWBIT_INLINE void quad(const uint8_t* codes, const Factor (&factor)[4], typename Type::Element* out) const {
        F v[4];
        value.template quad<clean>(codes, v);
        U number[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const F by = clean ? value.units(factor[k].by) : factor[k].by;
            number[k] = bits<Type, mode, clean>(v[k], {by, F{}, factor[k].zero});
        }
        Type::put_pair(out, number[0], number[1]);
        Type::put_pair(out + 2 * kLanes, number[2], number[3]);
    }
};

// quad<clean>(codes, v): the values of kQuad codes; if `clean`, NaN without a sign, and all but NaN and Inf as numbers
// of units: units(factor) is what to multiply them with in place of a factor below clean_limit().

// Each by itself.
template <class Values>
struct Singles {
    template <bool clean>
    LOWBIT_INLINE void quad(const uint8_t* codes, F (&v)[4]) const {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            v[k] = static_cast<const Values&>(*this)(widen(load<B>(codes + k * kLanes)));
            if (clean && Values::kNans) v[k] = one_nan(v[k]);
        }
    }
    LOWBIT_INLINE F units(F factor) const { return factor; }
};

struct FloatValues : Singles<FloatValues> {
    static constexpr bool kZeros = false, kNans = true, kFits = true;
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

// Formats that are a part of fp16 but for the bias and the specials: the processor widens them, in units of what the
// biases differ by.
struct HalfValues : FloatValues {
    typedef uint16_t Words __attribute__((vector_size(sizeof(U))));
    const Words up16;
    const F unit;
    static Words words(uint32_t word) { return (Words)held(word | word << 16); }
    explicit HalfValues(const Decoder& d)
        : FloatValues(d),
          up16(words(1u << (10 - d.format.mantissa))),
          unit((F)held(static_cast<uint32_t>(127 + 15 - d.format.bias) << 23)) {}
    static bool serves(const FormatParams& f, bool has_specials) {
        const bool part = f.exponent <= 5 && f.max_code >> f.mantissa < 31 && f.bias >= 0 && f.bias <= 15;
        return part && (f.nan_code >= 0) == has_specials;
    }

    LOWBIT_INLINE F units(F factor) const { return factor * unit; }
    template <bool clean>
    LOWBIT_INLINE void numbers(Words half, F& first, F& second) const {
        first = first_halves((U)half), second = second_halves((U)half);
        if (!clean) first *= unit, second *= unit;
    }
};

// Those without specials.
struct PlainHalves : HalfValues {
    const Words part, sign_up16, sign16;
    explicit PlainHalves(const Decoder& d)
        : HalfValues(d),
          part(words((1u << (d.format.bits - 1)) - 1u)),
          sign_up16(words(1u << (16 - d.format.bits))),
          sign16(words(0x8000u)) {}
    static bool serves(const FormatParams& f) { return HalfValues::serves(f, false); }

    template <bool clean>
    LOWBIT_INLINE void quad(const uint8_t* codes, F (&v)[4]) const {
#pragma GCC unroll 2
        for (int k = 0; k < 4; k += 2) {
            const Words code = (Words)widen_words(codes + k * kLanes);
            numbers<clean>(((code & part) * up16) | ((code * sign_up16) & sign16), v[k], v[k + 1]);
        }
    }
};

// Of 8 bits, with specials, which a quad seldom has.
struct ByteHalves : HalfValues {
    const U part, most;       // of each byte
    const Words signed_part;  // the bits of an fp16 that a code with a sign, times up16, has in place
    explicit ByteHalves(const Decoder& d)
        : HalfValues(d),
          part(held(0x7f7f7f7fu)),
          most(held(0x01010101u * static_cast<uint32_t>(d.format.max_code))),
          signed_part(words(0x8000u | (0x7fu << (10 - d.format.mantissa)))) {}
    static bool serves(const FormatParams& f) { return HalfValues::serves(f, true) && f.bits == 8; }

    template <bool clean>
    LOWBIT_INLINE void quad(const uint8_t* codes, F (&v)[4]) const {
#pragma GCC unroll 2
        for (int k = 0; k < 4; k += 2)
            numbers<clean>(((Words)widen_signed(codes + k * kLanes) * up16) & signed_part, v[k], v[k + 1]);
        if (__builtin_expect(!any_byte_above(load<U>(codes) & part, most), 1)) return;
        for (int k = 0; k < 4; ++k) {
            const U code = widen(load<B>(codes + k * kLanes)), m = code & magnitude, nan = m != inf_code ? m : code;
            const F special = (*this)(clean ? nan : code);
            v[k] = m > max_code ? special : v[k];
        }
    }
};

struct IntegerValues : Singles<IntegerValues> {
    static constexpr bool kZeros = true, kNans = false, kFits = true;
    const U mask, sign;
    explicit IntegerValues(const Decoder& d)
        : mask(splat((1u << d.format.bits) - 1u)), sign(splat(d.format.is_signed ? 1u << (d.format.bits - 1) : 0u)) {}
    LOWBIT_INLINE F operator()(U code) const { return __builtin_convertvector((I)((code & mask) ^ sign) - (I)sign, F); }
};

struct BookValues : Singles<BookValues> {
    static constexpr bool kZeros = false, kNans = false, kFits = false;
    const U mask;
    const uint32_t* table;
    explicit BookValues(const Decoder& d) : mask(held((1u << d.format.bits) - 1u)), table(d.table) {}
    LOWBIT_INLINE F operator()(U code) const { return (F)gather(table, code & mask); }
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
    LOWBIT_INLINE void quad(const uint8_t* codes, const Factor (&factor)[4], typename Type::Element* out) const {
#pragma GCC unroll 2
        for (int k = 0; k < 4; k += 2)
            Type::put_pair(out + k * kLanes, at<Type, mode>(widen(load<B>(codes + k * kLanes)), factor[k]),
                           at<Type, mode>(widen(load<B>(codes + (k + 1) * kLanes)), factor[k + 1]));
    }
};

template <class Type, Factors::Mode mode, bool clean, class Values>
void decode_row(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, typename Type::Element* out) {
    const Values values(d);
    for_quads<mode, false>(
        f, n,
        [&](int64_t i, const Factor(&factor)[4])
            LOWBIT_INLINE { values.template quad<Type, mode, clean>(codes + i, factor, out + i); },
        [&](int64_t i, const Factor& factor)
            LOWBIT_INLINE { Type::put(out + i, values.template at<Type, mode>(widen(load<B>(codes + i)), factor)); },
        [&](int64_t i, const Factors& rest) {
            const Padded<uint8_t> last(codes + i, n - i, rest, nullptr);
            typename Type::Element numbers[kLanes];
            decode_row<Type, mode, clean, Values>(d, last.x, kLanes, last.factors, numbers);
            __builtin_memcpy(out + i, numbers, static_cast<size_t>(n - i) * sizeof *out);
        });
}

// The bits of the least factor that units() of a format may turn into Inf.
inline uint32_t clean_limit(const FormatParams& f) {
    const int32_t up = f.kind == kKindFloat ? std::clamp(15 - f.bias, 0, 15) : 0;
    return static_cast<uint32_t>(255 - up) << 23;
}

// Whether no product is NaN but of a NaN, and units() serve: factors are below their limit, and not zero where Inf may
// meet them.
inline bool all_clean(const Decoder& d, int64_t n, const Factors& f) {
    const uint32_t least = d.format.inf_code >= 0 ? 1 : 0, limit = clean_limit(d.format);
    bool clean = true;
    for (int64_t b = 0, begin = 0; begin < n; begin = f.lead + b++ * f.width)
        clean &= (bits_of(f.each[b]) & kMagnitude) - least < limit - least;
    return clean;
}

template <class Type, class Values>
void decode_factors(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out) {
    auto* p = static_cast<typename Type::Element*>(out);
    if (f.mode == Factors::kNone) return decode_row<Type, Factors::kNone, false, Values>(d, codes, n, f, p);
    if (f.mode == Factors::kEach) return decode_row<Type, Factors::kEach, false, Values>(d, codes, n, f, p);
    if (all_clean(d, n, f)) return decode_row<Type, Factors::kBlocks, true, Values>(d, codes, n, f, p);
    decode_row<Type, Factors::kBlocks, false, Values>(d, codes, n, f, p);
}

void decode(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out, Dtype dtype) {
    if (d.format.kind == kKindExponent) return row_kernels_scalar().decode(d, codes, n, f, out, dtype);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (d.format.bits <= 4) return decode_factors<Type, Tabulated>(d, codes, n, f, out);
        if (d.format.kind == kKindInteger) return decode_factors<Type, Computed<IntegerValues>>(d, codes, n, f, out);
        if (d.format.kind == kKindCodebook) return decode_factors<Type, Computed<BookValues>>(d, codes, n, f, out);
        if (ByteHalves::serves(d.format)) return decode_factors<Type, Computed<ByteHalves>>(d, codes, n, f, out);
        if (PlainHalves::serves(d.format)) return decode_factors<Type, Computed<PlainHalves>>(d, codes, n, f, out);
        return decode_factors<Type, Computed<FloatValues>>(d, codes, n, f, out);
    });
}
