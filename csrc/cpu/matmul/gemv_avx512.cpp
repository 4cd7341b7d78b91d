// Few rows of a with AVX-512 F, BW, DQ and VL. Instructions for 64 bytes of codes and one row of a, the loop's 4 or 5
// included: fp32 from 4-bit codes 31 (8 lookups, 7 shifts, 8 FMA), 33 where lanes differ in their scale, bytes 20,
// 8-bit floats 26; every further row adds its FMA (docs/measured.md).
#include <immintrin.h>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/matmul/gemm_kernels.h"
#include "cpu/matmul/gemv.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx512.inl"
#include "cpu/matmul/gemv_avx512.inl"

// 4-bit codes of any format. A lookup heeds the low four bits of a lane alone.
struct Codes4 : ByF32 {
    static constexpr int kElements = 128, kVectors = 8, kBytes = 64;
    static constexpr bool kLooksUp = true;
    using Raw = __m512i;
    VecF table;
    explicit Codes4(const Table* t) : table((VecF)_mm512_load_ps(t->f32)) {}
    Raw fetch(const uint8_t* from) const { return _mm512_loadu_si512(from); }
    static VecF look_up(Raw raw, int vector, VecF table) {
        return (VecF)_mm512_permutexvar_ps(vector == 0 ? raw : _mm512_srli_epi32(raw, 4 * vector), (__m512)table);
    }
    VecF at(Raw raw, int vector) const { return look_up(raw, vector, table); }
};

// 8-bit floats by way of fp16; see Table::half_shift. A word holds two codes; the even words come first.
struct Fp16Codes8 : ByF32 {
    static constexpr bool kFp16 = true, kNans = true;
    static constexpr int kElements = 64, kVectors = 4, kBytes = 64;
    using Raw = __m512i;
    __m512i order, shift, mask, nan;
    explicit Fp16Codes8(const Table* t)
        : shift(_mm512_set1_epi16(static_cast<int16_t>(t->half_shift))),
          mask(_mm512_set1_epi16(static_cast<int16_t>(0x8000 | 0x7f00 >> t->half_shift))),
          nan(_mm512_set1_epi8(static_cast<char>(t->half_nan))) {
        alignas(64) int16_t words[32];
        for (int i = 0; i < 32; ++i) words[i] = static_cast<int16_t>(2 * (i % 16) + i / 16);
        order = _mm512_load_si512(words);
    }
    Raw fetch(const uint8_t* from) const { return _mm512_permutexvar_epi16(order, _mm512_loadu_si512(from)); }
    VecF at(Raw raw, int vector) const {
        const __m512i top = vector % 2 == 0 ? _mm512_slli_epi16(raw, 8) : raw;
        const __m512i words = _mm512_and_si512(_mm512_srav_epi16(top, shift), mask);
        return (VecF)_mm512_cvtph_ps(vector < 2 ? _mm512_castsi512_si256(words) : _mm512_extracti64x4_epi64(words, 1));
    }
    static VecI highest(VecI seen, Raw raw) {
        return (VecI)_mm512_max_epu8((__m512i)seen, _mm512_and_si512(raw, _mm512_set1_epi8(0x7f)));
    }
    bool holds_nan(VecI seen) const { return _mm512_cmpge_epu8_mask((__m512i)seen, nan) != 0; }
};

// 6-bit codes whose values are bf16 numbers.
struct Codes6 : ByF32 {
    static constexpr int kElements = 64, kVectors = 4, kBytes = 48;
    using Raw = __m512i;
    Bf16Codes6 words;
    explicit Codes6(const Table* t) : words(t) {}
    Raw fetch(const uint8_t* from) const { return words.fetch(from); }
    VecF at(Raw raw, int vector) const {
        const __m512i pair = (__m512i)words.at(raw, vector % 2);
        return (VecF)(vector < 2 ? _mm512_slli_epi32(pair, 16)
                                 : _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

GemvKernels make() {
    GemvKernels k = gemv_kernels();
    k.codes4 = gemv_unit<Codes4>();
    k.bytes = gemv_unit<Bytes>();
    k.fp16 = gemv_unit<Fp16Codes8, false>();
    k.codes6 = gemv_unit<Codes6, false>();
    k.int8 = gemv_unit<Words<DotS16, 8>>();
    k.int4 = gemv_unit<Words<DotS16, 4>>();
    if (has_feature("avx512_vnni")) add_gemv_avx512vnni(k);
    if (has_feature("avx512_vnni") && has_feature("avx512_vbmi") && has_feature("avx512_bf16")) {
        add_gemv_avx512vbmibf16(k);
    }
    // Tiles turn panels of these codes fast enough (docs/measured.md).
    for (GemvUnit* unit : {&k.codes4, &k.bytes, &k.int8, &k.int4, &k.bf16_codes4}) unit->most_rows = 12;
    return k;
}

}  // namespace

const GemvKernels& gemv_avx512() {
    static const GemvKernels table = make();
    return table;
}

}  // namespace lowbit::cpu::mm
