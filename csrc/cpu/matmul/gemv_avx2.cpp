// Few rows of a with AVX2, FMA and F16C.
#include <immintrin.h>

#include "cpu/matmul/gemm_kernels.h"
#include "cpu/matmul/gemv.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx2.inl"

constexpr int kTile = 8;

inline VecI permute(VecI v, VecI lanes) { return (VecI)_mm256_permutevar8x32_epi32((__m256i)v, (__m256i)lanes); }

#include "cpu/matmul/gemv_body.inl"

// 4-bit codes of any format: two lookups of three bits, and a choice by the fourth.
struct Codes4 : ByF32 {
    static constexpr int kElements = 64, kVectors = 8, kBytes = 32;
    using Raw = __m256i;
    __m256 low, high;
    explicit Codes4(const Table* t) : low(_mm256_load_ps(t->f32)), high(_mm256_load_ps(t->f32 + 8)) {}
    Raw fetch(const uint8_t* from) const { return load<Raw>(from); }
    VecF at(Raw raw, int vector) const {
        const __m256i index = vector == 0 ? raw : _mm256_srli_epi32(raw, 4 * vector);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 28 - 4 * vector));
        return (VecF)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
                                      upper);
    }
};

// Words with the code at the top to fp32; see Table::half_shift.
struct ByFp16 : ByF32 {
    static constexpr bool kFp16 = true;
    __m128i shift, mask;
    ByFp16(int exponent_shift, int top) : shift(_mm_cvtsi32_si128(exponent_shift)) {
        mask = _mm_set1_epi16(static_cast<int16_t>(0x8000 | top >> exponent_shift));
    }
    VecF widen(__m128i top) const { return (VecF)_mm256_cvtph_ps(_mm_and_si128(_mm_sra_epi16(top, shift), mask)); }
};

// 8-bit floats by way of fp16. A word holds two codes; the even words come first.
struct Fp16Codes8 : ByFp16 {
    static constexpr bool kNans = true;
    static constexpr int kElements = 32, kVectors = 4, kBytes = 32;
    using Raw = __m256i;
    __m256i order, nan;
    explicit Fp16Codes8(const Table* t)
        : ByFp16(t->half_shift, 0x7f00),
          order(_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15))),
          nan(_mm256_set1_epi8(static_cast<char>(t->half_nan))) {}
    Raw fetch(const uint8_t* from) const {
        return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load<Raw>(from), order), 0xd8);
    }
    VecF at(Raw raw, int vector) const {
        const __m256i top = vector % 2 == 0 ? _mm256_slli_epi16(raw, 8) : raw;
        return widen(vector < 2 ? _mm256_castsi256_si128(top) : _mm256_extracti128_si256(top, 1));
    }
    static VecI highest(VecI seen, Raw raw) {
        return (VecI)_mm256_max_epu8((__m256i)seen, _mm256_and_si256(raw, _mm256_set1_epi8(0x7f)));
    }
    bool holds_nan(VecI seen) const {
        return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8((__m256i)seen, nan), (__m256i)seen)) != 0;
    }
};

// 6-bit floats by way of fp16. A word holds two codes: the even words from their first bit, the others from bit 4.
struct Codes6 : ByFp16 {
    static constexpr int kElements = 16, kVectors = 2, kBytes = 12;
    using Raw = __m128i;
    __m128i bytes, lift[2];
    explicit Codes6(const Table* t)
        : ByFp16(t->half_shift, 0x7c00),
          bytes(_mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11)),
          lift{_mm_set1_epi32(1 << 10 | 1 << 22), _mm_set1_epi32(1 << 4 | 1 << 16)} {}
    Raw fetch(const uint8_t* from) const {
        const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return _mm_shuffle_epi8(_mm_insert_epi32(low, load<int>(from + 8), 2), bytes);
    }
    VecF at(Raw raw, int vector) const { return widen(_mm_mullo_epi16(raw, lift[vector])); }
};

constexpr GemvKernels make() {
    GemvKernels k = gemv_kernels();
    k.codes4 = gemv_unit<Codes4>();
    k.bytes = gemv_unit<Bytes>();
    k.fp16 = gemv_unit<Fp16Codes8, false>();
    k.codes6 = gemv_unit<Codes6, false>();
    k.int8 = gemv_unit<Words<DotS16, 8>>();
    k.int4 = gemv_unit<Words<DotS16, 4>>();
    return k;
}
constexpr GemvKernels kTable = make();

}  // namespace

const GemvKernels& gemv_avx2() { return kTable; }

}  // namespace lowbit::cpu::mm
