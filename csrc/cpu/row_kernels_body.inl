// Row kernels in vectors of kLanes 32-bit lanes; included by row_kernels_<isa>.cpp inside its own namespace, after
//   LOWBIT_REGISTER, kLanes, kRegisters (of vectors, that there are), and the types F, U, I (float, uint32_t, int32_t),
//   H, B (uint16_t, uint8_t), all of kLanes lanes, W (uint64_t, kLanes / 2 lanes); F widen_half(H), H narrow_half(F);
//   int32_t largest(I); I evens(I, I) and odds(I, I) of the lanes of two vectors; F root(F); F fused(a, b, c), which is
//   a * b + c rounded once; W multiply(W, W) of the low 32 bits of each lane; F lookup(Table, U index) in 16 entries,
//   of whose index the low four bits count; U gather(words, U index); gather_pairs(uint64_t words, U index, U
//   (&pairs)[2]), in order; pack_group(), unpack_group() of eight codes; I rounded(F) to nearest even; F larger(F, F),
//   smaller(F, F), the second where the first is NaN, or NaN; U zip_low(U, U), zip_high(U, U) of 16-bit words, in each
//   16 bytes; U join_bytes(U, U, U, U, zipped) of lanes below 256, in order, or in that in which zip_low(v, 0) and
//   zip_high(v, 0) leave the words of v; U join_words(U, U) of lanes below 65536; U widen_words(p) of bytes,
//   widen_signed(p) with signs; bool any_byte_above(U, U), in any place; F one_nan(F) replaces every NaN by kNan;
//   store_threes(p, U) and U load_threes(p) of the low three bytes of each lane; F first_halves(U), second_halves(U) of
//   words that are fp16.
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
inline U patterns_of(F v) { return (U)v; }
inline F numbers_of(U bits) { return (F)bits; }
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

#include "cpu/quantize/factors.inl"
// The rest is in terms of those.
#include "cpu/codec/decode.inl"
#include "cpu/codec/encode.inl"
#include "cpu/quantize/gradient.inl"
#include "cpu/quantize/scales.inl"
#include "cpu/quantize/stats.inl"
// And these in terms of them.
#include "cpu/fused/fused.inl"
#include "cpu/optim/step.inl"
#include "cpu/optim/sums.inl"
#include "cpu/optim/weights.inl"

// -- noise (section 7)
// -------------------------------------------------------------------------------------------------

// Several vectors of counters at once hide the multiplications' latency, as many as registers hold. A counter's words
// lie in the low halves of 64-bit lanes; what the products leave in the high halves is ignored by multiply() and cut
// off at the end.
constexpr int kChains = kRegisters < 32 ? 3 : 4, kCounters = kLanes / 2;

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

// -- packing (section 8)
// -----------------------------------------------------------------------------------------------

void pack(const uint8_t* codes, int64_t groups, int bits, uint8_t* out) {
    const uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1u);
    int64_t g = 0;
    if (bits == 4) {
        for (; g + kLanes / 2 <= groups; g += kLanes / 2) {
            const U codes4 = load<U>(codes + 8 * g) & 0x0f0f0f0fu, bytes = codes4 | codes4 >> 4;
            store(out + 4 * g, narrow_words((bytes & 0xffu) | ((bytes >> 8) & 0xff00u)));
        }
    }
    for (; bits == 6 && g + kLanes / 2 <= groups; g += kLanes / 2) {
        const U bytes = load<U>(codes + 8 * g), words = (bytes & 0x003f003fu) | ((bytes >> 2) & 0x0fc00fc0u);
        store_threes(out + 6 * g, (words & 0xfffu) | ((words >> 4) & 0xfff000u));
    }
    for (; g * bits + 8 <= groups * bits; ++g) store(out + g * bits, pack_group(load<uint64_t>(codes + 8 * g), mask));
    row_kernels_scalar().pack(codes + 8 * g, groups - g, bits, out + g * bits);
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
    row_kernels_scalar().unpack(packed + g * bits, groups - g, bits, codes + 8 * g);
}

constexpr RowKernels kTable{encode,       in_range,       quotients,   slopes,       decode,  block_stats,
                            column_stats, finite_amax,    make_scales, read_scales,  product, noise,
                            step,         widen,          narrow,      join24,       split24, square_sum,
                            add_squares,  sum_terms,      add_terms,   add_products, norm,    norm_gradient,
                            gated,        gated_gradient, rotate,      pack,         unpack};
