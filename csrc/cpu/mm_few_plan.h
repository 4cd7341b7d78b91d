// Which products with few rows are done by which unit, and how K falls into its steps.
#pragma once

#include "cpu/mm_few.h"

namespace lowbit::cpu::mm {

// How a product is done.
struct FewPlan {
    const FewUnit* unit = nullptr;
    bool lanes = false;  // a's rows are lanes
    bool integers = false;
    bool blocks = false;     // b's scales change along K
    bool more = false;       // FewUnit::dots[1]
    bool a_folded = false;   // a's scales are in its elements
    int64_t num_blocks = 1;  // of a row of b
    // Of a, padded to vectors where they are lanes; else, for integers with a zero point, with one of ones, which sums
    // the rows of b.
    int64_t rows = 0;
    int64_t tile = 0;   // of them, at a time
    int64_t steps = 0;  // whole ones
    int64_t rest = 0;   // elements after them
    int64_t block_steps = 1, per_step = 0;
    int slots = 0;

    int64_t all_steps() const { return steps + (rest > 0); }
    bool exact() const { return integers && !blocks; }
    bool ones(const Problem& p) const { return !lanes && rows > p.a.rows; }
    int64_t block_of(int64_t step) const { return step == 0 ? 0 : step / block_steps * per_step; }
};

// Whether the product is one for this path, and how.
bool make_few_plan(const Problem& problem, const FewKernels& kernels, FewPlan& plan);

}  // namespace lowbit::cpu::mm
