// Line kernels in vectors of kLanes 32-bit lanes; included by lines_<isa>.cpp inside its own namespace, after
//   LOWBIT_REGISTER, kLanes, and the types F, U, I (float, uint32_t, int32_t), H, B (uint16_t, uint8_t), all of kLanes
//   lanes, W (uint64_t, kLanes / 2 lanes); F widen_half(H), H narrow_half(F); int32_t largest(I); I evens(I, I) and
//   odds(I, I) of the lanes of two vectors; F root(F); W multiply(W, W) of the low 32 bits of each lane; F
//   lookup(Table, U index) in 16 entries, of whose index the low four bits count; pack_group(), unpack_group() of eight
//   codes; I rounded(F) to nearest even; F larger(F, F), smaller(F, F), the second where the first is NaN, or NaN; U
//   zip_low(U, U), zip_high(U, U) of 16-bit words, in each 16 bytes; U join_bytes(U, U, U, U, zipped) of lanes below
//   256, in order, or in that in which zip_low(v, 0) and zip_high(v, 0) leave the words of v; U join_words(U, U) of
//   lanes below 65536; U widen_words(p) of bytes; store_threes(p, U) and U load_threes(p) of
//   the low three bytes of each lane; F first_halves(U), second_halves(U) of words that are fp16.
// Everything else is GCC's vector extension, so that one body serves every instruction set.

// GCC leaves what several loops call out of them, and then loads its constants each time.
#define LOWBIT_INLINE __attribute__((always_inline))

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
// A constant that stays in a register: else GCC makes it anew in every block.
inline U held(uint32_t x) {
    U v = splat(x);
    __asm__("" : "+" LOWBIT_REGISTER(v));
    return v;
}
using Table = F[16 / kLanes];
inline U larger(U a, U b) { return a > b ? a : b; }
inline U smaller(U a, U b) { return a < b ? a : b; }

// -- element types
// -----------------------------------------------------------------------------------------------------

// round() keeps what does not fit from a result; put() and put_pair() store what fits. NaN has no bits that do not fit.
// read_quad() reads four vectors of elements, each two of them zipped (in the order of zip_low and zip_high), or in
// order.
constexpr int kQuad = 4 * kLanes;

struct Float32 {
    using Element = uint32_t;
    static constexpr bool kZipped = false;
    LOWBIT_INLINE static void read_quad(const Element* p, U (&v)[4]) {
        for (int k = 0; k < 4; ++k) v[k] = read(p + k * kLanes);
    }
    static U read(const Element* p) { return load<U>(p); }
    static U round(U bits) { return bits; }
    static void put(Element* p, U bits) { store(p, bits); }
    static void put_pair(Element* p, U first, U second) { store(p, first), store(p + kLanes, second); }
};
struct BFloat16 {
    using Element = uint16_t;
    static constexpr bool kZipped = true;
    LOWBIT_INLINE static void read_quad(const Element* p, U (&v)[4]) {
        for (int k = 0; k < 4; k += 2) {
            const U words = load<U>(p + k * kLanes);
            v[k] = zip_low(U{}, words), v[k + 1] = zip_high(U{}, words);
        }
    }
    static U read(const Element* p) { return widen(load<H>(p)) << 16; }
    static U widened(U words) { return words << 16; }
    static U round(U bits) { return bits + 0x7fffu + ((bits >> 16) & 1u); }
    static void put(Element* p, U bits) { store(p, narrow_words(bits >> 16)); }
    static void put_pair(Element* p, U first, U second) { store(p, join_words(first >> 16, second >> 16)); }
};
struct Float16 {
    using Element = uint16_t;
    static constexpr bool kZipped = false;
    LOWBIT_INLINE static void read_quad(const Element* p, U (&v)[4]) {
        for (int k = 0; k < 4; ++k) v[k] = read(p + k * kLanes);
    }
    static U read(const Element* p) { return (U)widen_half(load<H>(p)); }
    static U widened(U words) { return (U)widen_half(narrow_words(words)); }
    static U round(U bits) { return bits; }
    static void put(Element* p, U bits) { store(p, narrow_half((F)bits)); }
    static void put_pair(Element* p, U first, U second) { put(p, first), put(p + kLanes, second); }
};

