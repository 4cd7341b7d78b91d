// What products of signed bytes add (Armv8.4, Neoverse N1, Apple M1).
#include <arm_neon.h>

#include "cpu/matmul/few.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_neon.inl"

#include "cpu/matmul/few_body.inl"

// b's unsigned bytes less 128 are signed ones; 128 times the sum of a's, which all columns share, makes up for it.
struct DotS8U8 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s8u8;
    static constexpr bool kFromMemory = false;
    static VecI dot(VecI acc, VecI a, VecI b) {
        const auto x = (int8x16_t)a, y = (int8x16_t)veorq_u8((uint8x16_t)b, vdupq_n_u8(128)), half = vdupq_n_s8(64);
        const int32x4_t rest = vdotq_s32(vdotq_s32(vdupq_n_s32(0), x, half), x, half);
        return (VecI)vdotq_s32((int32x4_t)acc, x, y) + (VecI)rest;
    }
};

#include "cpu/matmul/gemm_neon_bytes.inl"

}  // namespace

void add_neondot(Kernels& kernels) { add_bytes<DotS8U8>(kernels); }

}  // namespace lowbit::cpu::mm
