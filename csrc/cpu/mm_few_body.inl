// Dot products of a's rows with rows of codes, on vectors of kWidth dwords; see mm_few.h. Included after mm_body.inl,
// in an unnamed namespace, by files that have defined `permute(v, lanes)` (v's lanes by number) and kCols, how many
// rows of b are multiplied at a time.
//
// A unit D has kElements, kVectors and kBytes of a step, `Raw fetch(from)`, `at(raw, vector)`, which decodes, and the
// arithmetic: kInput, Acc, dot(acc, code, a).

constexpr int kVectorBytes = 4 * kWidth;

struct ByF32 {
    using Acc = VecF;
    static constexpr FewInput kInput = FewInput::f32;
    static constexpr bool kLooksUp = false, kHalves = false, kSigned = false;
    static VecF dot(VecF acc, VecF code, VecI a) { return fused((VecF)a, code, acc); }
    static VecF times(VecF acc, VecI a, const uint32_t* code) { return fused_dword((VecF)a, code, acc); }
    static VecF times(VecF acc, VecI a, VecI code) { return dot(acc, (VecF)code, a); }
};

// Integers as words, where there is no product of bytes; `Dot` adds the products of pairs of words to dwords.
template <class Dot, int kBits>
struct Words {
    using Acc = VecI;
    typedef uint16_t Raw __attribute__((vector_size(kVectorBytes)));
    static constexpr FewInput kInput = FewInput::s16;
    static constexpr bool kLooksUp = false;
    static constexpr int kVectors = 16 / kBits, kBytes = kVectorBytes, kElements = kBytes * 8 / kBits;
    Raw flip;
    explicit Words(const Table* t) : flip(t->is_signed ? Raw{} + kSigns : Raw{}) {}
    static VecI dot(VecI acc, VecI code, VecI a) { return Dot::dot(acc, code, a); }
    static VecI correct(VecI acc, VecI zero, VecI a) { return Dot::dot(acc, zero, a); }
    Raw fetch(const uint8_t* from) const { return load<Raw>(from) ^ flip; }
    VecI at(Raw raw, int vector) const { return (VecI)(raw >> static_cast<uint16_t>(kBits * vector) & kMask); }

  private:
    static constexpr uint16_t kMask = (1 << kBits) - 1, kSigns = 0xffff / kMask << (kBits - 1);
};

// The numbers of a step's blocks, for the lanes that belong to each.
template <class Product, class T>
inline VecI spread(const Product& t, const T* blocks) {
    if (t.per_step > 1) return permute(load<VecI>(blocks), load<VecI>(t.lanes));
    return broadcast(load<uint32_t>(blocks));
}

