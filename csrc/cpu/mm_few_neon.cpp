// Few rows of a for AArch64.
#include <arm_neon.h>

#include "cpu/mm_few.h"
#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/mm_neon.inl"

#include "cpu/mm_few_plain.inl"

}  // namespace

const FewKernels& few_neon() { return kTable; }

}  // namespace lowbit::cpu::mm