template <class Function>
inline auto dispatch(Dtype dtype, Function function) {
    switch (dtype) {
        case Dtype::kFloat32:
            return function(Float32{});
        case Dtype::kBFloat16:
            return function(BFloat16{});
        default:
            return function(Float16{});
    }
}

// -- factors
// -----------------------------------------------------------------------------------------------------------

// One factor and zero point, or those of each lane.
struct Factor {
    F by, zero;
};

// Calls step(i, factor) for every kLanes elements of [0, n), then rest(i, factors) for fewer, whose factors begin
// there.
template <Factors::Mode mode, class Step, class Rest>
LOWBIT_INLINE inline void for_lanes(const Factors& f, int64_t n, const Step& step, const Rest& rest) {
    if (mode == Factors::kNone || mode == Factors::kEach) {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            if (mode == Factors::kNone) {
                step(i, Factor{});
            } else {
                step(i, Factor{load<F>(f.each + i), f.zeros ? load<F>(f.zeros + i) : F{}});
            }
        }
        if (i == n) return;
        Factors at = f;
        if (at.each) at.each += i;
        if (at.zeros) at.zeros += i;
        return rest(i, at);
    }
    int64_t i = 0, end = f.lead < n ? f.lead : n;
    for (int64_t b = 0; i < n; ++b, end = end + f.width < n ? end + f.width : n) {
        const Factor factor{splat(f.each[b]), splat(f.zeros ? f.zeros[b] : 0.0f)};
        for (; i + kLanes <= end; i += kLanes) step(i, factor);
        if (i == end) continue;
        return rest(i, Factors{mode, f.each + b, f.zeros ? f.zeros + b : nullptr, kLanes, kLanes});
    }
}

// For vector k of a quad, of blocks of less than a quad. A zipped vector has elements of two vectors' worth: of two
// blocks where one fills but half of it.
template <bool zipped, int width>
LOWBIT_INLINE inline F factor_of(const float* each, int k) {
    const int first = zipped ? k / 2 * 2 : k;
    const F by = splat(each[first * kLanes / width]);
    if (!zipped || width >= 2 * kLanes) return by;
    const F other = splat(each[(first + 1) * kLanes / width]);
    I upper;
    for (int j = 0; j < kLanes; ++j) upper[j] = j < kLanes / 2 ? 0 : -1;
    return upper ? other : by;
}

// Calls quad(i, four factors) for whole quads of whole blocks of `width`, of which a quad has several; advances `left`
// to the rest.
template <bool zipped, int width, class Quad>
LOWBIT_INLINE inline int64_t quads_of_blocks(Factors& left, int64_t n, const Quad& quad) {
    constexpr int kBlocks = kQuad / width;
    int64_t i = 0;
    if constexpr (kBlocks > 1) {
        for (; i + kQuad <= n; i += kQuad, left.each += kBlocks) {
            Factor four[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                four[k].by = factor_of<zipped, width>(left.each, k);
                four[k].zero = left.zeros ? factor_of<zipped, width>(left.zeros, k) : F{};
            }
            if (left.zeros) left.zeros += kBlocks;
            quad(i, four);
        }
    }
    return i;
}

// The same, with quad(i, four factors) for every kQuad elements of one block or of whole ones.
template <Factors::Mode mode, bool zipped, class Quad, class Step, class Rest>
LOWBIT_INLINE inline void for_quads(const Factors& f, int64_t n, const Quad& quad, const Step& step, const Rest& rest) {
    if (mode == Factors::kEach) return for_lanes<mode>(f, n, step, rest);
    int64_t i = 0;
    Factors left = f;
    if (mode != Factors::kNone && f.lead == f.width && f.width == 16) {
        i = quads_of_blocks<zipped, 16>(left, n, quad);
    } else if (mode != Factors::kNone && f.lead == f.width && f.width == 32) {
        i = quads_of_blocks<zipped, 32>(left, n, quad);
    }
    // A whole number of quads a block, or one block.
    while (i + kQuad <= n && (mode == Factors::kNone || left.lead % kQuad == 0 || left.lead >= n - i)) {
        const Factor by =
            mode == Factors::kNone ? Factor{} : Factor{splat(*left.each), splat(left.zeros ? *left.zeros : 0.0f)};
        const Factor four[4] = {by, by, by, by};
        const int64_t end = mode == Factors::kNone || left.lead >= n - i ? n : i + left.lead;
        for (; i + kQuad <= end; i += kQuad) quad(i, four);
        if (end == n) {
            left.lead = n - i;
            break;
        }
        ++left.each;
        if (left.zeros) ++left.zeros;
        left.lead = left.width;
    }
    if (i == n) return;
    for_lanes<mode>(
        left, n - i, [&](int64_t j, const Factor& factor) LOWBIT_INLINE { step(i + j, factor); },
        [&](int64_t j, const Factors& factors) { rest(i + j, factors); });
}

