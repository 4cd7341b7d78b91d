// The matrix product for AArch64: four-dword vectors with fused multiply-add.
#include <arm_neon.h>

#include "cpu/matmul/few.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_neon.inl"

#include "cpu/matmul/few_body.inl"

#include "cpu/matmul/gemm_convert.inl"

// Widening multiplications, then pairwise sums: lanes keep their order along the columns.
struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static constexpr bool kFromMemory = false;
    static VecI dot(VecI acc, VecI a, VecI b) {
        const int16x8_t x = vreinterpretq_s16_s32((int32x4_t)a), y = vreinterpretq_s16_s32((int32x4_t)b);
        const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
        return acc + (VecI)vpaddq_s32(low, vmull_high_s16(x, y));
    }
};

Kernels make() {
    Kernels k = plain_kernels<DotF32, DotS16>();
    add_few<FewDotAny>(k);
    if (has_feature("bf16")) add_neonbf16(k);
    if (has_feature("i8mm")) {
        add_neoni8mm(k);
    } else if (has_feature("dotprod")) {
        add_neondot(k);
    }
    return k;
}

}  // namespace

const Kernels& kernels_neon() {
    static const Kernels table = make();
    return table;
}

}  // namespace lowbit::cpu::mm
