// The product, by the way that suits its shape.
#include "cpu/matmul/gemm_tiles.h"
#include "cpu/matmul/gemv.h"
#include "cpu/matmul/packed.h"

namespace lowbit::cpu::mm {

const Kernels& kernels_in_use() {
    static constexpr const Kernels& (*kTables[])() = {
#define LOWBIT_KERNELS(name, ...) kernels_##name,
        LOWBIT_ISAS(LOWBIT_KERNELS)
#undef LOWBIT_KERNELS
    };
    return kTables[static_cast<int>(current_isa())]();
}

void multiply(const Problem& problem) {
    if (problem.a.rows == 0 || problem.b.rows == 0) return;
    if (problem.b.is_packed()) return multiply_packed(problem, kernels_in_use());
    const bool in_rows = problem.a.patches == nullptr && problem.out_stride == 0;
    if (!in_rows || !multiply_gemv(problem)) multiply_tiles(problem, kernels_in_use());
}

}  // namespace lowbit::cpu::mm