// Fewer than kLanes elements, in arrays that hold as many.
template <class Element>
struct Padded {
    Element x[kLanes] = {};
    uint16_t noise[kLanes] = {};
    float each[kLanes] = {}, zeros[kLanes] = {};
    Factors factors;
    Padded(const Element* from, int64_t n, const Factors& f, const uint16_t* random) : factors(f) {
        __builtin_memcpy(x, from, static_cast<size_t>(n) * sizeof *x);
        if (random) __builtin_memcpy(noise, random, static_cast<size_t>(n) * sizeof *noise);
        if (f.mode != Factors::kEach) return;
        __builtin_memcpy(each, f.each, static_cast<size_t>(n) * sizeof *each);
        factors.each = each;
        if (!f.zeros) return;
        __builtin_memcpy(zeros, f.zeros, static_cast<size_t>(n) * sizeof *zeros);
        factors.zeros = zeros;
    }
};

// x / factor: its magnitude (a NaN with any sign bit), its sign in the top bit, the others being anything; or both at
// once (NaN's sign is lost).
struct Quotient {
    U magnitude, sign;
    F value;
    U bits() const { return (magnitude & kMagnitude) | (sign & kSign); }
};
struct Divide {
    const U magnitude = held(kMagnitude);
    template <Factors::Mode mode, bool finite = false>
    LOWBIT_INLINE Quotient by(U x, const Factor& factor) const {
        const U a = x & magnitude, d = (U)factor.by;
        if (mode == Factors::kNone) return {a, x, (F)x};
        if (mode == Factors::kInverse) return {(U)((F)a * factor.by), x, (F)x * factor.by};
        if (finite) return {(U)((F)a / factor.by), x, (F)x / factor.by};
        return {(U)((F)a / (F)(d & magnitude)), x ^ d, (F)x / factor.by};
    }
};

#include "cpu/lines_decode.inl"
#include "cpu/lines_encode.inl"
#include "cpu/lines_scales.inl"
#include "cpu/lines_stats.inl"

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
        W order;
        for (int j = 0; j < kCounters; ++j) order[j] = static_cast<uint64_t>(j / 2 + j % 2 * kCounters);
        store(out + 8 * k * kCounters, __builtin_shuffle(first, second, order));
        store(out + 8 * k * kCounters + 4 * kCounters, __builtin_shuffle(first, second, order + kCounters / 2));
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

// -- AdamW (section 11)
// ------------------------------------------------------------------------------------------------

