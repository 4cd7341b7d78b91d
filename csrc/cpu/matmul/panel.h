// Panels of b: some of its rows over a chunk of K, decoded and transposed.
#pragma once

#include "cpu/matmul/load.h"

namespace lowbit::cpu::mm {

// What one thread loads panels with.
struct PanelLoader {
    const Operand& b;
    const Kernels& kernels;
    const Plan& plan;
    uint32_t* rows;         // [nr, kTileStride]: decoded, or scales of each
    float *scales, *zeros;  // [kMaxPanelBlocks, nr]
    uint8_t* raw;
    float* levels;

    // Rows [row, row + valid), valid <= nr, of the segments' stretch of K; columns past them hold anything. Returns
    // `panel`, or where it is stored already.
    const uint32_t* load(int64_t row, int64_t valid, const Segment* segments, int num_segments, uint32_t* panel) const;
    // What the sums of segments need: scales, and what s8u8 is corrected by.
    void load_sums(int64_t row, int64_t valid, const Segment* segments, int num_segments, const uint32_t* panel,
                   const Sums& sums) const;

  private:
    bool direct(const Segment& first, const Segment& last) const;
    const uint32_t* load_packed(int64_t row, int64_t valid, const Segment* segments, int num_segments,
                                uint32_t* panel) const;
    void load_direct(int64_t row, int64_t valid, int64_t begin, int64_t length, uint32_t* panel) const;
    void put_levels(int64_t row, int64_t valid, int64_t begin, int64_t length, Panel& panel) const;
};
constexpr int64_t kMaxPanelBlocks = kTileDepth / kPanelStep;

}  // namespace lowbit::cpu::mm
