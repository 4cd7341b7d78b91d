// What products of bytes add to few rows of a: for 64 bytes of codes 2 instructions (int8) or 5 (int4), and 1 or 2 a
// row. As lanes, for 64 bytes and up to 16 rows: 3 and 16 (int8), 8 and 32 (int4), and 3 a block's sum of codes.
#include <immintrin.h>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/mm_few.h"
#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/mm_avx512.inl"
#include "cpu/mm_few_avx512.inl"

struct ByS8 {
    using Acc = VecI;
    using Raw = __m512i;
    static constexpr FewInput kInput = FewInput::s8;
    static constexpr bool kLooksUp = false, kNans = false;
    __m512i flip;
    // As assembly: gcc 12 spills the intrinsics' accumulators.
    static VecI dot(VecI acc, VecI code, VecI a) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(code), "v"(a));
        return acc;
    }
    static VecI first(VecI code, VecI a) { return dot(VecI{}, code, a); }
    static VecI correct(VecI acc, VecI zero, VecI a) {
        asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(zero), "v"(a));
        return acc;
    }
    Raw fetch(const uint8_t* from) const { return _mm512_xor_si512(_mm512_loadu_si512(from), flip); }
};

struct Int8 : ByS8 {
    static constexpr int kElements = 64, kVectors = 1, kBytes = 64;
    explicit Int8(const Table* t) : ByS8{_mm512_set1_epi8(static_cast<char>(t->is_signed ? 0x80 : 0))} {}
    VecI at(Raw raw, int) const { return (VecI)raw; }
};

struct Int4 : ByS8 {
    static constexpr int kElements = 128, kVectors = 2, kBytes = 64;
    explicit Int4(const Table* t) : ByS8{_mm512_set1_epi8(static_cast<char>(t->is_signed ? 0x88 : 0))} {}
    VecI at(Raw raw, int vector) const {
        return (VecI)_mm512_and_si512(vector == 0 ? raw : _mm512_srli_epi16(raw, 4), _mm512_set1_epi8(15));
    }
};

// Rows of a as lanes: a's bytes are the unsigned ones, 128 larger where they are signed, b's the signed ones; so sums
// are 128 times the sum of b's too large.
struct LaneBytes {
    using Acc = VecI;
    using Raw = __m512i;
    static constexpr FewInput kInput = FewInput::u8;
    static VecI times(VecI acc, VecI a, const uint32_t* code) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(a), "m"(*code));
        return acc;
    }
    static VecI times(VecI acc, VecI a, VecI code) { return ByS8::dot(acc, a, code); }
};

struct LaneInt8 : LaneBytes {
    static constexpr int kElements = 64, kVectors = 1, kBytes = 64;
    __m512i flip;
    explicit LaneInt8(const Table* t) : flip(_mm512_set1_epi8(static_cast<char>(t->is_signed ? 0 : 0x80))) {}
    Raw fetch(const uint8_t* from) const { return _mm512_xor_si512(_mm512_loadu_si512(from), flip); }
    VecI at(Raw raw, int) const { return (VecI)raw; }
};

struct LaneInt4 : LaneBytes {
    static constexpr int kElements = 128, kVectors = 2, kBytes = 64;
    __m512i table;
    explicit LaneInt4(const Table* t) {
        alignas(16) int8_t values[16];
        for (int i = 0; i < 16; ++i) values[i] = static_cast<int8_t>(t->f32[i]);
        table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
    }
    Raw fetch(const uint8_t* from) const { return _mm512_loadu_si512(from); }
    VecI at(Raw raw, int vector) const {
        const __m512i code = _mm512_and_si512(vector == 0 ? raw : _mm512_srli_epi16(raw, 4), _mm512_set1_epi8(15));
        return (VecI)_mm512_shuffle_epi8(table, code);
    }
};

// Decodes a step to `out`; adds its codes to the sum of each lane.
template <class D>
inline __m512i put_step(const D& unit, const uint8_t* from, uint32_t* out, __m512i sum) {
    const __m512i raw = unit.fetch(from);
#pragma GCC unroll 2
    for (int v = 0; v < D::kVectors; ++v) {
        const __m512i code = (__m512i)unit.at(raw, v);
        _mm512_store_si512(out + v * kNext, code);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), code);
    }
    return sum;
}

template <class D>
void decode_row(const Lanes& t) {
    const D unit(t.table);
    for (int64_t n = 0; n < t.count; ++n) {
        uint32_t* out = t.decoded + n * kWidth;
        __m512i sum = _mm512_load_si512(t.totals + n * kWidth);
        for (int64_t s = 0; s < t.steps; ++s, out += D::kVectors * kNext) {
            sum = put_step(unit, t.b[n] + t.at + s * D::kBytes, out, sum);
        }
        _mm512_store_si512(t.totals + n * kWidth, sum);
    }
}

// Lane 4 i + n of the result: the sum of lanes 4 i to 4 i + 3 of row n.
inline __m512i sum_quads(const __m512i* rows) {
    auto halves = [](__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i low = halves(rows[0], rows[2]), high = halves(rows[1], rows[3]);
    return halves(low, high);
}

// Four rows at a time, for the sums of their blocks; rows past the last are there, but nobody's.
template <class D>
void decode_blocks(const Lanes& t) {
    const D unit(t.table);
    const int64_t each = t.per_step > 1 ? t.per_step : 1;
    put_levels(t, blocks_in(t));
    for (int64_t n = 0; n < t.count; n += 4) {
        uint32_t* out = t.decoded + n * kWidth;
        int32_t* start = t.starts + n;
        for (int64_t s = 0; s < t.steps;) {
            const int64_t end = s + t.block_steps < t.steps ? s + t.block_steps : t.steps;
            __m512i sums[4] = {};
            for (; s < end; ++s, out += D::kVectors * kNext) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    sums[i] = put_step(unit, t.b[n + i] + t.at + s * D::kBytes, out + i * kWidth, sums[i]);
                }
            }
            __m512i sum = sum_quads(sums);
            if (each < 4) sum = _mm512_add_epi32(sum, _mm512_shuffle_i32x4(sum, sum, 0xb1));
            if (each < 2) sum = _mm512_add_epi32(sum, _mm512_shuffle_i32x4(sum, sum, 0x4e));
            alignas(64) int32_t less[kWidth];
            _mm512_store_si512(less, _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7)));
            for (int64_t i = 0; i < each; ++i, start += kLaneCols)
                store(start, load<__m128i>(less + i * kWidth / each));
        }
    }
}

template <class D>
FewUnit lane_unit() {
    FewUnit u = bare_unit<D>();
    constexpr std::make_integer_sequence<int, kLaneSizes> sizes;
    add_lane_dots<D, false>(u.lanes, sizes);
    add_lane_dots<D, true>(u.lanes, sizes);
    u.lanes.decode[0] = decode_row<D>;
    u.lanes.decode[1] = decode_blocks<D>;
    return u;
}

}  // namespace

void add_few_avx512vnni(FewKernels& kernels) {
    kernels.int8 = few_unit<Int8>();
    kernels.int4 = few_unit<Int4>();
    kernels.lane_int8 = lane_unit<LaneInt8>();
    kernels.lane_int4 = lane_unit<LaneInt4>();
}

}  // namespace lowbit::cpu::mm
