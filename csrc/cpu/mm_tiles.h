#pragma once

#include "cpu/mm_plan.h"

namespace lowbit::cpu::mm {

// The product by register tiles; `serial`: on the calling thread alone.
void multiply_tiles(const Problem& problem, const Kernels& kernels, const Plan& plan, bool serial);

}  // namespace lowbit::cpu::mm
