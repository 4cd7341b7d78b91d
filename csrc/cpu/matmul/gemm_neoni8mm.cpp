// What products of signed with unsigned bytes add (Armv8.6, Neoverse V1 and N2, Apple M2).
#include <arm_neon.h>

#include "cpu/matmul/few.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_neon.inl"

#include "cpu/matmul/few_body.inl"

struct DotS8U8 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s8u8;
    static constexpr bool kFromMemory = false;
    static VecI dot(VecI acc, VecI a, VecI b) { return (VecI)vusdotq_s32((int32x4_t)acc, (uint8x16_t)b, (int8x16_t)a); }
};

#include "cpu/matmul/gemm_neon_bytes.inl"

}  // namespace

void add_neoni8mm(Kernels& kernels) { add_bytes<DotS8U8>(kernels); }

}  // namespace lowbit::cpu::mm
