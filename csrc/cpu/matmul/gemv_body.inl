// Dot products of a's rows with rows of codes, on vectors of kWidth dwords; see gemv.h. Included after gemm_body.inl,
// in an unnamed namespace, by files that have defined `permute(v, lanes)` (v's lanes by number) and kTile, how many
// rows of a are multiplied at a time.
//
// A unit D has kElements, kVectors and kBytes of a step, `Raw fetch(from)`, `at(raw, vector)`, which decodes, and the
// arithmetic: kInput, Acc, dot(acc, code, a), first(code, a).

constexpr int kVectorBytes = 4 * kWidth;

struct ByF32 {
    using Acc = VecF;
    static constexpr GemvInput kInput = GemvInput::f32;
    static constexpr bool kLooksUp = false, kFp16 = false, kNans = false, kSigned = false;
    static VecF dot(VecF acc, VecF code, VecI a) { return fused((VecF)a, code, acc); }
    static VecF first(VecF code, VecI a) { return (VecF)a * code; }
};

// 8-bit integers, as signed ones: of unsigned codes 128 is off, which zero points make up for.
struct Bytes : ByF32 {
    static constexpr bool kSigned = true;
    static constexpr int kElements = 4 * kWidth, kVectors = 4, kBytes = kVectorBytes;
    using Raw = VecI;
    VecI flip;
    explicit Bytes(const Table* t) : flip(broadcast(t->is_signed ? 0 : 0x80808080u)) {}
    Raw fetch(const uint8_t* from) const { return load<VecI>(from) ^ flip; }
    VecF at(Raw raw, int vector) const { return to_float((raw << (24 - 8 * vector)) >> 24); }
};

// Integers as words, where there is no product of bytes; `Dot` adds the products of pairs of words to dwords.
template <class Dot, int kBits>
struct Words {
    using Acc = VecI;
    typedef uint16_t Raw __attribute__((vector_size(kVectorBytes)));
    static constexpr GemvInput kInput = GemvInput::s16;
    static constexpr bool kLooksUp = false, kNans = false;
    static constexpr int kVectors = 16 / kBits, kBytes = kVectorBytes, kElements = kBytes * 8 / kBits;
    Raw flip;
    explicit Words(const Table* t) : flip(t->is_signed ? Raw{} + kSigns : Raw{}) {}
    static VecI dot(VecI acc, VecI code, VecI a) { return Dot::dot(acc, code, a); }
    static VecI first(VecI code, VecI a) { return dot(VecI{}, code, a); }
    Raw fetch(const uint8_t* from) const { return load<Raw>(from) ^ flip; }
    VecI at(Raw raw, int vector) const { return (VecI)(raw >> static_cast<uint16_t>(kBits * vector) & kMask); }

  private:
    static constexpr uint16_t kMask = (1 << kBits) - 1, kSigns = 0xffff / kMask << (kBits - 1);
};

// Sums of a tile's rows with one row of b; two or four of each where that hides the latency of additions.
template <class D, int kRows, bool kOnce>
struct GemvSums {
    static constexpr int kChains = D::kVectors == 1 || kRows > 4 ? 1 : kRows == 1 && D::kVectors == 8 && !kOnce ? 4 : 2;
    typename D::Acc acc[kRows][kChains];

    void clear() {
        for (auto& row : acc) {
            for (auto& x : row) x = typename D::Acc{};
        }
    }
    // A step's codes. kOnce: there is no other, and sums need not have been cleared.
    template <class F>
    __attribute__((always_inline)) void add(const F& code, const uint8_t* a) {
#pragma GCC unroll 8
        for (int v = 0; v < D::kVectors; ++v) {
            const auto x = code(v);
#pragma GCC unroll 8
            for (int m = 0; m < kRows; ++m) {
                auto& sum = acc[m][v % kChains];
                const VecI y = load<VecI>(a + (v * kRows + m) * kVectorBytes);
                sum = kOnce && v < kChains ? D::first(x, y) : D::dot(sum, x, y);
            }
        }
    }
    __attribute__((always_inline)) typename D::Acc total(int m) const {
        if constexpr (kChains == 4) return (acc[m][0] + acc[m][1]) + (acc[m][2] + acc[m][3]);
        return kChains == 1 ? acc[m][0] : acc[m][0] + acc[m][kChains - 1];
    }
};

