// The matrix product without vector instructions of its own: four-dword vectors that any compiler can lower.
#include "cpu/matmul/few.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_scalar.inl"

#include "cpu/matmul/few_body.inl"

#include "cpu/matmul/gemm_convert.inl"

// Pairs without a multiply-add instruction.
struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static constexpr bool kFromMemory = false;
    static VecI dot(VecI acc, VecI a, VecI b) {
        return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
    }
};

constexpr Kernels make() {
    Kernels k = plain_kernels<DotF32, DotS16>();
    add_few<FewDotAny>(k);
    return k;
}
constexpr Kernels kTable = make();

}  // namespace

const Kernels& kernels_scalar() { return kTable; }

}  // namespace lowbit::cpu::mm
