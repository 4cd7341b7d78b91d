// What the AVX-512 files for few rows share; included in an unnamed namespace after gemm_avx512.inl.

constexpr int kTile = 8;

inline VecI permute(VecI v, VecI lanes) { return (VecI)_mm512_permutexvar_epi32((__m512i)lanes, (__m512i)v); }

#include "cpu/matmul/gemv_body.inl"

// The bf16 values of 6-bit codes. A word holds two codes: the even words from their first bit, the others from bit 4.
struct Bf16Codes6 {
    static constexpr int kElements = 64, kVectors = 2, kBytes = 48;
    using Raw = __m512i;
    __m512i table[2], lanes, bytes, shift[2];
    explicit Bf16Codes6(const Table* t)
        : lanes(_mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0)),
          bytes(_mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11))),
          shift{_mm512_set1_epi32(4 << 16), _mm512_set1_epi32(6 | 10 << 16)} {
        for (int i = 0; i < 2; ++i) {
            const auto *low = reinterpret_cast<const __m256i*>(t->low) + i,
                       *high = reinterpret_cast<const __m256i*>(t->high) + i;
            table[i] = _mm512_or_si512(_mm512_cvtepu8_epi16(_mm256_load_si256(low)),
                                       _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_load_si256(high)), 8));
        }
    }
    Raw fetch(const uint8_t* from) const {
        const __m512i spread = _mm512_permutexvar_epi32(lanes, _mm512_maskz_loadu_epi32(0xfff, from));
        return _mm512_shuffle_epi8(spread, bytes);
    }
    VecI at(Raw raw, int vector) const {
        return (VecI)_mm512_permutex2var_epi16(table[0], _mm512_srlv_epi16(raw, shift[vector]), table[1]);
    }
};