// Floats with or without zero points; integers in one block or in blocks of their own scales. Units that look codes up
// multiply the scale into their table, unless lanes differ in it.
template <class D, GemvBlocks kBlocks, bool kMore, int kRows>
void gemv_dots(const Gemv& t) {
    using Acc = typename D::Acc;
    constexpr bool kIntegers = __is_same(Acc, VecI), kTotals = kIntegers && kMore, kZeros = kMore && !kIntegers,
                   kLanes = kBlocks == GemvBlocks::lanes, kLookups = D::kLooksUp && !kLanes,
                   kOnce = kBlocks != GemvBlocks::steps && !kLookups;
    constexpr int64_t kStepA = D::kVectors * kRows * kVectorBytes;
    const D unit(t.table);
    const int64_t per_step = t.per_step, block_bytes = t.block_steps * D::kBytes;
    const VecI lanes = load<VecI>(t.lanes);
    auto* sums = static_cast<uint8_t*>(t.sums);
    for (int64_t n = 0; n < t.count; ++n, sums += t.sums_pitch) {
        const uint8_t *a = t.a, *b = t.b + n * t.pitch, *const end = b + t.steps * D::kBytes;
        const int64_t ahead = t.ahead + n * t.ahead_pitch - b;
        const float* scales = t.scales[n] + t.block;
        const int32_t* zeros = kZeros ? t.zeros[n] + t.block : nullptr;
        uint8_t* totals = sums;
        Acc sum[kTotals ? 1 : kRows];
#pragma GCC unroll 8
        for (int m = 0; m < kRows && !kTotals; ++m) sum[m] = load<Acc>(sums + m * kVectorBytes);
        GemvSums<D, kRows, kOnce> part;
        if constexpr (!kOnce) part.clear();
        VecI seen{}, zero{};
        VecF table{};
        auto step = [&]() __attribute__((always_inline)) {
            const typename D::Raw raw = unit.fetch(b);
            __builtin_prefetch(b + ahead, 0, 2);
            b += D::kBytes;
            if constexpr (D::kNans) seen = unit.highest(seen, raw);
            auto code = [&](int v) __attribute__((always_inline)) {
                if constexpr (kLookups) {
                    return D::look_up(raw, v, table);
                } else {
                    auto x = unit.at(raw, v);
                    if constexpr (kZeros) x -= to_float(zero);
                    return x;
                }
            };
            part.add(code, a);
            a += kStepA;
        };
        auto fold = [&](VecF scale) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int m = 0; m < kRows; ++m) {
                if constexpr (kTotals) {
                    store(totals + m * t.totals_pitch, part.total(m));
                } else if constexpr (kIntegers) {
                    sum[m] += part.total(m);
                } else {
                    sum[m] = fused(to_float(part.total(m)), scale, sum[m]);
                }
            }
            totals += kVectorBytes;
        };
        auto of_block = [&](const auto* numbers) __attribute__((always_inline)) {
            return kLanes ? permute(load<VecI>(numbers), lanes) : broadcast(load<uint32_t>(numbers));
        };
        while (b != end) {
            if constexpr (kZeros) zero = of_block(zeros);
            if constexpr (kLookups)
                table = (kZeros ? unit.table - to_float(zero) : unit.table) * (VecF)of_block(scales);
            if constexpr (kBlocks == GemvBlocks::steps) {
                const uint8_t* const last = end - b < block_bytes ? end : b + block_bytes;
                while (b != last) step();
            } else {
                step();
            }
            if constexpr (!kLookups) fold(kIntegers ? VecF{} : (VecF)of_block(scales));
            if constexpr (!kLookups && !kOnce) part.clear();
            scales += per_step;
            if constexpr (kZeros) zeros += per_step;
        }
        if constexpr (kLookups) fold(broadcast(1.0f));
        if constexpr (D::kNans) t.nans[n] |= unit.holds_nan(seen);
