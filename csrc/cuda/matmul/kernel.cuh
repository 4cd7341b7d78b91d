// The tensor-core product itself: a [M, K] @ b [N, K].T, scales, bias and one cast. docs/numerics.md section 9.
//
// Stages of a K step: (1) codes arrive in shared memory by cp.async while the step before computes; (2) `Decode`: codes
// become elements of the mma's type through a table of 256, else they are those elements already; (3) ldmatrix and mma.
// `Blocked`: scales change along K, so sums are scaled and added to fp32 totals wherever a block of a or b ends.
#pragma once

#include "cuda/matmul/tile.cuh"

namespace lowbit {
namespace cuda {

// One operand: its rows in memory, and what they mean.
struct Side {
    Rows rows;
    int bits;  // of a code; 16: bf16 values, which have no scale
    Blocks blocks;
    Scales scales;

    // The scale of element (row, k).
    __device__ __forceinline__ float scale(int64_t row, int64_t k) const {
        if (bits == 16) return 1.0f;
        return read_scale(scales, blocks, blocks.index(static_cast<uint32_t>(row), static_cast<uint32_t>(k))).value;
    }
};

struct MmArgs {
    Side a, b;
    int64_t m, n, k;
    MmEpilogue epilogue;
};

// Fills `table` with the values of all codes as bf16 (exact: at most 8 significant bits) or int8.
template <int ElementBytes>
__device__ __forceinline__ void fill_table(uint16_t* table, const Side& side) {
    for (int code = threadIdx.x; side.bits <= 8 && code < (1 << side.bits); code += kMmThreads) {
        const uint32_t value = decode_any(static_cast<uint32_t>(code), side.blocks.codec);
        table[code] = ElementBytes == 2 ? static_cast<uint16_t>(value >> 16)
                                        : static_cast<uint8_t>(static_cast<int32_t>(float_of(value)));
    }
}

// 128 rows of codes of `bits` bits in `raw` become elements in `tile`; 16 codes at a time, which start on a 16-bit
// word.
template <int ElementBytes>
__device__ __forceinline__ void decode_rows(uint8_t* tile, const uint8_t* raw, const uint16_t* table, int bits) {
    constexpr int kGroups = kTileBytes / ElementBytes / 16;
    for (int g = threadIdx.x; g < 128 * kGroups; g += kMmThreads) {
        const int row = g / kGroups, group = g % kGroups;
        const uint16_t* from = reinterpret_cast<const uint16_t*>(raw + row * kRawPitch) + group * bits;
        uint32_t packed[4 * ElementBytes] = {};
        if (bits == 16) {
#pragma unroll
            for (int i = 0; i < 4 * ElementBytes; ++i) packed[i] = reinterpret_cast<const uint32_t*>(from)[i];
        } else {
            uint32_t window = 0;
            int have = 0;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                if (have < bits) {
                    window |= static_cast<uint32_t>(*from++) << have;
                    have += 16;
                }
                const uint32_t element = table[window & ((1u << bits) - 1)];
                packed[j * ElementBytes / 4] |= element << (8 * ElementBytes * (j % (4 / ElementBytes)));
                window >>= bits;
                have -= bits;
            }
        }
        uint4* to = reinterpret_cast<uint4*>(tile + row * kTilePitch + group * 16 * ElementBytes);
#pragma unroll
        for (int i = 0; i < ElementBytes; ++i) {
            to[i] = make_uint4(packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
        }
    }
}

// One mma depth (32 bytes of K) of the warp's 32 x 64 tile.
template <class Mma>
__device__ __forceinline__ void multiply(typename Mma::Acc (&acc)[kMt][kNt][4], const uint8_t* a, const uint8_t* b) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int a_row = (warp & 3) * 32 + (lane & 15), a_byte = (lane >> 4) * 16;
    const int b_row = (warp >> 2) * 64 + (lane & 7) + ((lane >> 4) << 3), b_byte = ((lane >> 3) & 1) * 16;
    uint32_t af[kMt][4];
#pragma unroll
    for (int i = 0; i < kMt; ++i) load_matrices(af[i], a + (a_row + 16 * i) * kTilePitch + a_byte);
#pragma unroll
    for (int j = 0; j < kNt; j += 2) {
        uint32_t bf[4];
        load_matrices(bf, b + (b_row + 8 * j) * kTilePitch + b_byte);
#pragma unroll
        for (int i = 0; i < kMt; ++i) {
            Mma::step(acc[i][j], af[i], bf[0], bf[1]);
            Mma::step(acc[i][j + 1], af[i], bf[2], bf[3]);
        }
    }
}

// Adds a finished block's sums, scaled by both sides' scales, to the totals; no FMA. scales: [128 of a, 128 of b].
__device__ __forceinline__ void promote(float (&total)[kMt][kNt][4], float (&acc)[kMt][kNt][4], const float* scales) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float* sa = scales + (warp & 3) * 32 + (lane >> 2);
    const float* sb = scales + kTileM + (warp >> 2) * 64 + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
#pragma unroll
        for (int j = 0; j < kNt; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float s = __fmul_rn(sa[16 * i + 8 * (e >> 1)], sb[8 * j + (e & 1)]);
                total[i][j][e] = __fadd_rn(total[i][j][e], __fmul_rn(acc[i][j][e], s));
                acc[i][j][e] = 0.0f;
            }
        }
    }
}

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(int32_t x) { return __int2float_rn(x); }

