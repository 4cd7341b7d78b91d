// What products of tiles (gemm_tiles.cpp) work in: rows of a that all threads share, and each thread's own.
#pragma once

#include "cpu/arena.h"
#include "cpu/matmul/gemm_cuts.h"
#include "cpu/matmul/panel.h"

namespace lowbit::cpu::mm {

constexpr int64_t kGroup = 4;  // panels that a thread multiplies with a chunk of a before the next chunk
constexpr int64_t kLine = 64;
constexpr int64_t kMaxLines = kTileDepth * 4 / kLine + 1;  // of a row of b, in a chunk
constexpr int64_t kAheadPad = kTileDepth / kAheadSteps;

// How the sums of s8u8, and of packed codes, are to be corrected.
struct Corrections {
    bool a_zeros = false;  // whether a's bytes are too large
    bool b_zeros = false;  // whether columns differ in what b's are too large by
    int b_zero = 0;        // what all of b's are, if they do not differ
    Corrections(const Problem& p, const Plan& plan) {
        if (plan.kind != Kind::s8u8 && plan.packed == nullptr) return;
        a_zeros = plan.kind == Kind::s8u8 && (p.a.zero_point != nullptr || byte_form(p.a, true, 0).zero != 0);
        b_zeros = p.b.zero_point != nullptr;
        if (!b_zeros) b_zero = byte_form(p.b, false, 0).zero;
    }
};

// A block of a's rows, decoded.
struct Shared {
    uint32_t* a;       // [chunks, tiles, depth, rows of a tile]; of matrix registers [chunks, rows, kTileStride]
    Sums a_sums;       // [segments, rows]
    float* row_scale;  // [rows], for the epilogue

    uint32_t* chunk(int64_t index, int64_t row) const { return a + (index * a_sums.stride + row) * kTileStride; }

    size_t place(const Plan& plan, const Corrections& need, const Cuts& cuts, int64_t rows, uint8_t* base) {
        Parts parts(base);
        parts.take(a, cuts.num_chunks * rows * kTileStride);
        parts.take(row_scale, rows);
        a_sums.stride = rows;
        if (plan.scaled) parts.take(a_sums.scale, cuts.num_segments * rows);
        if (need.a_zeros) parts.take(a_sums.zero, cuts.num_segments * rows);
        if (need.b_zeros || need.b_zero != 0) parts.take(a_sums.sum, cuts.num_segments * rows);
        a_sums.factor = need.b_zeros ? 1 : -need.b_zero;
        return parts.used();
    }
};

// What one thread works in.
struct ThreadMemory {
    uint32_t *b_rows, *b_panel;
    float *scales, *zeros;
    uint8_t* raw;
    float* levels;
    const uint8_t** ahead;
    uint32_t* c;    // [rows, c_stride]: fp32 or int32
    int64_t* wide;  // [rows, c_stride]
    int64_t c_stride;
    Sums b_sums;              // [segments of a chunk, nr]
    float *col_scale, *bias;  // [columns of a group]

    size_t place(const Plan& plan, const Corrections& need, int nr, int64_t rows, uint8_t* base) {
        Parts parts(base);
        c_stride = kGroup * nr + 16;
        parts.take(b_rows, nr * kTileStride);
        parts.take(b_panel, nr * kTileDepth);
        parts.take(scales, kMaxPanelBlocks * nr);
        parts.take(zeros, kMaxPanelBlocks * nr);
        parts.take(raw, kRawBytes);
        parts.take(levels, kMaxBlocks);
        parts.take(ahead, nr * kMaxLines + kAheadPad);
        parts.take(c, rows * c_stride);
        if (plan.wide) parts.take(wide, rows * c_stride);
        parts.take(col_scale, kGroup * nr);
        parts.take(bias, kGroup * nr);
        const int64_t segments = plan.scaled ? kTileDepth : 1;
        b_sums.stride = nr;
        if (plan.scaled) parts.take(b_sums.scale, segments * nr);
        if (need.b_zeros) parts.take(b_sums.zero, segments * nr);
        if (need.a_zeros) parts.take(b_sums.sum, segments * nr);
        return parts.used();
    }
};

}  // namespace lowbit::cpu::mm
