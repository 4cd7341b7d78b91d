// What VNNI adds to the matrix product (Ice Lake, Zen 4 on): products of bytes.
#include <immintrin.h>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/mm_avx512.inl"

struct DotU8S8 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::u8s8;
    // As assembly: gcc 12 spills the intrinsic's accumulators in large tiles.
    static VecI dot(VecI acc, VecI a, VecI b) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
        return acc;
    }
};

int32_t sum_bytes(const uint8_t* bytes, int64_t n, bool is_signed) {
    __m512i sum = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi8(1);
    for (int64_t i = 0; i < n; i += 64) {
        const __m512i v = _mm512_maskz_loadu_epi8(first(n - i), bytes + i);
        sum = is_signed ? _mm512_dpbusd_epi32(sum, ones, v) : _mm512_dpbusd_epi32(sum, v, ones);
    }
    return _mm512_reduce_add_epi32(sum);
}

}  // namespace

void add_avx512vnni(Kernels& kernels) {
    kernels.integer = Kind::u8s8;
    kernels.sum_bytes = sum_bytes;
    add_kind<DotU8S8>(kernels);
}

}  // namespace lowbit::cpu::mm
