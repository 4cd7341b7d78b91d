// Codes from numbers: docs/numerics.md sections 2, 3, 4 and 7; which are in range: section 10. Part of
// row_kernels_body.inl.

// Codes of quotients; `finite`: none is NaN.
struct FloatCodes {
    const U limit, emin, nan, sign, nan_sign, inf, drop, sign_shift;
    const int mantissa;
    explicit FloatCodes(const Encoder& e)
        : limit(held(e.limit)),
          emin(splat(static_cast<uint32_t>(128 - e.format.bias))),
          nan(held(e.nan_code)),
          sign(held(1u << (e.format.bits - 1))),
          nan_sign(held(e.format.nan_code >= 0 ? 1u << (e.format.bits - 1) : 0u)),
          inf(held(kInf)),
          drop(held(static_cast<uint32_t>(23 - e.format.mantissa))),
          sign_shift(held(static_cast<uint32_t>(32 - e.format.bits))),
          mantissa(e.format.mantissa) {}

    template <bool finite>
    LOWBIT_INLINE U finish(const Quotient& q, U code) const {
        const U shifted = q.sign >> sign_shift;
        if (finite) return code | (shifted & sign);
        const auto is_nan = q.magnitude > inf;
        return (is_nan ? nan : code) | (shifted & (is_nan ? nan_sign : sign));
    }
};

// Adding 2^(23 - mantissa) units of the element's binade (at least the least normal one) rounds to whole units, and
// leaves their number in the low bits; subnormals and carries into the next binade need no case of their own.
struct FloatNearest : FloatCodes {
    static constexpr bool kRandom = false;
    const U least, unit, base;
    explicit FloatNearest(const Encoder& e)
        : FloatCodes(e),
          least(held(emin[0] << 23)),
          unit(held(static_cast<uint32_t>(23 - mantissa) << 23)),
          base(held(emin[0] << mantissa)) {}

    template <bool finite>
    LOWBIT_INLINE U codes(const Quotient& q, F, U) const {
        const U a = smaller(q.magnitude, limit);
        const U binade = larger(a & inf, least);
        const U magic = binade + unit;
        const U units = (U)((F)a + (F)magic) - magic;
        return finish<finite>(q, units + (binade >> drop) - base);
    }
};

// The same for formats of at most 16 binades, where looking up is cheap (Encoder::looked_up).
struct FloatLookup : FloatCodes {
    static constexpr bool kRandom = false;
    static constexpr bool kCheap = kLanes == 16;
    const U least;
    Table magic, base;
    explicit FloatLookup(const Encoder& e) : FloatCodes(e), least(held(emin[0] << 23)) {
        __builtin_memcpy(magic, e.magic, sizeof magic);
        __builtin_memcpy(base, e.base, sizeof base);
    }

    template <bool finite>
    LOWBIT_INLINE U codes(const Quotient& q, F, U) const {
        const U a = smaller(q.magnitude, limit), field = larger(a, least) >> 23;
        return finish<finite>(q, (U)((F)a + lookup(magic, field)) - (U)lookup(base, field));
    }
};

// Normals of the format: the noise is added below the bits that stay, and carries into them, and from the mantissa into
// the exponent. Subnormals: as a whole number of 2^-16 units, cut off, to which the noise is added.
struct FloatStochastic : FloatCodes {
    static constexpr bool kRandom = true;
    const U least, base, above;
    const F units;  // 2^16 for the least positive value
    explicit FloatStochastic(const Encoder& e)
        : FloatCodes(e),
          least(held(emin[0] << 23)),
          base(held((emin[0] - 1u) << mantissa)),
          above(held(static_cast<uint32_t>(7 - mantissa))),
          units((F)held(bits_of(65536.0f / float_of(grid_value(1, grid_of(e.format)))))) {}

