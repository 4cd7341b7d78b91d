// Products by register tiles: of more than a few rows, or with weights in the packed layout.
#pragma once

#include "cpu/matmul/gemm_kernels.h"

namespace lowbit::cpu::mm {

// No dimension may be 0.
void multiply_tiles(const Problem& problem, const Kernels& kernels);

}  // namespace lowbit::cpu::mm