// fp32(acc) * fp32(scale_a * scale_b), + bias, one cast; NaN canonical.
__device__ __forceinline__ void store_result(const MmArgs& args, int64_t row, int64_t col, float y, float sa, float sb,
                                             bool scaled) {
    if (row >= args.m || col >= args.n) return;
    const MmEpilogue& to = args.epilogue;
    if (!scaled) y = __fmul_rn(y, __fmul_rn(sa, sb));
    if (to.bias != nullptr) y = __fadd_rn(y, float_of(load_bits(to.bias, to.bias_dtype, col)));
    const uint32_t bits = bits_of(y);
    store_bits(to.out, to.out_dtype, row * args.n + col, is_nan(bits) ? kNan : bits);
}

// Stores the block's sums by way of shared memory, a quarter (32 rows) at a time, so that a warp writes whole lines and
// the epilogue's code exists once. `scales`: [128 of a, 128 of b]; `scaled` sums have theirs already.
template <class Acc>
__device__ __forceinline__ void store_tile(const Acc (&acc)[kMt][kNt][4], const MmArgs& args, float* staged,
                                           const float* scales, int64_t m0, int64_t n0, bool scaled) {
    constexpr int kPitch = kTileN + 8;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* mine = staged + ((warp & 3) * 8 + (lane >> 2)) * kPitch + (warp >> 2) * 64 + (lane & 3) * 2;
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {  // registers need constant indices
            if (q != quarter) continue;
#pragma unroll
            for (int j = 0; j < kNt; ++j) {
                mine[8 * j] = as_float(acc[q >> 1][j][2 * (q & 1)]);
                mine[8 * j + 1] = as_float(acc[q >> 1][j][2 * (q & 1) + 1]);
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int e = threadIdx.x; e < 32 * kTileN; e += kMmThreads) {
            const int col = e % kTileN, line = e / kTileN;
            const int row = (line >> 3) * 32 + 16 * (quarter >> 1) + 8 * (quarter & 1) + (line & 7);
            store_result(args, m0 + row, n0 + col, staged[line * kPitch + col], scales[row], scales[kTileM + col],
                         scaled);
        }
        __syncthreads();
    }
}

// Loads the scales of the block's rows of a and b at k0 (and, for bf16, 16 further on); 0 beyond the matrices. Past K
// stands the last block's scale, since its sums are scaled where the step ends.
__device__ __forceinline__ void load_scales(float* scales, const MmArgs& args, int64_t m0, int64_t n0, int64_t k0,
                                            int depths) {
    const bool is_b = threadIdx.x >= 128;
    const Side& side = is_b ? args.b : args.a;
    const int64_t at = (is_b ? n0 : m0) + (threadIdx.x & 127), rows = is_b ? args.n : args.m;
    for (int depth = 0; depth < depths; ++depth) {
        const int64_t k = k0 + 16 * depth;
        scales[256 * depth + threadIdx.x] = at < rows ? side.scale(at, k < args.k ? k : args.k - 1) : 0.0f;
    }
}

// Whether a block of scales along K ends at `k`.
__device__ __forceinline__ bool ends_block(const Side& side, int64_t k) {
    return side.bits != 16 && static_cast<uint32_t>(k) % side.blocks.cols == 0;
}

