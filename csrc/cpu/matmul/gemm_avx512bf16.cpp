// What BF16 dot products add (Cooper Lake, Zen 4 on). vdpbf16ps flushes subnormals, whatever MXCSR says; the error
// bound of scaled_mm has an absolute term for that (docs/numerics.md section 9).
#include <immintrin.h>

#include "cpu/matmul/gemm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx512.inl"

struct DotBf16 {
    using Acc = VecF;
    static constexpr Kind kind = Kind::bf16;
#ifdef LOWBIT_EMULATE
    static constexpr bool kFromMemory = false;
    static VecF dot(VecF acc, VecI a, VecI b) { return (VecF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
#else
    static constexpr bool kFromMemory = true;
    // As assembly: gcc 12 spills the intrinsic's accumulators in large tiles.
    static VecF dot(VecF acc, VecI a, VecI b) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
        return acc;
    }
    static VecF dot_at(VecF acc, const uint32_t& a, VecI b) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(a));
        return acc;
    }
#endif
};

}  // namespace

void add_avx512bf16(Kernels& kernels) { add_kind<DotBf16>(kernels); }

}  // namespace lowbit::cpu::mm