#pragma GCC unroll 8
        for (int m = 0; m < kRows && !kTotals; ++m) store(sums + m * kVectorBytes, sum[m]);
    }
}

// Elements 0, 2, 4... of a and b, or with `from` 1 the others.
template <class T, int... i>
inline T every_second(T a, T b, int from, std::integer_sequence<int, i...>) {
    const T even = {(2 * i)...}, odd = {(2 * i + 1)...};
    return __builtin_shuffle(a, b, from == 0 ? even : odd);
}

// Lane i of vector v becomes element kVectors * i + v: even and odd ones apart, log2(kVectors) times. The elements
// congruent to r modulo `parted` are in vectors r, r + parted, ...
template <class T, int kVectors>
inline void arrange_as(const void* from, int64_t steps, int64_t step_pitch, int64_t pitch, uint8_t* out) {
    typedef T Vec __attribute__((vector_size(kVectorBytes)));
    constexpr int kSlots = kVectorBytes / static_cast<int>(sizeof(T));
    constexpr auto kLanes = std::make_integer_sequence<int, kSlots>();
    const T* x = static_cast<const T*>(from);
    for (int64_t s = 0; s < steps; ++s, x += kSlots * kVectors, out += step_pitch) {
        Vec v[kVectors];
        for (int i = 0; i < kVectors; ++i) v[i] = load<Vec>(x + i * kSlots);
#pragma GCC unroll 3
        for (int parted = 1; parted < kVectors; parted *= 2) {
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
                if ((i & parted) != 0) continue;
                const Vec a = v[i], b = v[i + parted];
                v[i] = every_second(a, b, 0, kLanes);
                v[i + parted] = every_second(a, b, 1, kLanes);
            }
        }
        for (int i = 0; i < kVectors; ++i) store(out + i * pitch, v[i]);
    }
}

template <class D>
void arrange(const void* x, int64_t steps, int64_t step_pitch, int64_t pitch, uint8_t* out) {
    constexpr int kSize = kVectorBytes * D::kVectors / D::kElements;
    using T = std::conditional_t<kSize == 4, uint32_t, std::conditional_t<kSize == 2, uint16_t, uint8_t>>;
    arrange_as<T, D::kVectors>(x, steps, step_pitch, pitch, out);
}

template <class D, GemvBlocks kBlocks, bool kMore, int... i>
constexpr void add_dots(GemvUnit& u, std::integer_sequence<int, i...>) {
    ((u.dots[static_cast<int>(kBlocks)][kMore][i] = gemv_dots<D, kBlocks, kMore, i + 1>), ...);
}

template <class D, bool kMore>
constexpr void add_all_dots(GemvUnit& u) {
    constexpr std::make_integer_sequence<int, kTile> rows;
    add_dots<D, GemvBlocks::steps, kMore>(u, rows);
    add_dots<D, GemvBlocks::step, kMore>(u, rows);
    add_dots<D, GemvBlocks::lanes, kMore>(u, rows);
}

// Without kernels.
template <class D>
constexpr GemvUnit bare_unit() {
    GemvUnit u;
    u.elements = D::kElements;
    u.bytes = D::kBytes;
    u.vectors = D::kVectors;
    u.input = D::kInput;
    if constexpr (D::kInput == GemvInput::f32) {
        u.fp16 = D::kFp16;
        u.as_signed = D::kSigned;
    }
    u.arrange = arrange<D>;
    return u;
}

template <class D, bool kMore = true>
constexpr GemvUnit gemv_unit() {
    GemvUnit u = bare_unit<D>();
    add_all_dots<D, false>(u);
    if constexpr (kMore) add_all_dots<D, true>(u);
    return u;
}

