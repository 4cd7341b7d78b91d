// Products of more than a few rows, by register tiles.
#pragma once

#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {

// No dimension may be 0.
void multiply_tiles(const Problem& problem, const Kernels& kernels);

}  // namespace lowbit::cpu::mm
