// The matrix product without vector instructions of its own: four-dword vectors that any compiler can lower.
#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#define LOWBIT_MM_WIDTH 4
#define LOWBIT_MM_ROWS 6
typedef float VecF __attribute__((vector_size(16)));
typedef int32_t VecI __attribute__((vector_size(16)));

inline VecF fused(VecF a, VecF b, VecF c) { return a * b + c; }

#include "cpu/mm_body.inl"
#include "cpu/mm_convert.inl"
#include "cpu/mm_pairs.inl"

constexpr Kernels kTable = {
    "scalar",
    kNr,
    LOWBIT_MM_ROWS,
    Kind::s16,
    false,
    unpack_any,
    decode_f32_any,
    scale_blocks_any,
    nullptr,
    nullptr,
    decode_bytes_any,
    decode_s16_any,
    sum_bytes_any,
    widen_any,
    transpose_any,
    run_tile<DotF32, DotS16>,
    run_dots<DotF32, DotS16>,
    nullptr,
    finish_any,
};

}  // namespace

const Kernels& kernels_scalar() { return kTable; }

}  // namespace lowbit::cpu::mm
