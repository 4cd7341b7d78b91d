// The parts of a tensor-core product that do not depend on the format: asynchronous copies, fragment loads, mma.sync.
//
// A block of 256 threads computes 128 x 128 outputs; a warp 32 x 64 of them. Along K a step is one shared-memory tile
// row of 64 bytes: 32 bf16 or 64 eight-bit elements, two mma instructions deep.
#pragma once

#include <cstdint>

#include "cuda/block.cuh"
#include "cuda/ptx.cuh"

namespace lowbit {
namespace cuda {

constexpr int kTileM = 128, kTileN = 128, kMmThreads = 256;
constexpr int kTileBytes = 64;               // of one row along K
constexpr int kTilePitch = kTileBytes + 16;  // an odd number of 16-byte units: ldmatrix reads without bank conflicts
constexpr int kRawPitch = 64;                // a row of codes not yet decoded
constexpr int kMt = 2, kNt = 8;              // mma tiles (16 x 8) of a warp along M and N

// Rows of K-contiguous bytes in global memory, as a tile loader sees them.
struct Rows {
    const uint8_t* data;
    int64_t pitch;      // bytes between rows
    int64_t row_bytes;  // bytes that hold data in a row
    int64_t rows;
    int align;  // 16, 8, 4: what base and pitch are multiples of; 1: less than 4

    __device__ __forceinline__ int valid(int64_t row, int64_t at, int want) const {
        const int64_t left = row < rows ? row_bytes - at : 0;
        return left <= 0 ? 0 : left < want ? static_cast<int>(left) : want;
    }
};

// Loads bytes [at, at + width) of 128 rows from `first` into `to` (`pitch` bytes a row), zeros beyond the matrix.
// `width` is a multiple of 4. Two threads share a row.
template <int Bytes>
__device__ __forceinline__ void load_rows_async(uint8_t* to, int pitch, const Rows& from, int64_t first, int64_t at,
                                                int width) {
    const int row = threadIdx.x >> 1;
    const uint8_t* source = from.data + (first + row) * from.pitch + at;
    for (int c = (threadIdx.x & 1) * Bytes; c < width; c += 2 * Bytes) {
        const int valid = from.valid(first + row, at + c, Bytes);
        copy_async<Bytes>(to + row * pitch + c, valid > 0 ? source + c : from.data, valid);
    }
}

__device__ __forceinline__ void load_rows(uint8_t* to, int pitch, const Rows& from, int64_t first, int64_t at,
                                          int width) {
    if (from.align == 16 && width % 16 == 0) {
        load_rows_async<16>(to, pitch, from, first, at, width);
    } else if (from.align >= 8 && width % 8 == 0) {
        load_rows_async<8>(to, pitch, from, first, at, width);
    } else if (from.align >= 4) {
        load_rows_async<4>(to, pitch, from, first, at, width);
    } else {  // no asynchronous copy of single bytes exists
        const int row = threadIdx.x >> 1;
        const uint8_t* source = from.data + (first + row) * from.pitch + at;
        for (int c = (threadIdx.x & 1) * 4; c < width; c += 8) {
            const int valid = from.valid(first + row, at + c, 4);
            uint32_t word = 0;
            for (int b = 0; b < valid; ++b) word |= static_cast<uint32_t>(source[c + b]) << (8 * b);
            *reinterpret_cast<uint32_t*>(to + row * pitch + c) = word;
        }
    }
}

// Each mma kind: its accumulator, the bytes of an element, and `step`, which adds the product over 32 bytes of K to
// `c`.

struct MmaBf16 {
    using Acc = float;
    static constexpr bool kFp8 = false;
    static constexpr int kElementBytes = 2;
    static __device__ __forceinline__ void step(Acc (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_bf16(c, a, b0, b1);
    }
};

struct MmaInt8 {
    using Acc = int32_t;
    static constexpr bool kFp8 = false;
    static constexpr int kElementBytes = 1;
    static __device__ __forceinline__ void step(Acc (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_int8(c, a, b0, b1);
    }
};

// Every instruction starts from zero and its 32 products' sum is added in fp32, so that no long sum stays in a narrow
// accumulator. sm_90 and sm_100 have no fp8 mma.sync: ptxas unpacks to fp16 (exact, as are the products in fp32) and
// issues HMMA, which check_sass.py holds. sm_89 and sm_120 issue QMMA, whose accumulator keeps about 13 fraction bits
// of the largest product (measured on Ada and Hopper in arXiv 2411.10958): one such sum errs by up to
// 32 * 2^-13 * max|a_i b_i|, so there the launcher takes the bf16 kernel.
template <bool A52, bool B52>
struct MmaFp8 {
    using Acc = float;
    static constexpr bool kFp8 = true;
    static constexpr int kElementBytes = 1;
    static __device__ __forceinline__ void step(Acc (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        float d[4] = {};
        mma_fp8<A52, B52>(d, a, b0, b1);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = __fadd_rn(c[i], d[i]);
    }
};

}  // namespace cuda
}  // namespace lowbit
