// Codes from numbers: docs/numerics.md sections 2, 3, 4 and 7; which are in range: section 10. Part of lines_body.inl.

struct FloatCodes {
    const U limit, emin, nan, nan_sign;
    const int mantissa, sign_shift;
    explicit FloatCodes(const Encoder& e)
        : limit(splat(e.limit)),
          emin(splat(static_cast<uint32_t>(128 - e.format.bias))),
          nan(splat(e.nan_code)),
          nan_sign(splat(e.format.nan_code >= 0 ? kSign : 0u)),
          mantissa(e.format.mantissa),
          sign_shift(32 - e.format.bits) {}

    U finish(const Quotient& q, U code) const {
        const auto is_nan = q.magnitude > splat(kInf);
        return (is_nan ? nan : code) | ((is_nan ? q.sign & nan_sign : q.sign) >> sign_shift);
    }
};

// Adding 2^(23 - mantissa) units of the element's binade (at least the least normal one) rounds to whole units, and
// leaves their number in the low bits; subnormals and carries into the next binade need no case of their own.
struct FloatNearest : FloatCodes {
    const U least, unit, base;
    explicit FloatNearest(const Encoder& e)
        : FloatCodes(e),
          least(emin << 23),
          unit(splat(static_cast<uint32_t>(23 - mantissa) << 23)),
          base(emin << mantissa) {}

    U operator()(const Quotient& q, F, const uint16_t*) const {
        const U a = smaller(q.magnitude, limit);
        const U binade = larger(a & kInf, least);
        const U magic = binade + unit;
        const U units = (U)((F)a + (F)magic) - magic;
        return finish(q, units + (binade >> (23 - mantissa)) - base);
    }
};

struct FloatStochastic : FloatCodes {
    explicit FloatStochastic(const Encoder& e) : FloatCodes(e) {}

    U operator()(const Quotient& q, F, const uint16_t* noise) const {
        const U a = smaller(q.magnitude, limit);
        const U field = a >> 23, exponent = larger(field, splat(1u)), binade = larger(exponent, emin);
        const U significand = (a & 0x7fffffu) | (field > 0u ? splat(0x800000u) : U{});
        const U shift = smaller(splat(static_cast<uint32_t>(23 - mantissa)) + (binade - exponent), splat(40u));
        const U whole = smaller(shift, splat(31u));  // significands have 24 bits: 24 and more leave nothing
        const U kept = significand >> whole;
        const U fraction = (significand - (kept << whole)) >> (shift - 16u);
        const U carry = (fraction + widen(load<H>(noise))) >> 16;
        return finish(q, ((binade - emin) << mantissa) + kept + carry);
    }
};

// Quotients beyond +-1024 saturate whatever the zero point; within, adding 1.5 * 2^23 rounds to a whole number.
struct IntegerCodes {
    const I low, high;
    const U mask;
    explicit IntegerCodes(const Encoder& e)
        : low(I{} + e.format.qmin), high(I{} + e.format.qmax), mask(splat((1u << e.format.bits) - 1u)) {}

    static I nearest(const Quotient& q) {
        const U a = smaller(q.magnitude, splat(0x44800000u));
        return (I)((F)(a | q.sign) + splat(12582912.0f)) - 0x4b400000;
    }
    U finish(const Quotient& q, I whole, F zero) const {
        const I zero_point = __builtin_convertvector(zero, I);
        I code = whole + zero_point;
        code = code < low ? low : code;
        code = code > high ? high : code;
        return (U)((q.magnitude > splat(kInf)) ? zero_point : code) & mask;
    }
};

struct IntegerNearest : IntegerCodes {
    explicit IntegerNearest(const Encoder& e) : IntegerCodes(e) {}

    U operator()(const Quotient& q, F zero, const uint16_t*) const { return finish(q, nearest(q), zero); }
};

struct IntegerStochastic : IntegerCodes {
    explicit IntegerStochastic(const Encoder& e) : IntegerCodes(e) {}

    U operator()(const Quotient& q, F zero, const uint16_t* noise) const {
        const F a = (F)smaller(q.magnitude, splat(0x44800000u));
        const I floor = __builtin_convertvector(a, I);
        const F rest = (a - __builtin_convertvector(floor, F)) * splat(65536.0f);
        const I random = (I)widen(load<H>(noise));
        const I whole = floor + ((__builtin_convertvector(rest, I) + random) >> 16);
        return finish(q, q.sign != 0u ? -whole : whole, zero);
    }
};

struct CodebookNearest {
    const uint32_t* thresholds;
    const int count;
    const U nan;
    explicit CodebookNearest(const Encoder& e)
        : thresholds(e.thresholds), count(e.num_thresholds), nan(splat(e.nan_code)) {}

