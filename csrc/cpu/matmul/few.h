// Few rows of integers by a weight in the packed layout (packed.h), which is read once, as one stream.
//
// The sums of a panel stay in registers: those of a block of K are scaled and added there. Segments, chunks and tiles
// (gemm_tiles.cpp) have a cost for each of them, and are for more rows.
#pragma once

#include "cpu/matmul/gemm_kernels.h"

namespace lowbit::cpu::mm {

// Some rows of a, at most kFewTile, by a panel of b.
struct Few {
    const uint32_t* panel = nullptr;  // [dwords, kPanelRows], as stored
    int64_t dwords = 0;               // stored ones
    int64_t segment = 0;              // dwords of a segment of K; the last one may be shorter
    const uint32_t* a = nullptr;      // signed bytes: [dwords of four elements, rows]
    const int32_t* starts = nullptr;  // [segments, rows]: what a sum begins with, less which it is too large
    // What b's codes are too large by, if columns differ: [segments, kPanelRows], and sums of a's: [segments, rows].
    const int32_t* b_zeros = nullptr;
    const int32_t* a_sums = nullptr;
    const float* a_scales = nullptr;  // scaled: [segments, rows]
    const float* b_scales = nullptr;  // scaled: [segments, kPanelRows]
    void* sums = nullptr;             // [rows, kPanelRows]: fp32 if scaled, else int32
};

// The product, if it is one for this path; else false, and nothing is done.
bool multiply_few(const Problem& problem, const Kernels& kernels);

}  // namespace lowbit::cpu::mm
