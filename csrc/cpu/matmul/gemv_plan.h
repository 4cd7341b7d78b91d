// Which products with few rows are done by which unit, and how K falls into its steps.
#pragma once

#include "cpu/matmul/gemv.h"

namespace lowbit::cpu::mm {

// How a product is done.
struct GemvPlan {
    const GemvUnit* unit = nullptr;
    bool integers = false;
    bool blocks = false;     // scales change along K: b's, or of integers either operand's
    bool more = false;       // GemvUnit::dots[1]
    bool a_folded = false;   // a's scales are in its elements
    int64_t block = 0;       // elements of a block; all of them where scales do not change
    int64_t num_blocks = 1;  // of a row
    int64_t rows = 0;        // of a, and for integers with a zero point one of ones, which sums the rows of b
    int64_t tile = 0;        // of them, at a time
    int64_t steps = 0;       // whole ones
    int64_t rest = 0;        // elements after them
    int64_t block_steps = 1, per_step = 0;

    int64_t all_steps() const { return steps + (rest > 0); }
    bool exact() const { return integers && !blocks; }
    bool ones(const Problem& p) const { return rows > p.a.rows; }
    bool in_totals() const { return integers && blocks; }
    // Vectors of sums of integers in blocks.
    int64_t num_totals() const { return per_step > 1 ? all_steps() : num_blocks; }
    int64_t block_of(int64_t step) const { return step == 0 ? 0 : step / block_steps * per_step; }
};

// Whether the product is one for this path, and how.
bool make_gemv_plan(const Problem& problem, const GemvKernels& kernels, GemvPlan& plan);

}  // namespace lowbit::cpu::mm
