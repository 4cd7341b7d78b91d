// Row kernels for AVX-512 (F, BW, DQ, VL).
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "common/numerics.h"
#include "cpu/row_kernels.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

#define LOWBIT_REGISTER "v"  // the constraint of vectors in inline assembly
constexpr int kLanes = 16, kRegisters = 32;
typedef float F __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint64_t W __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(16)));

inline U widen(B b) { return (U)_mm512_cvtepu8_epi32((__m128i)b); }
inline U widen(H h) { return (U)_mm512_cvtepu16_epi32((__m256i)h); }
inline B narrow_bytes(U v) { return (B)_mm512_cvtepi32_epi8((__m512i)v); }
inline H narrow_words(U v) { return (H)_mm512_cvtepi32_epi16((__m512i)v); }
inline F widen_half(H h) { return (F)_mm512_cvtph_ps((__m256i)h); }
inline H narrow_half(F v) { return (H)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F one_nan(F v) {
    const __m512i others = _mm512_set1_epi32(0x11111100);  // by class: both NaNs are replaced, all others stay
    return (F)_mm512_fixupimm_ps((__m512)(U{} + kNan), (__m512)v, others, 0);
}
inline F root(F v) { return (F)_mm512_sqrt_ps((__m512)v); }
inline int32_t largest(I v) { return _mm512_reduce_max_epi32((__m512i)v); }
inline W multiply(W a, W b) { return (W)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
inline I rounded(F v) { return (I)_mm512_cvtps_epi32((__m512)v); }
inline F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
inline F smaller(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
inline F fused(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline U zip_low(U a, U b) { return (U)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
inline U zip_high(U a, U b) { return (U)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
inline U join_words(U a, U b) {
    const __m512i words = _mm512_packus_epi32((__m512i)a, (__m512i)b);
    return (U)_mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), words);
}
inline U widen_words(const void* p) { return (U)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline U widen_signed(const void* p) { return (U)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline bool any_byte_above(U a, U b) { return _mm512_cmpgt_epu8_mask((__m512i)a, (__m512i)b) != 0; }
inline F first_halves(U words) { return (F)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)words)); }
inline F second_halves(U words) { return (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)words, 1)); }
inline void store_threes(void* p, U v) {
    const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1)),
                  dense = _mm512_set_epi32(0, 0, 0, 0, 14, 13, 12, 10, 9, 8, 6, 5, 4, 2, 1, 0);
    _mm512_mask_storeu_epi32(p, 0x0fff, _mm512_permutexvar_epi32(dense, _mm512_shuffle_epi8((__m512i)v, first)));
}
inline U load_threes(const void* p) {
    const __m512i apart = _mm512_set_epi32(0, 11, 10, 9, 0, 8, 7, 6, 0, 5, 4, 3, 0, 2, 1, 0),
                  wide = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
    const __m512i spread = _mm512_permutexvar_epi32(apart, _mm512_maskz_loadu_epi32(0x0fff, p));
    return (U)_mm512_shuffle_epi8(spread, wide);
}
inline U join_bytes(U a, U b, U c, U d, bool zipped) {
    const __m512i first = _mm512_packus_epi32((__m512i)a, (__m512i)b),
                  second = _mm512_packus_epi32((__m512i)c, (__m512i)d);
    const __m512i whole = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0),
                  pairs = _mm512_set_epi32(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
    return (U)_mm512_permutexvar_epi32(zipped ? pairs : whole, _mm512_packus_epi16(first, second));
}
inline F lookup(const F (&table)[1], U index) { return (F)_mm512_permutexvar_ps((__m512i)index, (__m512)table[0]); }
inline U gather(const uint32_t* table, U index) { return (U)_mm512_i32gather_epi32((__m512i)index, table, 4); }
// By single loads: some processors take longer for gathers of 64-bit words.
inline void gather_pairs(const uint64_t* table, U index, U (&pairs)[2]) {
    uint32_t i[16];
    _mm512_storeu_si512(i, (__m512i)index);
    const auto word = [&](int k) { return static_cast<long long>(table[i[k]]); };
    pairs[0] = (U)_mm512_set_epi64(word(7), word(6), word(5), word(4), word(3), word(2), word(1), word(0));
    pairs[1] = (U)_mm512_set_epi64(word(15), word(14), word(13), word(12), word(11), word(10), word(9), word(8));
}
inline I evens(I a, I b) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return (I)_mm512_permutex2var_epi32((__m512i)a, even, (__m512i)b);
}
inline I odds(I a, I b) {
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (I)_mm512_permutex2var_epi32((__m512i)a, odd, (__m512i)b);
}
inline uint64_t pack_group(uint64_t codes, uint64_t mask) { return _pext_u64(codes, mask); }
inline uint64_t unpack_group(uint64_t packed, uint64_t mask) { return _pdep_u64(packed, mask); }

#include "cpu/row_kernels_body.inl"

}  // namespace

const RowKernels& row_kernels_avx512() { return kTable; }

}  // namespace lowbit::cpu
