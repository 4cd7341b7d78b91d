// Row kernels for AVX2 with F16C and BMI2.
#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "common/numerics.h"
#include "cpu/row_kernels.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

#define LOWBIT_REGISTER "x"  // the constraint of vectors in inline assembly
constexpr int kLanes = 8, kRegisters = 16;
typedef float F __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint64_t W __attribute__((vector_size(32)));
typedef uint16_t H __attribute__((vector_size(16)));
typedef uint8_t B __attribute__((vector_size(8)));

inline U widen(B b) { return (U)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)b)); }
inline U widen(H h) { return (U)_mm256_cvtepu16_epi32((__m128i)h); }
inline B narrow_bytes(U v) {
    const __m256i first = _mm256_set1_epi32(0x0c080400);  // the low byte of each lane, gathered in each half
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, first);
    return (B)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
inline H narrow_words(U v) {
    const __m256i w = (__m256i)(v & 0xffffu);
    return (H)_mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
inline F widen_half(H h) { return (F)_mm256_cvtph_ps((__m128i)h); }
inline H narrow_half(F v) { return (H)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F one_nan(F v) { return v == v ? v : (F)(U{} + kNan); }
inline F root(F v) { return (F)_mm256_sqrt_ps((__m256)v); }
inline int32_t largest(I v) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}
inline W multiply(W a, W b) { return (W)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
inline I rounded(F v) { return (I)_mm256_cvtps_epi32((__m256)v); }
inline F larger(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
inline F smaller(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
inline F fused(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline U zip_low(U a, U b) { return (U)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
inline U zip_high(U a, U b) { return (U)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
inline U join_words(U a, U b) { return (U)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xd8); }
inline U widen_words(const void* p) { return (U)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline U widen_signed(const void* p) { return (U)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline bool any_byte_above(U a, U b) {
    const __m256i excess = _mm256_subs_epu8((__m256i)a, (__m256i)b);
    return !_mm256_testz_si256(excess, excess);
}
inline F first_halves(U words) { return (F)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)words)); }
inline F second_halves(U words) { return (F)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)words, 1)); }
inline void store_threes(void* p, U v) {
    const __m128i first = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    const __m256i dense = _mm256_permutevar8x32_epi32(
        _mm256_shuffle_epi8((__m256i)v, _mm256_broadcastsi128_si256(first)), _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 0, 0));
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(dense));
    _mm_storel_epi64((__m128i*)p + 1, _mm256_extracti128_si256(dense, 1));
}
inline U load_threes(const void* p) {
    const __m128i wide = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    const __m256i dense = _mm256_setr_m128i(_mm_loadu_si128((const __m128i*)p), _mm_loadl_epi64((const __m128i*)p + 1));
    const __m256i spread = _mm256_permutevar8x32_epi32(dense, _mm256_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0));
    return (U)_mm256_shuffle_epi8(spread, _mm256_broadcastsi128_si256(wide));
}
inline U join_bytes(U a, U b, U c, U d, bool zipped) {
    const __m256i first = _mm256_packus_epi32((__m256i)a, (__m256i)b),
                  second = _mm256_packus_epi32((__m256i)c, (__m256i)d), bytes = _mm256_packus_epi16(first, second);
    if (zipped) return (U)_mm256_permute4x64_epi64(bytes, 0xd8);
    return (U)_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline F lookup(const F (&table)[2], U index) {
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], (__m256i)index);
    return (F)_mm256_blendv_ps(low, high, (__m256)(index << 28));
}
inline U gather(const uint32_t* table, U index) {
    return (U)_mm256_i32gather_epi32((const int*)table, (__m256i)index, 4);
}
// By single loads: some processors take longer for gathers of 64-bit words.
inline void gather_pairs(const uint64_t* table, U index, U (&pairs)[2]) {
    uint32_t i[8];
    _mm256_storeu_si256((__m256i*)i, (__m256i)index);
    const auto word = [&](int k) { return static_cast<long long>(table[i[k]]); };
    pairs[0] = (U)_mm256_set_epi64x(word(3), word(2), word(1), word(0));
    pairs[1] = (U)_mm256_set_epi64x(word(7), word(6), word(5), word(4));
}
inline I evens(I a, I b) {
    const __m256 halves = _mm256_shuffle_ps((__m256)a, (__m256)b, 0x88);
    return (I)_mm256_permute4x64_epi64(_mm256_castps_si256(halves), 0xd8);
}
inline I odds(I a, I b) {
    const __m256 halves = _mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
    return (I)_mm256_permute4x64_epi64(_mm256_castps_si256(halves), 0xd8);
}
inline uint64_t pack_group(uint64_t codes, uint64_t mask) { return _pext_u64(codes, mask); }
inline uint64_t unpack_group(uint64_t packed, uint64_t mask) { return _pdep_u64(packed, mask); }

#include "cpu/row_kernels_body.inl"

}  // namespace

const RowKernels& row_kernels_avx2() { return kTable; }

}  // namespace lowbit::cpu
