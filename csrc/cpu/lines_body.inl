// Line kernels in vectors of kLanes 32-bit lanes; included by lines_<isa>.cpp inside its own namespace, after
//   kLanes, and the types F, U, I (float, uint32_t, int32_t), H, B (uint16_t, uint8_t), all of kLanes lanes, W
//   (uint64_t, kLanes / 2 lanes); F widen_half(H), H narrow_half(F); int32_t largest(I); W multiply(W, W) of the low 32
//   bits of each lane; F lookup(const float table[16], U index); pack_group(), unpack_group() of eight codes.
// Everything else is GCC's vector extension, so that one body serves every instruction set.

template <class T>
inline T load(const void* p) {
    T v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
inline void store(void* p, T v) {
    __builtin_memcpy(p, &v, sizeof v);
}
inline U splat(uint32_t x) { return U{} + x; }
inline F splat(float x) { return (F)splat(bits_of(x)); }
inline U larger(U a, U b) { return a > b ? a : b; }
inline U smaller(U a, U b) { return a < b ? a : b; }

// -- element types
// -----------------------------------------------------------------------------------------------------

struct Float32 {
    using Element = uint32_t;
    static U read(const Element* p) { return load<U>(p); }
    static void write(Element* p, U bits) { store(p, bits); }
};
struct BFloat16 {
    using Element = uint16_t;
    static U read(const Element* p) { return widen(load<H>(p)) << 16; }
    static void write(Element* p, U bits) {
        const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const U nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
        store(p, narrow_words((bits & kMagnitude) > splat(kInf) ? nan : rounded));
    }
};
struct Float16 {
    using Element = uint16_t;
    static U read(const Element* p) { return (U)widen_half(load<H>(p)); }
    static void write(Element* p, U bits) { store(p, narrow_half((F)bits)); }
};

template <class Type, class Function>
inline auto with_type(Function function) {
    return function(Type{});
}
template <class Function>
inline auto dispatch(Dtype dtype, Function function) {
    switch (dtype) {
        case Dtype::kFloat32:
            return with_type<Float32>(function);
        case Dtype::kBFloat16:
            return with_type<BFloat16>(function);
        default:
            return with_type<Float16>(function);
    }
}

// -- factors
// -----------------------------------------------------------------------------------------------------------

template <Factors::Mode mode>
struct Factor {
    const Factors& f;
    const F one, zero;
    explicit Factor(const Factors& factors) : f(factors), one(splat(factors.one)), zero(splat(factors.zero)) {}

    F at(int64_t i) const { return mode == Factors::kEach ? load<F>(f.each + i) : one; }
    F zero_at(int64_t i) const { return mode != Factors::kEach ? zero : f.zeros ? load<F>(f.zeros + i) : F{}; }
};

// |x| / |factor|, and the quotient's sign in the top bit.
struct Quotient {
    U magnitude, sign;
    U bits() const { return magnitude | sign; }
};
template <Factors::Mode mode>
inline Quotient divide(U x, const Factor<mode>& factor, int64_t i) {
    if (mode == Factors::kNone) return {x & kMagnitude, x & kSign};
    const U divisor = (U)factor.at(i);
    return {(U)((F)(x & kMagnitude) / (F)(divisor & kMagnitude)) & kMagnitude, (x ^ divisor) & kSign};
}

// -- encoders (docs/numerics.md sections 2, 3, 4, 7)
// -------------------------------------------------------------------

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

    U operator()(const Quotient& q, F zero, const uint16_t*) const {
        const U a = smaller(q.magnitude, splat(0x44800000u));
        return finish(q, (I)((F)(a | q.sign) + splat(12582912.0f)) - 0x4b400000, zero);
    }
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

// -- decoders (section 6)
// ----------------------------------------------------------------------------------------------

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
    if (d.format.kind == kKindExponent) return lines_scalar().decode(d, codes, n, f, out, dtype);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (d.format.kind == kKindInteger) return decode_factors<Type, IntegerValues>(d, codes, n, f, out);
        if (d.format.bits == 4) return decode_factors<Type, TableValues>(d, codes, n, f, out);
        return decode_factors<Type, FloatValues>(d, codes, n, f, out);
    });
}

// -- statistics (section 5)
// --------------------------------------------------------------------------------------------

// Magnitudes as signed integers: numbers of the other sign are negative, and so never raise a maximum that starts at 0.
template <class Type>
void stats_of(const typename Type::Element* x, int64_t n, bool affine, uint32_t& high, uint32_t& low) {
    const I clear = I{} + static_cast<int32_t>(affine ? ~0u : kMagnitude), flip = I{} + static_cast<int32_t>(kSign);
    I most{}, least{};
    auto step = [&](const typename Type::Element* p) {
        const I bits = (I)Type::read(p) & clear, flipped = bits ^ flip;
        most = bits > most ? bits : most;
        least = flipped > least ? flipped : least;
    };
    if (n < kLanes) {
        typename Type::Element padded[kLanes] = {};
        __builtin_memcpy(padded, x, n * sizeof *x);
        step(padded);
    } else {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) step(x + i);
        if (i < n) step(x + n - kLanes);
    }
    const uint32_t top = static_cast<uint32_t>(largest(most)), bottom = static_cast<uint32_t>(largest(least));
    if (top > high) high = top;
    if (affine && bottom > low) low = bottom;
}

