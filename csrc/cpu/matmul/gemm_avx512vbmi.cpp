// What VBMI adds to the matrix product (Ice Lake, Zen 4 on): shuffles of bytes, which look codes up.
#include <immintrin.h>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/matmul/gemm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx512.inl"
#include "cpu/matmul/gemm_convert.inl"
#include "cpu/matmul/gemm_decode_avx512.inl"

void unpack(const uint8_t* packed, uint8_t* codes, int64_t count, int bits) {
    int64_t i = 0;
    if (bits == 6) {
        // 48 bytes: six to each qword, then eight 6-bit fields of each.
        alignas(64) static const uint8_t kSpread[64] = {0,  1,  2,  3,  4,  5,  0, 0, 6,  7,  8,  9,  10, 11, 0, 0,
                                                        12, 13, 14, 15, 16, 17, 0, 0, 18, 19, 20, 21, 22, 23, 0, 0,
                                                        24, 25, 26, 27, 28, 29, 0, 0, 30, 31, 32, 33, 34, 35, 0, 0,
                                                        36, 37, 38, 39, 40, 41, 0, 0, 42, 43, 44, 45, 46, 47, 0, 0};
        const __m512i spread = _mm512_load_si512(kSpread);
        const __m512i fields = _mm512_set1_epi64(0x2a241e18120c0600);
        for (; i + 64 <= count; i += 64) {
            const __m512i bytes = _mm512_maskz_loadu_epi8(first(48), packed + i * 6 / 8);
            const __m512i codes6 = _mm512_multishift_epi64_epi8(fields, _mm512_permutexvar_epi8(spread, bytes));
            _mm512_storeu_si512(codes + i, _mm512_and_si512(codes6, _mm512_set1_epi8(63)));
        }
    } else if (bits == 4) {
        for (; i + 64 <= count; i += 64) unpack_codes4(packed + i / 2, codes + i);
    }
    unpack_any(packed + i * bits / 8, codes + i, count - i, bits);
}

// The bf16 values of 64 codes as two vectors of words, in order.
struct Bf16Decoder {
    __m512i low[2], high[2], sign;
    explicit Bf16Decoder(const Table& t)
        : low{_mm512_load_si512(t.low), _mm512_load_si512(t.low + 64)},
          high{_mm512_load_si512(t.high), _mm512_load_si512(t.high + 64)},
          sign(_mm512_set1_epi8(static_cast<char>(has_sign(t) ? 0x80 : 0))) {}
    void operator()(__m512i codes, __m512i* words) const {
        in_lanes(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes), words);
    }
    // Of the lower half and of the upper half of each 128-bit lane.
    void in_lanes(__m512i v, __m512i* words) const {
        const __m512i lows = _mm512_permutex2var_epi8(low[0], v, low[1]);
        const __m512i magnitude = _mm512_permutex2var_epi8(high[0], v, high[1]);
        const __m512i highs = _mm512_ternarylogic_epi64(magnitude, v, sign, 0xf8);  // magnitude | (v & sign)
        words[0] = _mm512_unpacklo_epi8(lows, highs);
        words[1] = _mm512_unpackhi_epi8(lows, highs);
    }
};

#include "cpu/matmul/gemm_panel_avx512.inl"

// 8-bit floats: for 4 codes of 16 columns 9 instructions, besides those that transpose.
void panel_bf16_bytes(const Panel& p) {
    const Bf16Decoder decode(*p.table);
    for (int64_t d = 0; d < p.length / 4; d += 16) {
        for (int n = 0; n < kNr; n += 16) {
            transpose_dwords(p.rows + n, 4 * d, [&](int64_t i, __m512i v) {
                __m512i words[2];
                decode.in_lanes(v, words);
                // Of each column, the first two values and the last two.
                const __m512 low = _mm512_castsi512_ps(words[0]), high = _mm512_castsi512_ps(words[1]);
                uint32_t* to = p.out + 2 * (d + i) * kNr + n;
                _mm512_store_ps(to, _mm512_shuffle_ps(low, high, 0x88));
                _mm512_store_ps(to + kNr, _mm512_shuffle_ps(low, high, 0xdd));
            });
        }
    }
}

// 4-bit codes: for 2 of 16 columns 4 instructions. The table is doubled, as its index has a fifth bit.
void panel_bf16_codes4(const Panel& p) {
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(_mm512_load_ps(p.table->f32)), 16);
    const __m512i table = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(bits));
    const __m512i shift = _mm512_set1_epi32(4 << 16);  // of each byte, its low 4 bits and then its high ones
    __m512i twice[4];                                  // byte j of each dword, to both words
    for (int j = 0; j < 4; ++j) {
        const __m128i dwords = _mm_setr_epi32(0, 4, 8, 12);
        const __m128i bytes = _mm_add_epi32(dwords, _mm_set1_epi32(j));
        twice[j] = _mm512_broadcast_i32x4(_mm_or_si128(bytes, _mm_slli_epi32(bytes, 16)));
    }
    for (int64_t d = 0; d < p.length / 8; d += 16) {
        for (int n = 0; n < kNr; n += 16) {
            transpose_dwords(p.rows + n, 4 * d, [&](int64_t i, __m512i v) {
                uint32_t* to = p.out + 4 * (d + i) * kNr + n;
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const __m512i index = _mm512_srlv_epi16(_mm512_shuffle_epi8(v, twice[j]), shift);
                    _mm512_store_si512(to + j * kNr, _mm512_permutexvar_epi16(index, table));
                }
            });
        }
    }
}

void panel_bf16(const Panel& p) { p.table->bits == 4 ? panel_bf16_codes4(p) : panel_bf16_bytes(p); }

}  // namespace

void add_avx512vbmi(Kernels& kernels) {
    kernels.unpack = unpack;
    kernels.decode_f32 = decode_f32<Bf16Decoder>;
    kernels.panel[static_cast<int>(Kind::f32)] = panel_f32<Bf16Decoder, NoHalves>;
    kernels.panel[static_cast<int>(Kind::bf16)] = panel_bf16;
    kernels.decode_bf16 = decode_bf16<Bf16Decoder>;
}

}  // namespace lowbit::cpu::mm
