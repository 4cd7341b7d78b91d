// Few rows of a for AArch64.
#include <arm_neon.h>

#include "cpu/matmul/gemm_kernels.h"
#include "cpu/matmul/gemv.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_neon.inl"

#include "cpu/matmul/gemv_plain.inl"

}  // namespace

const GemvKernels& gemv_neon() { return kTable; }

}  // namespace lowbit::cpu::mm
