// What dot products of bf16 and shuffles of bytes add to few rows of a (Zen 4 on, Sapphire Rapids). Instructions for 64
// bytes of codes: 4-bit codes 7 and 4 a row of a, 8-bit codes 7 and 2, 48 bytes of 6-bit codes 6 and 2; and 1 a row and
// block.
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

struct ByBf16 {
    using Acc = VecF;
    using Raw = __m512i;
    static constexpr GemvInput kInput = GemvInput::bf16;
    static constexpr bool kLooksUp = false, kNans = false;
    static VecF dot(VecF acc, VecI code, VecI a) {
        return (VecF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)code, (__m512bh)a);
    }
    static VecF first(VecI code, VecI a) { return dot(VecF{}, code, a); }
};

// 4-bit codes. A lookup heeds the low five bits of a word; the table is there twice.
struct Codes4 : ByBf16 {
    static constexpr int kElements = 128, kVectors = 4, kBytes = 64;
    __m512i table;
    explicit Codes4(const Table* t) {
        const __m256i low = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(t->low)));
        const __m256i high = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(t->high)));
        table = _mm512_broadcast_i64x4(_mm256_or_si256(low, _mm256_slli_epi16(high, 8)));
    }
    Raw fetch(const uint8_t* from) const { return _mm512_loadu_si512(from); }
    VecI at(Raw raw, int vector) const {
        return (VecI)_mm512_permutexvar_epi16(vector == 0 ? raw : _mm512_srli_epi16(raw, 4 * vector), table);
    }
};

// 8-bit floats: the low and the high bytes of their values.
struct Codes : ByBf16 {
    static constexpr int kElements = 64, kVectors = 2, kBytes = 64;
    __m512i low[2], high[2];
    explicit Codes(const Table* t)
        : low{_mm512_load_si512(t->low), _mm512_load_si512(t->low + 64)},
          high{_mm512_load_si512(t->high), _mm512_load_si512(t->high + 64)} {}
    Raw fetch(const uint8_t* from) const { return _mm512_loadu_si512(from); }
    VecI at(Raw raw, int vector) const {
        constexpr int kMagnitudeOrSign = 0xf8, kSelect = 0xca;  // a | (b & c); a ? b : c
        const __m512i lows = _mm512_permutex2var_epi8(low[0], raw, low[1]);
        const __m512i highs = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high[0], raw, high[1]), raw,
                                                        _mm512_set1_epi8(static_cast<char>(0x80)), kMagnitudeOrSign);
        const __m512i bottom = _mm512_set1_epi16(0xff);
        return (VecI)(vector == 0 ? _mm512_ternarylogic_epi64(bottom, lows, _mm512_slli_epi16(highs, 8), kSelect)
                                  : _mm512_ternarylogic_epi64(bottom, _mm512_srli_epi16(lows, 8), highs, kSelect));
    }
};

struct Codes6 : ByBf16 {
    static constexpr int kElements = 64, kVectors = 2, kBytes = 48;
    Bf16Codes6 words;
    explicit Codes6(const Table* t) : words(t) {}
    Raw fetch(const uint8_t* from) const { return words.fetch(from); }
    VecI at(Raw raw, int vector) const { return words.at(raw, vector); }
};

}  // namespace

void add_gemv_avx512vbmibf16(GemvKernels& kernels) {
    kernels.bf16_codes4 = gemv_unit<Codes4, false>();
    kernels.bf16_codes8 = gemv_unit<Codes, false>();
    kernels.bf16_codes6 = gemv_unit<Codes6, false>();
}

}  // namespace lowbit::cpu::mm
