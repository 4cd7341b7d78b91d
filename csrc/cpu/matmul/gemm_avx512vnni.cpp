// What VNNI adds to the matrix product (Ice Lake, Zen 4 on): products of bytes.
#include <immintrin.h>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/matmul/few.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx512.inl"

#include "cpu/matmul/few_body.inl"

struct DotS8U8 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s8u8;
    static constexpr bool kFromMemory = true, kPairs = false;
    // As assembly: gcc 12 spills the intrinsic's accumulators in large tiles.
    static VecI dot(VecI acc, VecI a, VecI b) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
        return acc;
    }
    static VecI dot_at(VecI acc, const uint32_t& a, VecI b) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(a));
        return acc;
    }
};

int32_t sum_bytes(const uint8_t* bytes, int64_t n) {
    __m512i sum = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi8(1);
    for (int64_t i = 0; i < n; i += 64) {
        sum = _mm512_dpbusd_epi32(sum, ones, _mm512_maskz_loadu_epi8(first(n - i), bytes + i));
    }
    return _mm512_reduce_add_epi32(sum);
}

void sum_panel(const uint32_t* panel, int64_t depth, int32_t* sums) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i even[2] = {}, odd[2] = {};
    for (int64_t d = 0; d < depth; ++d) {
        for (int v = 0; v < kVectors; ++v) {
            const __m512i bytes = _mm512_loadu_si512(panel + d * kNr + v * kWidth);
            __m512i& sum = d % 2 == 0 ? even[v] : odd[v];
            sum = _mm512_dpbusd_epi32(sum, bytes, ones);
        }
    }
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_si512(sums + v * kWidth, _mm512_add_epi32(even[v], odd[v]));
}

// Bytes as they are stored, but for the sign.
void panel_of_bytes(const Panel& p) {
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(p.flip));
    for (int64_t d = 0; d < p.length / 4; d += 16) {
        for (int n = 0; n < kNr; n += 16) {
            transpose_dwords(p.rows + n, 4 * d, [&](int64_t i, __m512i v) {
                _mm512_store_si512(p.out + (d + i) * kNr + n, _mm512_xor_si512(v, flip));
            });
        }
    }
}

// Four 4-bit codes, in the low half of each dword, to bytes.
inline __m512i spread_codes4(__m512i x) {
    const __m512i two = _mm512_set1_epi32(0x00ff00ff), four = _mm512_set1_epi32(0x0f0f0f0f);
    const __m512i y = _mm512_ternarylogic_epi64(x, _mm512_slli_epi32(x, 8), two, 0xa8);  // (x | x << 8) & two
    return _mm512_ternarylogic_epi64(y, _mm512_slli_epi32(y, 4), four, 0xa8);
}

void panel_of_codes4(const Panel& p) {
    alignas(16) uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>((i ^ p.flip) - p.less);
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i low = _mm512_set1_epi32(0xffff);
    for (int64_t d = 0; d < p.length / 8; d += 16) {
        for (int n = 0; n < kNr; n += 16) {
            transpose_dwords(p.rows + n, 4 * d, [&](int64_t i, __m512i v) {
                uint32_t* to = p.out + 2 * (d + i) * kNr + n;
                _mm512_store_si512(to, _mm512_shuffle_epi8(table, spread_codes4(_mm512_and_si512(v, low))));
                _mm512_store_si512(to + kNr, _mm512_shuffle_epi8(table, spread_codes4(_mm512_srli_epi32(v, 16))));
            });
        }
    }
}

void panel_s8u8(const Panel& p) { p.table->bits == 4 ? panel_of_codes4(p) : panel_of_bytes(p); }

}  // namespace

void add_avx512vnni(Kernels& kernels) {
    kernels.integer = Kind::s8u8;
    kernels.panel[static_cast<int>(Kind::s8u8)] = panel_s8u8;
    kernels.spread = spread_any<true>;
    kernels.packed4 = {run_packed4_tile<DotS8U8>, Kind::s8u8, LOWBIT_MM_PACKED4_ROWS, 2 * kStreamedRows};
    kernels.sum_panel = sum_panel;
    kernels.sum_bytes = sum_bytes;
    add_kind<DotS8U8>(kernels);
    add_few<FewDotOf<DotS8U8>>(kernels);
}

}  // namespace lowbit::cpu::mm