    LOWBIT_INLINE U normal(U a, U random) const { return ((a + (random << above)) >> drop) - base; }
    template <bool finite>
    LOWBIT_INLINE U codes(const Quotient& q, F, U random) const {
        const U a = smaller(q.magnitude, limit);
        const U subnormal = (U) __builtin_convertvector((F)smaller(a, least) * units, I);
        return finish<finite>(q, a < least ? (subnormal + random) >> 16 : normal(a, random));
    }
    // Quads seldom have subnormals, whose codes are half of the work.
    template <bool finite>
    LOWBIT_INLINE void quad(const Quotient (&q)[4], const U (&random)[4], U (&code)[4]) const {
        const U low = smaller(smaller(q[0].magnitude, q[1].magnitude), smaller(q[2].magnitude, q[3].magnitude));
        if (__builtin_expect(any_byte_above((U)((I)low < (I)least), U{}), 0)) {
            for (int k = 0; k < 4; ++k) code[k] = codes<finite>(q[k], F{}, random[k]);
            return;
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) code[k] = finish<finite>(q[k], normal(smaller(q[k].magnitude, limit), random[k]));
    }
};

// Four vectors of codes: each by itself, unless a format has quad().
template <bool finite, class Codes>
LOWBIT_INLINE inline void code_quad(const Codes& make, const Quotient (&q)[4], const Factor (&factor)[4],
                                    const U (&random)[4], U (&code)[4]) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) code[k] = make.template codes<finite>(q[k], factor[k].zero, random[k]);
}
template <bool finite>
LOWBIT_INLINE inline void code_quad(const FloatStochastic& make, const Quotient (&q)[4], const Factor (&)[4],
                                    const U (&random)[4], U (&code)[4]) {
    make.quad<finite>(q, random, code);
}

struct IntegerCodes {
    const F low, high;
    const U mask;
    explicit IntegerCodes(const Encoder& e)
        : low((F)held(bits_of(static_cast<float>(e.format.qmin)))),
          high((F)held(bits_of(static_cast<float>(e.format.qmax)))),
          mask(held((1u << e.format.bits) - 1u)) {}

    // `q`: the quotient, or its magnitude.
    template <bool finite>
    LOWBIT_INLINE U finish(F q, I code, I zero_point) const {
        if (!finite) code = q == q ? code : zero_point;
        return (U)code & mask;
    }
};

// The ends of the range are whole numbers: quotients are clamped before they are rounded.
struct IntegerNearest : IntegerCodes {
    static constexpr bool kRandom = false;
    explicit IntegerNearest(const Encoder& e) : IntegerCodes(e) {}

    template <bool finite>
    LOWBIT_INLINE U codes(const Quotient& q, F zero, U) const {
        const I zero_point = __builtin_convertvector(zero, I);
        const F v = smaller(larger(q.value, low - zero), high - zero);
        return finish<finite>(q.value, rounded(v) + zero_point, zero_point);
    }
};

// Quotients beyond +-1024 saturate whatever the zero point.
struct IntegerStochastic : IntegerCodes {
    static constexpr bool kRandom = true;
    const U bound, sign;
    explicit IntegerStochastic(const Encoder& e) : IntegerCodes(e), bound(held(0x44800000u)), sign(held(kSign)) {}

    template <bool finite>
    LOWBIT_INLINE U codes(const Quotient& q, F zero, U random) const {
        const F a = (F)smaller(q.magnitude, bound);
        const I floor = __builtin_convertvector(a, I), zero_point = __builtin_convertvector(zero, I);
        const F rest = (a - __builtin_convertvector(floor, F)) * splat(65536.0f);
        const I whole = floor + ((__builtin_convertvector(rest, I) + (I)random) >> 16);
        const I least = __builtin_convertvector(low, I), most = __builtin_convertvector(high, I);
        I code = ((q.sign & sign) != 0u ? -whole : whole) + zero_point;
        code = code < least ? least : code;
        return finish<finite>((F)q.magnitude, code > most ? most : code, zero_point);
    }
};