// Floats with or without zero points; integers in one block or in blocks of their own scales.
template <class D, bool kMore, int kRows>
void few_dots(const Few& t) {
    using Acc = typename D::Acc;
    constexpr bool kIntegers = __is_same(Acc, VecI), kScaled = !kIntegers || kMore;
    using Sum = std::conditional_t<kScaled, VecF, VecI>;
    const D unit(t.table);
    const uint8_t* a = t.a;
    auto* sums = static_cast<uint8_t*>(t.sums);
    Sum sum[kRows][kCols];
    for (int m = 0; m < kRows; ++m) {
        for (int n = 0; n < kCols; ++n) sum[m][n] = load<Sum>(sums + (m * kCols + n) * kVectorBytes);
    }
    int64_t at = 0, block = 0;
    for (int64_t left = t.steps; left > 0; block += t.per_step) {
        Acc acc[kRows][kCols];
        VecI zero[kCols];
        for (int n = 0; n < kCols; ++n) {
            if constexpr (kMore) zero[n] = spread(t, t.zeros[n] + block);
            for (int m = 0; m < kRows; ++m) acc[m][n] = Acc{};
        }
        const int64_t here = left < t.block_steps ? left : t.block_steps;
        left -= here;
        for (int64_t s = 0; s < here; ++s, at += D::kBytes) {
            typename D::Raw raw[kCols];
#pragma GCC unroll 4
            for (int n = 0; n < kCols; ++n) {
                raw[n] = unit.fetch(t.b[n] + at);
                __builtin_prefetch(t.b[n] + at + t.ahead);
            }
#pragma GCC unroll 8
            for (int v = 0; v < D::kVectors; ++v, a += kRows * kVectorBytes) {
                decltype(unit.at(raw[0], 0)) code[kCols];
#pragma GCC unroll 4
                for (int n = 0; n < kCols; ++n) {
                    code[n] = unit.at(raw[n], v);
                    if constexpr (kMore && !kIntegers) code[n] -= to_float(zero[n]);
                }
#pragma GCC unroll 4
                for (int m = 0; m < kRows; ++m) {
                    const VecI x = load<VecI>(a + m * kVectorBytes);
#pragma GCC unroll 4
                    for (int n = 0; n < kCols; ++n) acc[m][n] = D::dot(acc[m][n], code[n], x);
                }
            }
            if constexpr (kMore && kIntegers) {
#pragma GCC unroll 4
                for (int m = 0; m < kRows; ++m, a += kVectorBytes) {
#pragma GCC unroll 4
                    for (int n = 0; n < kCols; ++n) acc[m][n] = D::correct(acc[m][n], zero[n], load<VecI>(a));
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < kCols; ++n) {
            VecF scale;
            if constexpr (kScaled) scale = (VecF)spread(t, t.scales[n] + block);
#pragma GCC unroll 4
            for (int m = 0; m < kRows; ++m) {
                if constexpr (kScaled) {
                    sum[m][n] = fused(to_float(acc[m][n]), scale, sum[m][n]);
                } else {
                    sum[m][n] += acc[m][n];
                }
            }
        }
    }
    for (int m = 0; m < kRows; ++m) {
        for (int n = 0; n < kCols; ++n) store(sums + (m * kCols + n) * kVectorBytes, sum[m][n]);
    }
}

// The same for units that look codes up: where a step has one scale, it is multiplied into the table.
template <class D, bool kZeros, int kRows>
void few_lookups(const Few& t) {
    const D unit(t.table);
    const uint8_t* a = t.a;
    auto* sums = static_cast<uint8_t*>(t.sums);
    VecF sum[kRows][kCols];
    for (int m = 0; m < kRows; ++m) {
        for (int n = 0; n < kCols; ++n) sum[m][n] = load<VecF>(sums + (m * kCols + n) * kVectorBytes);
    }
    int64_t at = 0, block = 0;
    for (int64_t left = t.steps; left > 0; block += t.per_step) {
        VecF table[kCols];
        for (int n = 0; n < kCols; ++n) {
            table[n] = unit.table;
            if constexpr (kZeros) table[n] -= to_float(broadcast(static_cast<uint32_t>(t.zeros[n][block])));
            table[n] *= broadcast(t.scales[n][block]);
        }
        const int64_t here = left < t.block_steps ? left : t.block_steps;
        left -= here;
        for (int64_t s = 0; s < here; ++s, at += D::kBytes) {
#pragma GCC unroll 4
            for (int n = 0; n < kCols; ++n) __builtin_prefetch(t.b[n] + at + t.ahead);
#pragma GCC unroll 8
            for (int v = 0; v < D::kVectors; ++v, a += kRows * kVectorBytes) {
                VecF code[kCols];
#pragma GCC unroll 4
                for (int n = 0; n < kCols; ++n) code[n] = D::look_up(unit.fetch(t.b[n] + at), v, table[n]);
#pragma GCC unroll 4
                for (int m = 0; m < kRows; ++m) {
                    const VecI x = load<VecI>(a + m * kVectorBytes);
#pragma GCC unroll 4
                    for (int n = 0; n < kCols; ++n) sum[m][n] = D::dot(sum[m][n], code[n], x);
                }
            }
        }
    }
    for (int m = 0; m < kRows; ++m) {
        for (int n = 0; n < kCols; ++n) store(sums + (m * kCols + n) * kVectorBytes, sum[m][n]);
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

#include "cpu/mm_lanes_body.inl"

template <class D, bool kMore, int... i>
constexpr void add_dots(FewUnit& u, std::integer_sequence<int, i...>) {
    ((u.dots[kMore][i] = few_dots<D, kMore, i + 1>), ...);
    if constexpr (D::kLooksUp) ((u.lookups[kMore][i] = few_lookups<D, kMore, i + 1>), ...);
}

// Without kernels.
template <class D>
constexpr FewUnit bare_unit() {
    FewUnit u;
    u.elements = D::kElements;
    u.bytes = D::kBytes;
    u.vectors = D::kVectors;
    u.input = D::kInput;
    if constexpr (D::kInput == FewInput::f32) {
        u.halves = D::kHalves;
        u.as_signed = D::kSigned;
    }
    u.arrange = arrange<D>;
    return u;
}

template <class D, bool kMore = true>
constexpr FewUnit few_unit() {
    constexpr std::make_integer_sequence<int, kFewTile> rows;
    FewUnit u = bare_unit<D>();
    add_dots<D, false>(u, rows);
    if constexpr (kMore) add_dots<D, true>(u, rows);
    add_lanes<D, kMore>(u.lanes);
    return u;
}

template <int... i>
inline VecF swapped(VecF v, int apart, std::integer_sequence<int, i...>) {
    const VecI lanes = {i...};
    return (VecF)permute((VecI)v, lanes ^ apart);
}

inline void sum_floats(const float* vectors, int64_t count, float* sums) {
    for (int64_t i = 0; i < count; ++i, vectors += kWidth) {
        VecF v = load<VecF>(vectors);
#pragma GCC unroll 4
        for (int apart = kWidth / 2; apart > 0; apart /= 2) {
            v += swapped(v, apart, std::make_integer_sequence<int, kWidth>());
        }
        sums[i] = v[0];
    }
}

inline void sum_integers(const int32_t* vectors, int64_t count, int64_t* sums) {
    for (int64_t i = 0; i < count; ++i, vectors += kWidth) {
        int64_t sum = 0;
        for (int l = 0; l < kWidth; ++l) sum += vectors[l];
        sums[i] = sum;
    }
}

inline bool holds(const uint8_t* codes, int64_t count, uint8_t nan) {
    uint8_t found = 0;
    for (int64_t i = 0; i < count; ++i) found |= (codes[i] & 0x7f) == nan;
    return found != 0;
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

constexpr FewKernels few_kernels() {
    FewKernels k;
    k.width = kWidth;
    k.cols = kCols;
    k.lane_cols = kTileCols;
    k.least_lanes = kWidth == 16 ? 13 : 5;  // the first measured (docs/measured.md), the others not
    k.sum_floats = sum_floats;
    k.sum_integers = sum_integers;
    k.turn = turn;
    k.correct = correct;
    k.holds = holds;
    k.byte_scales = byte_scales;
    return k;
}
