// Codes from numbers: docs/numerics.md sections 2, 3, 4 and 7; which are in range: section 10. Part of lines_body.inl.

struct FloatCodes {
    const U limit, emin, nan, nan_sign, inf, drop, sign_shift;
    const int mantissa;
    explicit FloatCodes(const Encoder& e)
        : limit(held(e.limit)),
          emin(splat(static_cast<uint32_t>(128 - e.format.bias))),
          nan(held(e.nan_code)),
          nan_sign(held(e.format.nan_code >= 0 ? kSign : 0u)),
          inf(held(kInf)),
          drop(held(static_cast<uint32_t>(23 - e.format.mantissa))),
          sign_shift(held(static_cast<uint32_t>(32 - e.format.bits))),
          mantissa(e.format.mantissa) {}

    LOWBIT_INLINE U finish(const Quotient& q, U code) const {
        const auto is_nan = q.magnitude > inf;
        return (is_nan ? nan : code) | ((is_nan ? q.sign & nan_sign : q.sign) >> sign_shift);
    }
};

// Adding 2^(23 - mantissa) units of the element's binade (at least the least normal one) rounds to whole units, and
// leaves their number in the low bits; subnormals and carries into the next binade need no case of their own.
struct FloatNearest : FloatCodes {
    const U least, unit, base;
    explicit FloatNearest(const Encoder& e)
        : FloatCodes(e),
          least(held(emin[0] << 23)),
          unit(held(static_cast<uint32_t>(23 - mantissa) << 23)),
          base(held(emin[0] << mantissa)) {}

    LOWBIT_INLINE U operator()(const Quotient& q, F, const uint16_t*) const {
        const U a = smaller(q.magnitude, limit);
        const U binade = larger(a & inf, least);
        const U magic = binade + unit;
        const U units = (U)((F)a + (F)magic) - magic;
        return finish(q, units + (binade >> drop) - base);
    }
};

// Normals of the format: the noise is added below the bits that stay, and carries into them, and from the mantissa into
// the exponent. Subnormals: as a whole number of 2^-16 units, cut off, to which the noise is added.
struct FloatStochastic : FloatCodes {
    const U least, base, above;
    const F units;  // 2^16 for the least positive value
    explicit FloatStochastic(const Encoder& e)
        : FloatCodes(e),
          least(held(emin[0] << 23)),
          base(held((emin[0] - 1u) << mantissa)),
          above(held(static_cast<uint32_t>(7 - mantissa))),
          units((F)held(bits_of(65536.0f / float_of(grid_value(1, grid_of(e.format)))))) {}

    LOWBIT_INLINE U operator()(const Quotient& q, F, const uint16_t* noise) const {
        const U a = smaller(q.magnitude, limit), random = widen(load<H>(noise));
        const U normal = ((a + (random << above)) >> drop) - base;
        const U subnormal = (U) __builtin_convertvector((F)smaller(a, least) * units, I);
        return finish(q, a < least ? (subnormal + random) >> 16 : normal);
    }
};

// Quotients beyond +-1024 saturate whatever the zero point; within, adding 1.5 * 2^23 rounds to a whole number.
struct IntegerCodes {
    const I low, high;
    const U mask, inf, bound;
    const F whole;
    explicit IntegerCodes(const Encoder& e)
        : low((I)held(static_cast<uint32_t>(e.format.qmin))),
          high((I)held(static_cast<uint32_t>(e.format.qmax))),
          mask(held((1u << e.format.bits) - 1u)),
          inf(held(kInf)),
          bound(held(0x44800000u)),
          whole((F)held(bits_of(12582912.0f))) {}

    LOWBIT_INLINE I nearest(const Quotient& q) const {
        const U a = smaller(q.magnitude, bound);
        return (I)((F)(a | q.sign) + whole) - (I)whole;
    }
    LOWBIT_INLINE U finish(const Quotient& q, I whole_code, F zero) const {
        const I zero_point = __builtin_convertvector(zero, I);
        I code = whole_code + zero_point;
        code = code < low ? low : code;
        code = code > high ? high : code;
        return (U)((q.magnitude > inf) ? zero_point : code) & mask;
    }
};

struct IntegerNearest : IntegerCodes {
    explicit IntegerNearest(const Encoder& e) : IntegerCodes(e) {}

    LOWBIT_INLINE U operator()(const Quotient& q, F zero, const uint16_t*) const { return finish(q, nearest(q), zero); }
};

struct IntegerStochastic : IntegerCodes {
    explicit IntegerStochastic(const Encoder& e) : IntegerCodes(e) {}

    LOWBIT_INLINE U operator()(const Quotient& q, F zero, const uint16_t* noise) const {
        const F a = (F)smaller(q.magnitude, bound);
        const I floor = __builtin_convertvector(a, I);
        const F rest = (a - __builtin_convertvector(floor, F)) * splat(65536.0f);
        const I random = (I)widen(load<H>(noise));
        const I whole = floor + ((__builtin_convertvector(rest, I) + random) >> 16);
        return finish(q, q.sign != 0u ? -whole : whole, zero);
    }
};

// Up to 15 ascending thresholds: how many lie below, by four comparisons, each with the threshold in the middle of
// those that are left. Missing ones are Inf, below which everything lies.
struct CodebookNearest {
    Table by4, by2, by1;  // from entry 3, 1 and 0 on
    const F middle;
    const I nan;
    explicit CodebookNearest(const Encoder& e) : middle((F)held(threshold(e, 7))), nan((I)held(e.nan_code)) {
        uint32_t t[16 + 3];
        for (int k = 0; k < 19; ++k) t[k] = threshold(e, k);
        __builtin_memcpy(by4, t + 3, sizeof by4);
        __builtin_memcpy(by2, t + 1, sizeof by2);
        __builtin_memcpy(by1, t, sizeof by1);
    }
    static uint32_t threshold(const Encoder& e, int k) { return k < e.num_thresholds ? e.thresholds[k] : kInf; }

