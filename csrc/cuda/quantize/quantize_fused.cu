// Scales, and with them codes, values or gradients, in one pass over memory, for blocks that are many and small enough
// for one team of threads each: rows, groups along rows, MX, NVFP4 and tiles. A team reads its block twice, the second
// time from cache or registers.
#include "cuda/quantize/quantize.cuh"

namespace lowbit {
namespace cuda {
namespace {

// The octets of one block: `wide` a row, `total` in all.
struct Region {
    uint32_t row, col, col_end, wide, total;
};

__device__ __forceinline__ Region region_of(const Blocks& b, const Matrix& x, uint32_t block) {
    Region out;
    out.row = block / b.block_cols * b.rows;
    out.col = block % b.block_cols * b.cols;
    const uint32_t rows = static_cast<uint32_t>(x.rows), cols = static_cast<uint32_t>(x.cols);
    const uint32_t row_end = rows - out.row < b.rows ? rows : out.row + b.rows;
    out.col_end = cols - out.col < b.cols ? cols : out.col + b.cols;
    out.wide = (out.col_end - out.col + 7) / 8;
    out.total = out.wide * (row_end - out.row);
    return out;
}

struct Octet {
    uint32_t row, col;
    int count;
};

__device__ __forceinline__ Octet octet_of(const Region& region, uint32_t index) {
    const uint32_t down = index / region.wide;
    const uint32_t col = region.col + 8 * (index - down * region.wide);
    const uint32_t left = region.col_end - col;
    return {region.row + down, col, left < 8 ? static_cast<int>(left) : 8};
}

// The maxima over all threads of a team of `size` (a power of two up to a warp, or the whole block of threads).
__device__ __forceinline__ Extremes reduce(Extremes mine, uint32_t size) {
    __shared__ Extremes of_warp[kThreads / 32];
    for (uint32_t lane = (size < 32 ? size : 32) / 2; lane > 0; lane /= 2) {
        mine.add({__shfl_xor_sync(~0u, mine.negative, lane), __shfl_xor_sync(~0u, mine.positive, lane)});
    }
    if (size <= 32) return mine;
    __syncthreads();  // the previous block's maxima have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) mine.add(of_warp[w]);
    return mine;
}

// Two blocks a multiprocessor at least: told nothing, ptxas for sm_100 and sm_120 keeps to 64 registers, and spills.
template <int Kind, int Mode>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_fused_kernel(const __grid_constant__ QuantizeArgs args, uint32_t team, uint32_t num_blocks) {
    const Blocks& b = args.blocks;
    const uint32_t mine = threadIdx.x % team, teams = kThreads / team;
    // Every thread of a block makes the same number of turns, since teams meet in shuffles and barriers.
    for (uint32_t first = blockIdx.x * teams; first < num_blocks; first += gridDim.x * teams) {
        const uint32_t block = first + threadIdx.x / team;
        const bool there = block < num_blocks;
        const Region region = there ? region_of(b, args.x, block) : Region{};
        Extremes extremes = {0, 0};
        uint32_t bits[8] = {};
        Octet octet = {};
        uint32_t at = mine;
        for (uint32_t next = mine; next < region.total; next += team) {
            at = next;
            octet = octet_of(region, at);
            load_octet(bits, args.x, args.x_aligned, octet.row, octet.col, octet.count);
#pragma unroll
            for (int j = 0; j < 8; ++j) extremes.add(bits[j]);
        }
        extremes = reduce(extremes, team);
        const BlockScale scale = make_scale(extremes.positive, extremes.negative, b.rule,
                                            global_scale_at(args.scales, b, there ? block : first));
        if (there && mine == 0 && args.scales.scale != nullptr) write_scale(args.scales, b, block, scale);
        // Backwards, so that the octet read last is still in registers.
        while (at < region.total) {
            finish_octet<Kind, Mode>(bits, args, octet.row, octet.col, octet.count, [&](int) { return scale; });
            if (at < team) break;
            at -= team;
            octet = octet_of(region, at);
            load_octet(bits, args.x, args.x_aligned, octet.row, octet.col, octet.count);
        }
    }
}

template <int Kind, int Mode>
struct Run {
    static const char* run(const QuantizeArgs& args, uint32_t team, uint32_t num_blocks, cudaStream_t stream) {
        const uint32_t grid = grid_of(num_blocks > UINT32_MAX / team ? UINT32_MAX : num_blocks * team);
        return launch(quantize_fused_kernel<Kind, Mode>, grid, kThreads, 0, stream, args, team, num_blocks);
    }
};

// Threads for a block of that many octets: up to a warp takes at most four octets a thread, else a block of threads.
uint32_t team_of(uint64_t octets) {
    if (octets > 128) return kThreads;
    uint32_t team = 1;
    while (team < octets && team < 32) team *= 2;
    return team;
}

}  // namespace

bool is_fused(const Blocks& b) {
    const uint64_t octets = static_cast<uint64_t>(b.rows) * ((b.cols + 7) / 8);
    const uint64_t blocks = static_cast<uint64_t>(b.block_rows) * b.block_cols;
    // A block that one team would read for long, while other multiprocessors idle, takes two passes instead.
    return b.whole_octets && blocks <= INT32_MAX && (octets <= 4096 || (blocks >= 256 && octets <= (1u << 20)));
}

const char* launch_fused(const QuantizeArgs& args, int mode, cudaStream_t stream) {
    const Blocks& b = args.blocks;
    const uint32_t team = team_of(static_cast<uint64_t>(b.rows) * ((b.cols + 7) / 8));
    return for_mode<Run>(b.codec.format.kind, mode, args, team, b.block_rows * b.block_cols, stream);
}

}  // namespace cuda
}  // namespace lowbit
