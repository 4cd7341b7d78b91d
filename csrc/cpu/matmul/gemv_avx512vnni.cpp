// What products of bytes add to few rows of a: for 64 bytes of codes 2 instructions (int8) or 5 (int4), and 1 or 2 a
// row.
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

struct ByS8 {
    using Acc = VecI;
    using Raw = __m512i;
    static constexpr GemvInput kInput = GemvInput::s8;
    static constexpr bool kLooksUp = false, kNans = false;
    __m512i flip;
    // As assembly: gcc 12 spills the intrinsics' accumulators.
    static VecI dot(VecI acc, VecI code, VecI a) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(code), "v"(a));
        return acc;
    }
    static VecI first(VecI code, VecI a) { return dot(VecI{}, code, a); }
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

}  // namespace

void add_gemv_avx512vnni(GemvKernels& kernels) {
    kernels.int8 = gemv_unit<Int8>();
    kernels.int4 = gemv_unit<Int4>();
}

}  // namespace lowbit::cpu::mm