void block_stats(const void* x, Dtype dtype, int64_t n, int64_t block, bool affine, uint32_t* high, uint32_t* low) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        uint32_t unused = 0;
        for (int64_t b = 0; b * block < n; ++b) {
            const int64_t rest = n - b * block;
            stats_of<Type>(p + b * block, rest < block ? rest : block, affine, high[b], affine ? low[b] : unused);
        }
    });
}

void column_stats(const void* x, Dtype dtype, int64_t n, bool affine, uint32_t* high, uint32_t* low) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        const U clear = splat(affine ? ~0u : kMagnitude);
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            const U bits = Type::read(p + i) & clear;
            const I top = load<I>(high + i);
            store(high + i, (I)bits > top ? (I)bits : top);
            if (!affine) continue;
            const I flipped = (I)(bits ^ kSign), bottom = load<I>(low + i);
            store(low + i, flipped > bottom ? flipped : bottom);
        }
        if (i < n) lines_scalar().column_stats(p + i, dtype, n - i, affine, high + i, affine ? low + i : nullptr);
    });
}

uint32_t finite_amax(const void* x, Dtype dtype, int64_t n) {
    uint32_t found = 0;
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        I most{};
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            const I bits = (I)(Type::read(p + i) & kMagnitude);
            most = (bits > most) & (bits < static_cast<int32_t>(kInf)) ? bits : most;
        }
        const uint32_t rest = lines_scalar().finite_amax(p + i, dtype, n - i);
        found = static_cast<uint32_t>(largest(most));
        if (rest > found) found = rest;
    });
    return found;
}

// -- noise (section 7)
// -------------------------------------------------------------------------------------------------

// Four vectors of counters at once hide the multiplications' latency. A counter's words lie in the low halves of 64-bit
// lanes; what the products leave in the high halves is ignored by multiply() and cut off at the end.
constexpr int kChains = 4, kCounters = kLanes / 2;

inline void philox_vectors(uint64_t block, const Rng& rng, uint16_t* out) {
    W c0[kChains], c1[kChains], c2[kChains], c3[kChains], lane;
    for (int j = 0; j < kCounters; ++j) lane[j] = static_cast<uint64_t>(j);
    for (int k = 0; k < kChains; ++k) {
        const W counter = (lane + (block + static_cast<uint64_t>(k * kCounters))) & (~uint64_t{0} >> 3);
        c0[k] = counter;
        c1[k] = counter >> 32;
        c2[k] = W{} + rng.step;
        c3[k] = W{} + rng.stream;
    }
    uint32_t k0 = static_cast<uint32_t>(rng.seed), k1 = static_cast<uint32_t>(rng.seed >> 32);
    const W m0 = W{} + uint64_t{0xD2511F53u}, m1 = W{} + uint64_t{0xCD9E8D57u};
    for (int round = 0; round < 10; ++round) {
        for (int k = 0; k < kChains; ++k) {
            const W p0 = multiply(c0[k], m0), p1 = multiply(c2[k], m1);
            c0[k] = (p1 >> 32) ^ c1[k] ^ uint64_t { k0 };
            c2[k] = (p0 >> 32) ^ c3[k] ^ uint64_t { k1 };
            c1[k] = p1;
            c3[k] = p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int k = 0; k < kChains; ++k) {
        const W first = (c0[k] & 0xffffffffu) | (c1[k] << 32), second = (c2[k] & 0xffffffffu) | (c3[k] << 32);
        for (int j = 0; j < kCounters; ++j) {
            const uint64_t pair[2] = {first[j], second[j]};
            __builtin_memcpy(out + 8 * (k * kCounters + j), pair, sizeof pair);
        }
    }
}

void noise(uint64_t block, int64_t count, const Rng& rng, uint16_t* out) {
    constexpr int64_t kStep = kChains * kCounters;
    int64_t k = 0;
    for (; k + kStep <= count; k += kStep) philox_vectors(block + static_cast<uint64_t>(k), rng, out + 8 * k);
    if (k == count) return;
    uint16_t rest[8 * kStep];
    philox_vectors(block + static_cast<uint64_t>(k), rng, rest);
    __builtin_memcpy(out + 8 * k, rest, static_cast<size_t>(count - k) * 16);
}

// -- packing (section 8)
// -----------------------------------------------------------------------------------------------

void pack(const uint8_t* codes, int64_t groups, int bits, uint8_t* out) {
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1u);
    int64_t g = 0;
    for (; g * bits + 8 <= groups * bits; ++g) store(out + g * bits, pack_group(load<uint64_t>(codes + 8 * g), mask));
    lines_scalar().pack(codes + 8 * g, groups - g, bits, out + g * bits);
}

void unpack(const uint8_t* packed, int64_t groups, int bits, uint8_t* codes) {
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1u);
    int64_t g = 0;
    for (; g * bits + 8 <= groups * bits; ++g)
        store(codes + 8 * g, unpack_group(load<uint64_t>(packed + g * bits), mask));
    lines_scalar().unpack(packed + g * bits, groups - g, bits, codes + 8 * g);
}

constexpr Lines kTable{encode, decode, block_stats, column_stats, finite_amax, noise, pack, unpack};