// Of the lanes of both, those without the bit `apart` in their number, or those with it.
template <int apart, class V, int... i>
inline V lanes_by(V a, V b, int with, std::integer_sequence<int, i...>) {
    const VecI lanes = {(i / apart * 2 * apart + i % apart)...};
    return __builtin_shuffle(a, b, lanes + with);
}

// The sums over lanes of so many vectors, those of one kWidth / count times, halves first.
template <int count>
inline VecF sums_of(const float* vectors) {
    if constexpr (count == 1) {
        return load<VecF>(vectors);
    } else {
        constexpr int kApart = kWidth / count;
        constexpr auto kLanes = std::make_integer_sequence<int, kWidth>();
        const VecF a = sums_of<count / 2>(vectors), b = sums_of<count / 2>(vectors + count / 2 * kWidth);
        return lanes_by<kApart>(a, b, 0, kLanes) + lanes_by<kApart>(a, b, kApart, kLanes);
    }
}

// Of every four lanes of both, the first or last `each` of two of a and as many of b, in turns: what processors
// interleave.
template <int each, class V, int... i>
inline V unpack_lanes(V a, V b, int with, std::integer_sequence<int, i...>) {
    const VecI lanes = {(i / 4 * 4 + i % 4 / (2 * each) * each + i % each + i / each % 2 * kWidth)...};
    return __builtin_shuffle(a, b, lanes + with);
}

// kWidth vectors, in each of whose every kLanes lanes one number is to be summed; number i becomes v[i], whose lanes
// are the vectors. With kLanes 1 that is a transposition. Each stage pairs vectors, and halves them where it sums.
template <int kLanes, class V>
inline void sum_lanes(V (&v)[kWidth]) {
    constexpr auto kAll = std::make_integer_sequence<int, kWidth>();
    int sets = 1, size = kWidth;
    // `minor`: the numbers that a stage parts stand after each other, else those parted before do.
    auto stage = [&](bool sum, bool minor, auto low, auto high) __attribute__((always_inline)) {
        V w[kWidth];
        size /= 2;
#pragma GCC unroll 16
        for (int i = 0; i < sets * size; ++i) {
            const int set = i / size;
            const V a = low(v[2 * i], v[2 * i + 1]), b = high(v[2 * i], v[2 * i + 1]);
            if (sum) {
                w[i] = a + b;
            } else {
                w[(minor ? 2 * set : set) * size + i % size] = a;
                w[(minor ? 2 * set + 1 : sets + set) * size + i % size] = b;
            }
        }
        if (!sum) sets *= 2;
#pragma GCC unroll 16
        for (int i = 0; i < sets * size; ++i) v[i] = w[i];
    };
    stage(
        kLanes >= 4, true, [&](V a, V b) { return unpack_lanes<1>(a, b, 0, kAll); },
        [&](V a, V b) { return unpack_lanes<1>(a, b, 2, kAll); });
    stage(
        kLanes >= 2, true, [&](V a, V b) { return unpack_lanes<2>(a, b, 0, kAll); },
        [&](V a, V b) { return unpack_lanes<2>(a, b, 2, kAll); });
#pragma GCC unroll 2
    for (int lanes = 8; lanes <= kWidth; lanes *= 2) {
        stage(
            kLanes >= lanes, false, [&](V a, V b) { return lanes_by<4>(a, b, 0, kAll); },
            [&](V a, V b) { return lanes_by<4>(a, b, 4, kAll); });
    }
}

// Numbers of the blocks of some rows of b, those of a block side by side.
template <class V, class T>
inline void transpose_rows(const GemvBlockSums& t, const T* const* rows, int64_t padded, T* out) {
    for (int64_t block = 0; block < padded; block += kWidth) {
        V v[kWidth];
        for (int64_t i = 0; i < kWidth; ++i) {
            v[i] = load<V>(rows[i < t.count ? i : t.count - 1] + t.begin + block);
        }
        sum_lanes<1>(v);
        for (int64_t i = 0; i < kWidth; ++i) store(out + (block + i) * kWidth, v[i]);
    }
}

