// The matrix product without vector instructions of its own: four-dword vectors that any compiler can lower.
#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#define LOWBIT_MM_WIDTH 4
#define LOWBIT_MM_ROWS 6
typedef float VecF __attribute__((vector_size(16)));
typedef int32_t VecI __attribute__((vector_size(16)));

inline VecF fused(VecF a, VecF b, VecF c) { return a * b + c; }
inline void stream(void* to, VecF v) { __builtin_memcpy(to, &v, sizeof v); }

#include "cpu/mm_body.inl"
#include "cpu/mm_convert.inl"

// Pairs without a multiply-add instruction.
struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static VecI dot(VecI acc, VecI a, VecI b) {
        return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
    }
};

constexpr Kernels kTable = plain_kernels<DotF32, DotS16>();

}  // namespace

const Kernels& kernels_scalar() { return kTable; }

}  // namespace lowbit::cpu::mm
