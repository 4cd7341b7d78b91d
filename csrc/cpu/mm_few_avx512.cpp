// Few rows of a with AVX-512 F, BW, DQ and VL. Instructions for 64 bytes of codes and one row of a: fp32 nibbles 23
// (8 lookups, 7 shifts, 8 FMA), bytes 16, halves 20, 48 bytes of sextets 18; where products are memory-bound a core
// has about 29 for them, two a cycle (docs/measured.md).
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

// 4-bit codes of any format. A lookup heeds the low four bits of a lane alone.
struct Nibbles : ByF32 {
    static constexpr int kElements = 128, kVectors = 8, kBytes = 64;
    static constexpr bool kLooksUp = true;
    using Raw = __m512i;
    VecF table;
    explicit Nibbles(const Table* t) : table((VecF)_mm512_load_ps(t->f32)) {}
    Raw fetch(const uint8_t* from) const { return _mm512_loadu_si512(from); }
    static VecF look_up(Raw raw, int vector, VecF table) {
        return (VecF)_mm512_permutexvar_ps(vector == 0 ? raw : _mm512_srli_epi32(raw, 4 * vector), (__m512)table);
    }
    VecF at(Raw raw, int vector) const { return look_up(raw, vector, table); }
};

// 8-bit integers, as signed ones: of unsigned codes 128 is off, which zero points make up for.
struct Bytes : ByF32 {
    static constexpr bool kSigned = true;
    static constexpr int kElements = 16, kVectors = 1, kBytes = 16;
    using Raw = __m128i;
    __m128i flip;
    explicit Bytes(const Table* t) : flip(_mm_set1_epi8(static_cast<char>(t->is_signed ? 0 : 0x80))) {}
    Raw fetch(const uint8_t* from) const {
        return _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), flip);
    }
    VecF at(Raw raw, int) const { return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw)); }
};

// 8-bit floats by way of fp16; see Table::half_shift. A word holds two codes.
struct Halves : ByF32 {
    static constexpr bool kHalves = true;
    static constexpr int kElements = 32, kVectors = 2, kBytes = 32;
    using Raw = __m256i;
    __m256i shift, mask;
    explicit Halves(const Table* t)
        : shift(_mm256_set1_epi16(static_cast<int16_t>(t->half_shift))),
          mask(_mm256_set1_epi16(static_cast<int16_t>(0x8000 | 0x7f00 >> t->half_shift))) {}
    Raw fetch(const uint8_t* from) const { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
    VecF at(Raw raw, int vector) const {
        const __m256i top = vector == 0 ? _mm256_slli_epi16(raw, 8) : raw;
        return (VecF)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srav_epi16(top, shift), mask));
    }
};

// 6-bit codes whose values are bf16 numbers.
struct Sextets : ByF32 {
    static constexpr int kElements = 64, kVectors = 4, kBytes = 48;
    using Raw = __m512i;
    Bf16Sextets words;
    explicit Sextets(const Table* t) : words(t) {}
    Raw fetch(const uint8_t* from) const { return words.fetch(from); }
    VecF at(Raw raw, int vector) const {
        const __m512i pair = (__m512i)words.at(raw, vector % 2);
        return (VecF)(vector < 2 ? _mm512_slli_epi32(pair, 16)
                                 : _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

FewKernels make() {
    FewKernels k = few_kernels();
    k.nibbles = few_unit<Nibbles>();
    k.bytes = few_unit<Bytes>();
    k.halves = few_unit<Halves, false>();
    k.sextets = few_unit<Sextets, false>();
    k.int8 = few_unit<Words<DotS16, 8>>();
    k.int4 = few_unit<Words<DotS16, 4>>();
    if (has_feature("avx512_vnni")) add_few_avx512vnni(k);
    if (has_feature("avx512_vnni") && has_feature("avx512_vbmi") && has_feature("avx512_bf16")) {
        add_few_avx512vbmibf16(k);
    }
    return k;
}

}  // namespace

const FewKernels& few_avx512() {
    static const FewKernels table = make();
    return table;
}

}  // namespace lowbit::cpu::mm