// Lanes are rows of b.
template <int parts>
void sum_blocks_of(const GemvBlockSums& t) {
    const int64_t blocks = t.end - t.begin, next = t.rows * t.vectors * kWidth;
    const int64_t padded = (blocks + kWidth - 1) / kWidth * kWidth;
    auto* zeros = reinterpret_cast<int32_t*>(t.scales + padded * kWidth);
    transpose_rows<VecF>(t, t.b_scales, padded, t.scales);
    transpose_rows<VecI>(t, t.zeros, padded, zeros);
    int64_t rows[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) rows[i] = (i < t.count ? i : t.count - 1) * next;
    for (int64_t m = 0; m < t.rows; ++m) {
        const int32_t* from = t.totals + m * t.vectors * kWidth;
        const float* a_scales = t.a_scales[m] + t.begin;
        const int32_t* a_sums = t.a_sums[m] + t.begin;
        VecF sum = t.begin == 0 ? VecF{} : load<VecF>(t.out + m * t.pitch);
        for (int64_t block = 0; block < blocks; from += kWidth) {
            VecI totals[kWidth];
#pragma GCC unroll 16
            for (int64_t i = 0; i < kWidth; ++i) totals[i] = load<VecI>(from + rows[i]);
            sum_lanes<kWidth / parts>(totals);
            for (int64_t i = 0; i < parts && block < blocks; ++i, ++block) {
                const VecF scale = broadcast(a_scales[block]) * load<VecF>(t.scales + block * kWidth);
                const VecI less = broadcast(static_cast<uint32_t>(a_sums[block])) * load<VecI>(zeros + block * kWidth);
                sum += to_float(totals[i] - less) * scale;
            }
        }
        store(t.out + m * t.pitch, sum);
    }
}

template <int parts>
void sum_blocks_by(const GemvBlockSums& t) {
    if (t.per_step == parts) return sum_blocks_of<parts>(t);
    if constexpr (2 * parts <= kWidth) sum_blocks_by<2 * parts>(t);
}

inline void sum_blocks(const GemvBlockSums& t) { sum_blocks_by<1>(t); }

inline void sum_floats(const float* vectors, int64_t count, float* sums) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(sums + i, sums_of<kWidth>(vectors + i * kWidth));
    if (i == count) return;
    float rest[kWidth * kWidth] = {}, last[kWidth];
    std::memcpy(rest, vectors + i * kWidth, static_cast<size_t>((count - i) * kWidth) * sizeof(float));
    store(last, sums_of<kWidth>(rest));
    std::memcpy(sums + i, last, static_cast<size_t>(count - i) * sizeof(float));
}

inline void sum_integers(const int32_t* vectors, int64_t count, int64_t* sums) {
    for (int64_t i = 0; i < count; ++i, vectors += kWidth) {
        int64_t sum = 0;
        for (int l = 0; l < kWidth; ++l) sum += vectors[l];
        sums[i] = sum;
    }
}

// Contiguous scales of one byte: E8M0, or E4M3, of which those without an exponent are min(w, 2 w - 2^-6).
inline void byte_scales(const uint8_t* codes, bool e8m0, int64_t count, float* out) {
    if (e8m0) {
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t code = codes[i], bits = code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : code << 23;
            out[i] = load<float>(&bits);
        }
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t code = codes[i], field = ((code & 0x7f) << 20) + (120u << 23);
        const float w = load<float>(&field), small = (w + w) - 0x1p-6f, value = small < w ? small : w;
        uint32_t bits = (code & 0x7f) == 0x7f ? 0x7fc00000 : load<uint32_t>(&value);
        bits |= (code & 0x80) << 24;
        out[i] = load<float>(&bits);
    }
}

constexpr GemvKernels gemv_kernels() {
    GemvKernels k;
    k.width = kWidth;
    k.tile = kTile;
    k.sum_floats = sum_floats;
    k.sum_integers = sum_integers;
    k.sum_blocks = sum_blocks;
    k.byte_scales = byte_scales;
    return k;
}
