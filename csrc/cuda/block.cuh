// How a scheme's blocks lie on a matrix, the maxima that their scales are made from, and scales in memory.
#pragma once

#include <cuda_runtime.h>

#include "common/scales.h"
#include "cuda/codec/element.cuh"

namespace lowbit {
namespace cuda {

// What a scale depends on: the largest magnitude bits among a block's negative and its other elements. Inf and NaN win,
// since the maximum is an integer's.
struct Extremes {
    uint32_t negative, positive;

    LOWBIT_HD void add(uint32_t bits) {
        const uint32_t magnitude = bits & kMagnitude;
        if ((bits & kSign) != 0) {
            negative = magnitude > negative ? magnitude : negative;
        } else {
            positive = magnitude > positive ? magnitude : positive;
        }
    }
    LOWBIT_HD void add(const Extremes& other) {
        negative = other.negative > negative ? other.negative : negative;
        positive = other.positive > positive ? other.positive : positive;
    }
    LOWBIT_HD uint32_t amax() const { return negative > positive ? negative : positive; }
};

// A scheme as kernels take it: block sizes clipped to the matrix.
struct Blocks {
    Codec codec;
    uint32_t rows, cols;              // of a block
    uint32_t block_rows, block_cols;  // numbers of blocks
    ScaleRule rule;
    bool whole_octets;         // no octet holds elements of two blocks
    bool global_scale_by_row;  // each row has a global scale of its own

    LOWBIT_HD int64_t index(uint32_t row, uint32_t col) const {
        return static_cast<int64_t>(row / rows) * block_cols + col / cols;
    }
};

__device__ __forceinline__ void write_scale(const Scales& to, const Blocks& b, int64_t index, const BlockScale& scale) {
    lowbit::write_scale(to.scale, to.zero_point, index, b.rule, scale);
}

// The global scale above block number `index`, or null.
__device__ __forceinline__ const float* global_scale_at(const Scales& scales, const Blocks& b, int64_t index) {
    return b.global_scale_by_row ? scales.global_scale + index / b.block_cols : scales.global_scale;
}

__device__ __forceinline__ BlockScale read_scale(const Scales& from, const Blocks& b, int64_t index) {
    return lowbit::read_scale(from.scale, from.zero_point, global_scale_at(from, b, index), index, b.rule);
}

inline const char* make_blocks(const SchemeParams& scheme, int64_t rows, int64_t cols, Blocks* blocks) {
    const char* error = make_codec(scheme.format, &blocks->codec);
    if (error != nullptr) return error;
    if (rows > INT32_MAX || cols > INT32_MAX) return "lowbit CUDA kernels take at most 2^31 - 1 rows and columns";
    Blocks& b = *blocks;
    b.rows = static_cast<uint32_t>(scheme.block_rows < rows ? scheme.block_rows : rows);
    b.cols = static_cast<uint32_t>(scheme.block_cols < cols ? scheme.block_cols : cols);
    b.block_rows = static_cast<uint32_t>((rows + b.rows - 1) / b.rows);
    b.block_cols = static_cast<uint32_t>((cols + b.cols - 1) / b.cols);
    b.rule = scale_rule(scheme);
    b.whole_octets = b.block_cols == 1 || b.cols % 8 == 0;
    b.global_scale_by_row = scheme.global_scale == kGlobalScaleRow;
    return nullptr;
}

}  // namespace cuda
}  // namespace lowbit