// The entry at a place, and its weight.
struct Entry {
    F value, weight;
};

// Where numbers lie in a codebook (book.h), and the numbers there. Of few entries: by four comparisons, each with the
// cut in the middle of those that are left. Missing cuts are Inf, below which everything lies.
struct FewEntries {
    Table by4, by2, by1;  // from cut 3, 1 and 0 on
    Table values, weights;
    const F middle;
    explicit FewEntries(const BookIndex& book) : middle((F)held(cut(book, 7))) {
        uint32_t cuts[16 + 3], value[16] = {}, weight[16] = {};
        for (size_t k = 0; k < 19; ++k) cuts[k] = cut(book, k);
        for (size_t k = 0; k <= book.cuts.size(); ++k) value[k] = book.row->values[k], weight[k] = book.row->weights[k];
        __builtin_memcpy(by4, cuts + 3, sizeof by4);
        __builtin_memcpy(by2, cuts + 1, sizeof by2);
        __builtin_memcpy(by1, cuts, sizeof by1);
        __builtin_memcpy(values, value, sizeof values);
        __builtin_memcpy(weights, weight, sizeof weights);
    }
    static uint32_t cut(const BookIndex& book, size_t k) { return k < book.cuts.size() ? book.cuts[k] : kInf; }

    LOWBIT_INLINE U place(F v) const {
        I code = v > middle ? I{} + 8 : I{};
        code = v > lookup(by4, (U)code) ? code + 4 : code;
        code = v > lookup(by2, (U)code) ? code + 2 : code;
        return (U)(v > lookup(by1, (U)code) ? code + 1 : code);
    }
    LOWBIT_INLINE Entry entry(U place) const { return {lookup(values, place), lookup(weights, place)}; }
};

// Of many: by their cells. The side is that of v < 0, so that -0 lies where 0 does.
struct ManyEntries {
    const U magnitude, least, most, low, side;
    const int shift;
    const uint32_t* cells;
    const uint64_t* entries;
    explicit ManyEntries(const BookIndex& book)
        : magnitude(held(kMagnitude)),
          least(held(book.least)),
          most(held(book.most)),
          low(held((1u << book.shift) - 1u)),
          side(held(book.side)),
          shift(book.shift),
          cells(book.cells.data()),
          entries(book.entries.data()) {}

    LOWBIT_INLINE U place(F v) const {
        const U negative = (U)(v < F{}), m = larger(smaller((U)v & magnitude, most), least) - least;
        const U cell = gather(cells, (m >> shift) + (negative & side));
        return (cell + (((m & low) ^ negative) - negative)) >> shift;
    }
    LOWBIT_INLINE Entry entry(U place) const {
        U found[2];
        gather_pairs(entries, place, found);
        return {(F)evens((I)found[0], (I)found[1]), (F)odds((I)found[0], (I)found[1])};
    }
};

template <class Entries>
struct BookNearest {
    static constexpr bool kRandom = false;
    const Entries entries;
    const U nan;
    explicit BookNearest(const Encoder& e) : entries(*e.book), nan(held(e.nan_code)) {}

    template <bool finite>
    LOWBIT_INLINE U codes(const Quotient& q, F, U) const {
        const U code = entries.place(q.value);
        return finite ? code : q.value == q.value ? code : nan;
    }
};

template <class Entries>
struct BookStochastic {
    static constexpr bool kRandom = true;
    const Entries entries;
    const F first, last;
    const U nan;
    explicit BookStochastic(const Encoder& e)
        : entries(*e.book),
          first((F)held(e.book->row->values[0])),
          last((F)held(e.book->row->values[e.book->cuts.size()])),
          nan(held(e.nan_code)) {}

