// What all products with few rows do to some rows of b, which are columns of the output: their scales and zero points,
// and the epilogue.
#pragma once

#include "cpu/matmul/gemv_rows.h"

namespace lowbit::cpu::mm {

class GemvColumns {
  protected:
    static constexpr int64_t kMost = 64;  // columns that `finish` takes at a time

    GemvColumns(const Problem& p, const GemvKernels& gemv, const GemvPlan& plan, const GemvRows& rows)
        : p_(p), gemv_(gemv), plan_(plan), rows_(rows) {}

    // Room for the blocks of a row, those that pad the last step, and a vector more.
    int64_t block_room() const { return (plan_.blocks ? plan_.block_of(plan_.all_steps()) : 0) + 2 * gemv_.width + 1; }
    // Into which block each lane of a step falls.
    void put_lanes(int32_t* lanes) const;
    // Where the scales of the blocks of some rows are: in b, or in `room`, block_room() each. Those of integers have
    // the global_scale one in them, and b's only one where a alone has blocks.
    void find_scales(int64_t first, int64_t count, float* room, const float** scales) const;
    // Zero points as decoded codes have them. Where b has none, `room` holds them already: they are the same for all.
    void find_zeros(int64_t first, int64_t count, int32_t* room, const int32_t** zeros) const;
    int32_t zero_offset() const;
    // A row's codes after the whole steps, `to` a step's bytes. The bits that pad it may be any, but not a NaN's here.
    void take_tail(const uint8_t* codes, uint8_t* to) const;
    // What a row's float sums are to be multiplied by.
    float factor(bool has_nan) const;
    // Scales that are constant along K, bias and cast: of results [rows, pitch], of Row::sum_kind, from row `first` of
    // b.
    void finish(const void* results, int64_t pitch, int kind, int64_t first, int64_t count) const;

    const Problem& p_;
    const GemvKernels& gemv_;
    const GemvPlan& plan_;
    const GemvRows& rows_;

  private:
    bool in_bytes() const;  // whether byte_scales decodes b's scales
    const float* block_scales(int64_t row, float* out) const;
    const float* integer_scales(int64_t row, float* out) const;
    void put_zeros(int64_t row, int32_t* out) const;
};

}  // namespace lowbit::cpu::mm
