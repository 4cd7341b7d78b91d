// Few rows of a without vector instructions of its own.
#include "cpu/matmul/gemm_kernels.h"
#include "cpu/matmul/gemv.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_scalar.inl"

#include "cpu/matmul/gemv_plain.inl"

}  // namespace

const GemvKernels& gemv_scalar() { return kTable; }

}  // namespace lowbit::cpu::mm