    U operator()(const Quotient& q, F, const uint16_t*) const {
        const F v = (F)q.bits();
        I code{};
        for (int k = 0; k < count; ++k) code -= (I)(v > splat(float_of(thresholds[k])));
        return q.magnitude > splat(kInf) ? nan : (U)code;
    }
};

// 1 in range, 0 out of it, in place of codes.
struct IntegerInRange : IntegerCodes {
    explicit IntegerInRange(const Encoder& e) : IntegerCodes(e) {}

    U operator()(const Quotient& q, F zero, const uint16_t*) const {
        const I code = nearest(q) + __builtin_convertvector(zero, I);
        return (U)((code >= low) & (code <= high)) & 1u;
    }
};

struct ValueInRange {
    const U limit;
    explicit ValueInRange(const Encoder& e) : limit(splat(e.limit)) {}

    U operator()(const Quotient& q, F, const uint16_t*) const { return (U)(q.magnitude <= limit) & 1u; }
};

template <class Type, Factors::Mode mode, class Codes>
void encode_line(const Encoder& e, const typename Type::Element* x, int64_t n, const Factors& f, const uint16_t* noise,
                 uint8_t* codes) {
    if (n < kLanes) {
        typename Type::Element padded[kLanes] = {};
        uint16_t padded_noise[kLanes] = {};
        float each[kLanes] = {}, zeros[kLanes] = {};
        uint8_t out[kLanes];
        Factors g = f;
        __builtin_memcpy(padded, x, n * sizeof *x);
        if (noise) __builtin_memcpy(padded_noise, noise, n * 2);
        if (mode == Factors::kEach) {
            __builtin_memcpy(each, f.each, n * 4);
            if (f.zeros) __builtin_memcpy(zeros, f.zeros, n * 4);
            g.each = each;
            g.zeros = zeros;
        }
        encode_line<Type, mode, Codes>(e, padded, kLanes, g, padded_noise, out);
        __builtin_memcpy(codes, out, n);
        return;
    }
    const Codes make(e);
    const Factor<mode> factor(f);
    auto step = [&](int64_t i) {
        const Quotient q = divide<mode>(Type::read(x + i), factor, i);
        store(codes + i, narrow_bytes(make(q, factor.zero_at(i), noise + i)));
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) step(i);
    if (i < n) step(n - kLanes);
}

template <class Type, class Codes>
void encode_factors(const Encoder& e, const void* x, int64_t n, const Factors& f, const uint16_t* noise,
                    uint8_t* codes) {
    const auto* p = static_cast<const typename Type::Element*>(x);
    switch (f.mode) {
        case Factors::kNone:
            return encode_line<Type, Factors::kNone, Codes>(e, p, n, f, noise, codes);
        case Factors::kOne:
            return encode_line<Type, Factors::kOne, Codes>(e, p, n, f, noise, codes);
        case Factors::kEach:
            return encode_line<Type, Factors::kEach, Codes>(e, p, n, f, noise, codes);
    }
}

void encode(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const uint16_t* noise,
            uint8_t* codes) {
    if (!e.vector) return lines_scalar().encode(e, x, dtype, n, f, noise, codes);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (e.format.kind == kKindCodebook) return encode_factors<Type, CodebookNearest>(e, x, n, f, noise, codes);
        if (e.format.kind == kKindInteger) {
            return e.stochastic ? encode_factors<Type, IntegerStochastic>(e, x, n, f, noise, codes)
                                : encode_factors<Type, IntegerNearest>(e, x, n, f, noise, codes);
        }
        return e.stochastic ? encode_factors<Type, FloatStochastic>(e, x, n, f, noise, codes)
                            : encode_factors<Type, FloatNearest>(e, x, n, f, noise, codes);
    });
}

void in_range(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, uint8_t* kept) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        return e.format.kind == kKindInteger ? encode_factors<Type, IntegerInRange>(e, x, n, f, nullptr, kept)
                                             : encode_factors<Type, ValueInRange>(e, x, n, f, nullptr, kept);
    });
}

void quotients(const void* x, Dtype dtype, int64_t n, const Factors& f, float* out) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        int64_t i = 0;
        auto line = [&](const auto& factor) {
            for (; i + kLanes <= n; i += kLanes) store(out + i, divide(Type::read(p + i), factor, i).bits());
        };
        if (f.mode == Factors::kNone) line(Factor<Factors::kNone>(f));
        if (f.mode == Factors::kOne) line(Factor<Factors::kOne>(f));
        if (f.mode == Factors::kEach) line(Factor<Factors::kEach>(f));
        Factors rest = f;
        if (rest.each) rest.each += i;
        lines_scalar().quotients(p + i, dtype, n - i, rest, out + i);
    });
}