template <class Type, class Grad>
void adamw_line(const AdamWFactors& f, const typename Type::Element* param, const typename Grad::Element* grad,
                int64_t n, float* avg, float* rms, typename Type::Element* out) {
    const F decay = splat(f.decay), mix = splat(f.mix), keep = splat(f.keep), mix_square = splat(f.mix_square),
            correction = splat(f.correction), eps = splat(f.eps), rate = splat(f.rate);
    const auto step = [&](const auto* p, const auto* g, float* m, float* r, auto* to) LOWBIT_INLINE {
        const F x = (F)Grad::read(g), before = load<F>(m), root_before = load<F>(r);
        const F mean = before + (x - before) * mix;
        const F scale = root((root_before * root_before) * keep + (x * x) * mix_square);
        const F next = (F)Type::read(p) * decay - mean / (scale * correction + eps) * rate;
        store(m, mean);
        store(r, scale);
        Type::put(to, Type::round((U)(next == next ? next : (F)splat(kNan))));
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) step(param + i, grad + i, avg + i, rms + i, out + i);
    if (i == n) return;
    const size_t rest = static_cast<size_t>(n - i);
    typename Type::Element p[kLanes] = {};
    typename Grad::Element g[kLanes] = {};
    float m[kLanes] = {}, r[kLanes] = {};
    __builtin_memcpy(p, param + i, rest * sizeof *p);
    __builtin_memcpy(g, grad + i, rest * sizeof *g);
    __builtin_memcpy(m, avg + i, rest * sizeof *m);
    __builtin_memcpy(r, rms + i, rest * sizeof *r);
    step(p, g, m, r, p);
    __builtin_memcpy(avg + i, m, rest * sizeof *m);
    __builtin_memcpy(rms + i, r, rest * sizeof *r);
    __builtin_memcpy(out + i, p, rest * sizeof *p);
}

void adamw(const AdamWFactors& factors, const void* param, Dtype dtype, const void* grad, Dtype grad_dtype, int64_t n,
           float* avg, float* rms, void* new_param) {
    dispatch(dtype, [&](auto type) {
        dispatch(grad_dtype, [&](auto grad_type) {
            using Type = decltype(type);
            using Grad = decltype(grad_type);
            adamw_line<Type, Grad>(factors, static_cast<const typename Type::Element*>(param),
                                   static_cast<const typename Grad::Element*>(grad), n, avg, rms,
                                   static_cast<typename Type::Element*>(new_param));
        });
    });
}

// -- packing (section 8)
// -----------------------------------------------------------------------------------------------

void pack(const uint8_t* codes, int64_t groups, int bits, uint8_t* out) {
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1u);
    int64_t g = 0;
    if (bits == 4) {
        for (; g + kLanes / 2 <= groups; g += kLanes / 2) {
            const U nibbles = load<U>(codes + 8 * g) & 0x0f0f0f0fu, bytes = nibbles | nibbles >> 4;
            store(out + 4 * g, narrow_words((bytes & 0xffu) | ((bytes >> 8) & 0xff00u)));
        }
    }
    for (; bits == 6 && g + kLanes / 2 <= groups; g += kLanes / 2) {
        const U bytes = load<U>(codes + 8 * g), words = (bytes & 0x003f003fu) | ((bytes >> 2) & 0x0fc00fc0u);
        store_threes(out + 6 * g, (words & 0xfffu) | ((words >> 4) & 0xfff000u));
    }
    for (; g * bits + 8 <= groups * bits; ++g) store(out + g * bits, pack_group(load<uint64_t>(codes + 8 * g), mask));
    lines_scalar().pack(codes + 8 * g, groups - g, bits, out + g * bits);
}

void unpack(const uint8_t* packed, int64_t groups, int bits, uint8_t* codes) {
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1u);
    int64_t g = 0;
    if (bits == 4) {
        for (; g + kLanes / 2 <= groups; g += kLanes / 2) {
            const U words = widen(load<H>(packed + 4 * g)), bytes = (words | words << 8) & 0x00ff00ffu;
            store(codes + 8 * g, (bytes | bytes << 4) & 0x0f0f0f0fu);
        }
    }
    for (; bits == 6 && g + kLanes / 2 <= groups; g += kLanes / 2) {
        const U threes = load_threes(packed + 6 * g), words = (threes & 0xfffu) | ((threes << 4) & 0x0fff0000u);
        store(codes + 8 * g, (words & 0x003f003fu) | ((words << 2) & 0x3f003f00u));
    }
    for (; g * bits + 8 <= groups * bits; ++g)
        store(codes + 8 * g, unpack_group(load<uint64_t>(packed + g * bits), mask));
    lines_scalar().unpack(packed + g * bits, groups - g, bits, codes + 8 * g);
}

constexpr Lines kTable{encode,      in_range,    quotients, decode, block_stats, column_stats, finite_amax,
                       make_scales, read_scales, noise,     adamw,  pack,        unpack};