    template <bool finite>
    LOWBIT_INLINE U codes(const Quotient& q, F, U random) const {
        const F v = smaller(larger(q.value, first), last);
        const U place = entries.place(v);
        const Entry at = entries.entry(place);
        const I part = __builtin_convertvector((v - at.value) * at.weight, I);
        const U code = place + ((smaller((U)part, splat(65535u)) + random) >> 16);
        return finite ? code : q.value == q.value ? code : nan;
    }
};

// 1 in range, 0 out of it, in place of codes.
struct IntegerInRange : IntegerCodes {
    static constexpr bool kRandom = false;
    explicit IntegerInRange(const Encoder& e) : IntegerCodes(e) {}

    template <bool>
    LOWBIT_INLINE U codes(const Quotient& q, F zero, U) const {
        const F least = low - zero, most = high - zero;
        const F v = smaller(larger(q.value, least - 1.0f), most + 1.0f);
        const F whole = __builtin_convertvector(rounded(v), F);
        return (U)((whole >= least) & (whole <= most) & (q.value == q.value)) & 1u;
    }
};

struct ValueInRange {
    static constexpr bool kRandom = false;
    const U limit;
    explicit ValueInRange(const Encoder& e) : limit(splat(e.limit)) {}

    template <bool>
    LOWBIT_INLINE U codes(const Quotient& q, F, U) const {
        return (U)(q.magnitude <= limit) & 1u;
    }
};

// Four vectors of random numbers in the order of read_quad().
template <bool zipped>
LOWBIT_INLINE inline void noise_quad(const uint16_t* noise, U (&random)[4]) {
    for (int k = 0; k < 4; k += zipped ? 2 : 1) {
        if (zipped) {
            const U words = load<U>(noise + k * kLanes);
            random[k] = zip_low(words, U{}), random[k + 1] = zip_high(words, U{});
        } else {
            random[k] = widen(load<H>(noise + k * kLanes));
        }
    }
}

template <class Type, Factors::Mode mode, bool finite, class Codes>
void encode_row(const Encoder& e, const typename Type::Element* x, int64_t n, const Factors& f, const uint16_t* noise,
                const typename Type::Element* ahead, uint8_t* codes) {
    using Element = typename Type::Element;
    const Codes make(e);
    const Divide divide;
    for_quads<mode, Type::kZipped>(
        f, n,
        [&](int64_t i, const Factor(&factor)[4]) LOWBIT_INLINE {
            constexpr int64_t kLine = 64 / sizeof(Element);
#pragma GCC unroll 4
            for (int64_t k = 0; k < kQuad; k += kLine) __builtin_prefetch(ahead + i + k);
            U v[4], random[4] = {}, code[4];
            Type::read_quad(x + i, v);
            if (Codes::kRandom) noise_quad<Type::kZipped>(noise + i, random);
            Quotient q[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) q[k] = divide.by<mode, finite>(v[k], factor[k]);
            code_quad<finite>(make, q, factor, random, code);
            store(codes + i, join_bytes(code[0], code[1], code[2], code[3], Type::kZipped));
        },
        [&](int64_t i, const Factor& factor) LOWBIT_INLINE {
            const Quotient q = divide.by<mode, finite>(Type::read(x + i), factor);
            const U random = Codes::kRandom ? widen(load<H>(noise + i)) : U{};
            store(codes + i, narrow_bytes(make.template codes<finite>(q, factor.zero, random)));
        },
        [&](int64_t i, const Factors& rest) {
            const Padded<Element> last(x + i, n - i, rest, noise ? noise + i : nullptr);
            uint8_t out[kLanes];
            encode_row<Type, mode, finite, Codes>(e, last.x, kLanes, last.factors, last.noise, last.x, out);
            __builtin_memcpy(codes + i, out, static_cast<size_t>(n - i));
        });
}