template <class Mma, bool Decode, bool Blocked>
__global__ void __launch_bounds__(kMmThreads) mm_kernel(const __grid_constant__ MmArgs args) {
    using Acc = typename Mma::Acc;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    if constexpr (Mma::kFp8) {  // no such instruction; launch_scaled_mm never comes here
        __trap();
        return;
    }
#endif
    constexpr int kStep = kTileBytes / Mma::kElementBytes;               // K elements a tile
    constexpr int kStage = Decode ? 128 * kRawPitch : 128 * kTilePitch;  // bytes of one operand in one stage
    uint8_t* shared = dynamic_shared();
    uint8_t* stages = shared;  // [2][a, b]
    uint8_t* tiles = Decode ? shared + 4 * kStage : nullptr;
    uint16_t* tables = reinterpret_cast<uint16_t*>(tiles + 256 * kTilePitch);
    float* scales = reinterpret_cast<float*>(tables + 512);  // [2 depths][a rows, b rows]
    const int64_t m0 = static_cast<int64_t>(blockIdx.x) * kTileM, n0 = static_cast<int64_t>(blockIdx.y) * kTileN;
    const int a_width = kStep * args.a.bits / 8, b_width = kStep * args.b.bits / 8;  // bytes of a step's codes

    auto load = [&](int64_t step) {
        uint8_t* to = stages + (step & 1) * 2 * kStage;
        constexpr int kPitch = Decode ? kRawPitch : kTilePitch;
        load_rows(to, kPitch, args.a.rows, m0, step * a_width, a_width);
        load_rows(to + kStage, kPitch, args.b.rows, n0, step * b_width, b_width);
    };
    if constexpr (Decode) {
        fill_table<Mma::kElementBytes>(tables, args.a);
        fill_table<Mma::kElementBytes>(tables + 256, args.b);
    }

    Acc acc[kMt][kNt][4] = {};
    float total[Blocked ? kMt : 1][Blocked ? kNt : 1][4] = {};
    const int64_t steps = (args.k + kStep - 1) / kStep;
    load(0);
    for (int64_t step = 0; step < steps; ++step) {
        copy_wait();
        __syncthreads();  // this step's bytes have arrived for all; nobody reads the other stage or the tiles any more
        if (step + 1 < steps) load(step + 1);
        const uint8_t* a = stages + (step & 1) * 2 * kStage;
        const uint8_t* b = a + kStage;
        if constexpr (Decode) {
            decode_rows<Mma::kElementBytes>(tiles, a, tables, args.a.bits);
            decode_rows<Mma::kElementBytes>(tiles + 128 * kTilePitch, b, tables + 256, args.b.bits);
            if constexpr (Blocked) load_scales(scales, args, m0, n0, step * kStep, 2);
            __syncthreads();
            a = tiles;
            b = tiles + 128 * kTilePitch;
        }
#pragma unroll
        for (int depth = 0; depth < 2; ++depth) {
            multiply<Mma>(acc, a + 32 * depth, b + 32 * depth);
            if constexpr (Blocked) {
                const int64_t end = step * kStep + 16 * (depth + 1);
                if (ends_block(args.a, end) || ends_block(args.b, end) || end >= steps * kStep) {
                    promote(total, acc, scales + 256 * depth);
                }
            }
        }
    }
    __syncthreads();  // the last tile has been read: its memory serves the epilogue
    float* staged = reinterpret_cast<float*>(shared);
    scales = staged + 32 * (kTileN + 8);
    if constexpr (Blocked) {
        store_tile(total, args, staged, scales, m0, n0, true);
    } else {
        load_scales(scales, args, m0, n0, 0, 1);
        store_tile(acc, args, staged, scales, m0, n0, false);
    }
}

// Launches `Kernel` over the output; its shared memory passes 48 KB when it decodes.
template <void (*Kernel)(MmArgs), bool Decode>
const char* launch_mm(const MmArgs& args, cudaStream_t stream) {
    constexpr int kShared = Decode ? 4 * 128 * kRawPitch + 256 * kTilePitch + 512 * 2 + 512 * 4 : 4 * 128 * kTilePitch;
    const int64_t tiles_m = (args.m + kTileM - 1) / kTileM, tiles_n = (args.n + kTileN - 1) / kTileN;
    if (tiles_n > 65535) return "scaled_mm: N is over 8,388,480; split the product along N";
    if (kShared > 48 * 1024) {
        const cudaError_t error = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
        if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    const dim3 grid(static_cast<unsigned>(tiles_m), static_cast<unsigned>(tiles_n));
    return launch(Kernel, grid, dim3(kMmThreads), kShared, stream, args);
}

// bf16.cu, int8.cu, fp8.cu
const char* launch_mm_bf16(const MmArgs& args, bool blocked, cudaStream_t stream);
const char* launch_mm_int8(const MmArgs& args, cudaStream_t stream);
const char* launch_mm_fp8(const MmArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace lowbit
