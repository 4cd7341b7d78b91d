// Few rows of a without vector instructions of its own.
#include "cpu/mm_few.h"
#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/mm_scalar.inl"

#include "cpu/mm_few_plain.inl"

}  // namespace

const FewKernels& few_scalar() { return kTable; }

}  // namespace lowbit::cpu::mm