template <class Type, class Codes>
void encode_factors(const Encoder& e, const void* x, int64_t n, const Factors& f, const uint16_t* noise,
                    const void* ahead, uint8_t* codes) {
    using Element = typename Type::Element;
    using RowKernel =
        void(const Encoder&, const Element*, int64_t, const Factors&, const uint16_t*, const Element*, uint8_t*);
    static constexpr RowKernel *kAny[] = {encode_row<Type, Factors::kNone, false, Codes>,
                                          encode_row<Type, Factors::kBlocks, false, Codes>,
                                          encode_row<Type, Factors::kInverse, false, Codes>,
                                          encode_row<Type, Factors::kReciprocal, false, Codes>,
                                          encode_row<Type, Factors::kEach, false, Codes>},
                               *kFinite[] = {kAny[Factors::kNone], kAny[Factors::kBlocks],
                                             encode_row<Type, Factors::kInverse, true, Codes>,
                                             encode_row<Type, Factors::kReciprocal, true, Codes>, kAny[Factors::kEach]};
    (f.finite ? kFinite : kAny)[f.mode](e, static_cast<const Element*>(x), n, f, noise,
                                        static_cast<const Element*>(ahead), codes);
}

void encode(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const uint16_t* noise,
            const void* ahead, uint8_t* codes) {
    if (!e.vector) return row_kernels_scalar().encode(e, x, dtype, n, f, noise, ahead, codes);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        if (e.format.kind == kKindCodebook) {
            const auto few = e.stochastic ? encode_factors<Type, BookStochastic<FewEntries>>
                                          : encode_factors<Type, BookNearest<FewEntries>>;
            const auto many = e.stochastic ? encode_factors<Type, BookStochastic<ManyEntries>>
                                           : encode_factors<Type, BookNearest<ManyEntries>>;
            return (e.book->few() ? few : many)(e, x, n, f, noise, ahead, codes);
        }
        if (e.format.kind == kKindInteger) {
            return e.stochastic ? encode_factors<Type, IntegerStochastic>(e, x, n, f, noise, ahead, codes)
                                : encode_factors<Type, IntegerNearest>(e, x, n, f, noise, ahead, codes);
        }
        if (e.stochastic) return encode_factors<Type, FloatStochastic>(e, x, n, f, noise, ahead, codes);
        if constexpr (FloatLookup::kCheap) {
            if (e.looked_up) return encode_factors<Type, FloatLookup>(e, x, n, f, noise, ahead, codes);
        }
        return encode_factors<Type, FloatNearest>(e, x, n, f, noise, ahead, codes);
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
void quotient_row(const typename Type::Element* x, int64_t n, const Factors& f, float* out) {
    const Divide divide;
    for_lanes<mode>(
        f, n,
        [&](int64_t i, const Factor& factor)
            LOWBIT_INLINE { store(out + i, divide.by<mode, true>(Type::read(x + i), factor).bits()); },
        [&](int64_t i, const Factors& rest) {
            const Padded<typename Type::Element> last(x + i, n - i, rest, nullptr);
            float values[kLanes];
            quotient_row<Type, mode>(last.x, kLanes, last.factors, values);
            __builtin_memcpy(out + i, values, static_cast<size_t>(n - i) * sizeof *out);
        });
}

void quotients(const void* x, Dtype dtype, int64_t n, const Factors& f, float* out) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        switch (f.mode) {
            case Factors::kNone:
                return quotient_row<Type, Factors::kNone>(p, n, f, out);
            case Factors::kBlocks:
                return quotient_row<Type, Factors::kBlocks>(p, n, f, out);
            case Factors::kInverse:
                return quotient_row<Type, Factors::kInverse>(p, n, f, out);
            case Factors::kEach:
                return quotient_row<Type, Factors::kEach>(p, n, f, out);
            case Factors::kReciprocal:  // of any elements: only codes may be made of clamped ones
                return f.finite ? quotient_row<Type, Factors::kReciprocal>(p, n, f, out)
                                : quotient_row<Type, Factors::kBlocks>(p, n, f, out);
        }
    });
}
