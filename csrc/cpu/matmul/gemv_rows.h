// Rows of a in the order that a unit multiplies them in, tile after tile.
#pragma once

#include <algorithm>

#include "cpu/matmul/gemv_plan.h"

namespace lowbit::cpu::mm {

// Room for results that are summed from a's rows: those that tiles have, and one of ones.
constexpr int64_t kAllRows = kGemvRows + 1;

class GemvRows {
  public:
    GemvRows(const Problem& problem, const GemvKernels& gemv, const GemvPlan& plan);
    // The vectors of the tile that begins with row m, from a step on.
    const uint8_t* tile(int64_t m, int64_t step) const {
        return packed_ + (m * plan_.all_steps() + step * tile_rows(m)) * step_;
    }
    int64_t tile_rows(int64_t m) const { return std::min(plan_.tile, plan_.rows - m / plan_.tile * plan_.tile); }
    // Integers: of the bytes that are multiplied; and how much larger they are than the codes.
    int64_t sum(int64_t m) const { return sums_[m]; }
    int lift() const;
    // Integers in blocks: of each row's blocks the scales, and the sums of the elements less their zero point.
    const float* const* scales() const { return scales_; }
    const int32_t* const* block_sums() const { return block_sums_; }

  private:
    void take_row(int64_t m, int64_t depth, uint8_t* raw);
    template <class T>
    void integers(int64_t m, int64_t depth);
    void floats(int64_t m, int64_t depth, uint8_t* raw) const;
    template <class T>
    void block_sums(int32_t* out) const;

    const Problem& p_;
    const GemvKernels& gemv_;
    const GemvPlan& plan_;
    const int64_t vector_, step_;  // bytes
    uint8_t *packed_, *natural_;
    const float* scales_[kGemvRows];
    const int32_t* block_sums_[kGemvRows];
    int64_t sums_[kAllRows] = {};
};

}  // namespace lowbit::cpu::mm