    LOWBIT_INLINE U operator()(const Quotient& q, F, const uint16_t*) const {
        const F v = q.value;
        I code = v > middle ? I{} + 8 : I{};
        code = v > lookup(by4, (U)code) ? code + 4 : code;
        code = v > lookup(by2, (U)code) ? code + 2 : code;
        code = v > lookup(by1, (U)code) ? code + 1 : code;
        return (U)(v == v ? code : nan);
    }
};

// 1 in range, 0 out of it, in place of codes.
struct IntegerInRange : IntegerCodes {
    explicit IntegerInRange(const Encoder& e) : IntegerCodes(e) {}

    LOWBIT_INLINE U operator()(const Quotient& q, F zero, const uint16_t*) const {
        const I code = nearest(q) + __builtin_convertvector(zero, I);
        return (U)((code >= low) & (code <= high)) & 1u;
    }
};

struct ValueInRange {
    const U limit;
    explicit ValueInRange(const Encoder& e) : limit(splat(e.limit)) {}

    LOWBIT_INLINE U operator()(const Quotient& q, F, const uint16_t*) const { return (U)(q.magnitude <= limit) & 1u; }
};

template <class Type, Factors::Mode mode, class Codes>
void encode_line(const Encoder& e, const typename Type::Element* x, int64_t n, const Factors& f, const uint16_t* noise,
                 const typename Type::Element* ahead, uint8_t* codes) {
    const Codes make(e);
    const Divide divide;
    for_lanes<mode>(
        f, n,
        [&](int64_t i, const Factor& factor) LOWBIT_INLINE {
            __builtin_prefetch(ahead + i);
            const Quotient q = divide.by<mode>(Type::read(x + i), factor);
            store(codes + i, narrow_bytes(make(q, factor.zero, noise + i)));
        },
        [&](int64_t i, const Factors& rest) {
            const Padded<typename Type::Element> last(x + i, n - i, rest, noise ? noise + i : nullptr);
            uint8_t out[kLanes];
            encode_line<Type, mode, Codes>(e, last.x, kLanes, last.factors, last.noise, last.x, out);
            __builtin_memcpy(codes + i, out, static_cast<size_t>(n - i));
        });
}

template <class Type, class Codes>
void encode_factors(const Encoder& e, const void* x, int64_t n, const Factors& f, const uint16_t* noise,
                    const void* ahead, uint8_t* codes) {
    const auto *p = static_cast<const typename Type::Element*>(x),
               *next = static_cast<const typename Type::Element*>(ahead);
    switch (f.mode) {
        case Factors::kNone:
            return encode_line<Type, Factors::kNone, Codes>(e, p, n, f, noise, next, codes);
        case Factors::kBlocks:
            return encode_line<Type, Factors::kBlocks, Codes>(e, p, n, f, noise, next, codes);
        case Factors::kInverse:
            return encode_line<Type, Factors::kInverse, Codes>(e, p, n, f, noise, next, codes);
        case Factors::kEach:
            return encode_line<Type, Factors::kEach, Codes>(e, p, n, f, noise, next, codes);
    }
}

void encode(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const uint16_t* noise,
            const void* ahead, uint8_t* codes) {
    if (!e.vector) return lines_scalar().encode(e, x, dtype, n, f, noise, ahead, codes);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (e.format.kind == kKindCodebook)
            return encode_factors<Type, CodebookNearest>(e, x, n, f, noise, ahead, codes);
        if (e.format.kind == kKindInteger) {
            return e.stochastic ? encode_factors<Type, IntegerStochastic>(e, x, n, f, noise, ahead, codes)
                                : encode_factors<Type, IntegerNearest>(e, x, n, f, noise, ahead, codes);
        }
        return e.stochastic ? encode_factors<Type, FloatStochastic>(e, x, n, f, noise, ahead, codes)
                            : encode_factors<Type, FloatNearest>(e, x, n, f, noise, ahead, codes);
    });
}

void in_range(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const void* ahead,
              uint8_t* kept) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        return e.format.kind == kKindInteger ? encode_factors<Type, IntegerInRange>(e, x, n, f, nullptr, ahead, kept)
                                             : encode_factors<Type, ValueInRange>(e, x, n, f, nullptr, ahead, kept);
    });
}

template <class Type, Factors::Mode mode>
void quotient_line(const typename Type::Element* x, int64_t n, const Factors& f, float* out) {
    const Divide divide;
    for_lanes<mode>(
        f, n,
        [&](int64_t i, const Factor& factor)
            LOWBIT_INLINE { store(out + i, divide.by<mode>(Type::read(x + i), factor).bits()); },
        [&](int64_t i, const Factors& rest) {
            const Padded<typename Type::Element> last(x + i, n - i, rest, nullptr);
            float values[kLanes];
            quotient_line<Type, mode>(last.x, kLanes, last.factors, values);
            __builtin_memcpy(out + i, values, static_cast<size_t>(n - i) * sizeof *out);
        });
}

void quotients(const void* x, Dtype dtype, int64_t n, const Factors& f, float* out) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        switch (f.mode) {
            case Factors::kNone:
                return quotient_line<Type, Factors::kNone>(p, n, f, out);
            case Factors::kBlocks:
                return quotient_line<Type, Factors::kBlocks>(p, n, f, out);
            case Factors::kInverse:
                return quotient_line<Type, Factors::kInverse>(p, n, f, out);
            case Factors::kEach:
                return quotient_line<Type, Factors::kEach>(p, n, f, out);
        }
    });
}
