// Maxima of blocks of any shape, scales from them, and the global scale: the first of two passes.
#include "cuda/quantize/quantize.cuh"

namespace lowbit {
namespace cuda {
namespace {

constexpr uint32_t kRowsAThread = 32;
constexpr uint32_t kColumnThreads = 32, kRowThreads = 8;

// Adds a thread's maxima to its block's. A warp whose threads all have the same block sends one atomic, not 32.
__device__ __forceinline__ void publish(Extremes mine, Extremes* to, bool active) {
    const unsigned lanes = __ballot_sync(~0u, active);
    if (!active) return;
    int same = 0;
    __match_all_sync(lanes, reinterpret_cast<unsigned long long>(to), &same);
    if (same != 0) {
        mine = {__reduce_max_sync(lanes, mine.negative), __reduce_max_sync(lanes, mine.positive)};
        if (static_cast<int>(threadIdx.x) != __ffs(static_cast<int>(lanes)) - 1) return;
    }
    if (mine.negative != 0) atomicMax(&to->negative, mine.negative);
    if (mine.positive != 0) atomicMax(&to->positive, mine.positive);
}

// A thread takes `Width` neighbouring columns, which lie in one block, of up to kRowsAThread rows of that block.
// Warps lie along columns, and so read whole lines.
template <int Width>
__global__ void __launch_bounds__(kThreads)
    extremes_kernel(const __grid_constant__ Matrix x, bool aligned, const __grid_constant__ Blocks b, bool finite,
                    uint32_t chunks, Extremes* __restrict__ extremes) {
    const uint32_t rows = static_cast<uint32_t>(x.rows), cols = static_cast<uint32_t>(x.cols);
    const uint32_t col = (blockIdx.x * kColumnThreads + threadIdx.x) * Width;
    const uint32_t per_block = (b.rows + kRowsAThread - 1) / kRowsAThread;  // chunks of a block's rows
    for (uint32_t first = blockIdx.y * kRowThreads; first < chunks; first += gridDim.y * kRowThreads) {
        const uint32_t chunk = first + threadIdx.y, down = chunk / per_block;
        const uint32_t begin = down * b.rows + chunk % per_block * kRowsAThread;
        uint32_t end = begin + kRowsAThread;
        end = end < down * b.rows + b.rows ? end : down * b.rows + b.rows;
        end = end < rows ? end : rows;
        const bool active = chunk < chunks && col < cols;
        Extremes mine = {0, 0};
        for (uint32_t row = begin; active && row < end; ++row) {
            uint32_t bits[8] = {};
            if (Width == 8) {
                load_octet(bits, x, aligned, row, col, cols - col < 8 ? static_cast<int>(cols - col) : 8);
            } else {
                bits[0] = load_bits(x.data, x.dtype, row * x.pitch + col);
            }
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                if (!finite || (bits[j] & kMagnitude) < kInf) mine.add(bits[j]);
            }
        }
        publish(mine, active ? extremes + b.index(begin, col) : extremes, active);
    }
}

__global__ void __launch_bounds__(kThreads)
    scales_kernel(const Extremes* __restrict__ extremes, const __grid_constant__ Blocks b,
                  const __grid_constant__ Scales scales, uint32_t num_blocks) {
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < num_blocks; i += gridDim.x * kThreads) {
        const Extremes e = extremes[i];
        write_scale(scales, b, i, make_scale(e.positive, e.negative, b.rule, global_scale_at(scales, b, i)));
    }
}

__global__ void __launch_bounds__(kThreads)
    global_scale_kernel(const Extremes* __restrict__ extremes, const ScaleRule rule, float* __restrict__ out,
                        uint32_t count) {
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
        out[i] = float_of(make_global_scale(extremes[i].amax(), rule));
    }
}

__global__ void __launch_bounds__(kThreads) range_kernel(const Extremes* __restrict__ extremes, float* __restrict__ low,
                                                         float* __restrict__ high, uint32_t count) {
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
        const Extremes e = extremes[i];
        const bool broken = e.amax() >= kInf;
        low[i] = float_of(broken ? kNan : e.negative == 0 ? 0 : e.negative | kSign);
        high[i] = float_of(broken ? kNan : e.positive);
    }
}

}  // namespace

const char* launch_extremes(const Matrix& x, const Blocks& b, bool finite, Extremes* extremes, cudaStream_t stream) {
    const int64_t blocks = static_cast<int64_t>(b.block_rows) * b.block_cols;
    if (blocks > INT32_MAX)
        return "lowbit CUDA kernels take at most 2^31 - 1 blocks; use larger ones or split the tensor";
    const cudaError_t error = cudaMemsetAsync(extremes, 0, static_cast<size_t>(blocks) * sizeof(Extremes), stream);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    const int64_t width = b.whole_octets ? 8 : 1;
    const int64_t chunks = static_cast<int64_t>(b.block_rows) * ((b.rows + kRowsAThread - 1) / kRowsAThread);
    const int64_t across = (x.cols + width * kColumnThreads - 1) / (width * kColumnThreads);
    const int64_t deep = (chunks + kRowThreads - 1) / kRowThreads;
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(deep < 65535 ? deep : 65535));
    const dim3 threads(kColumnThreads, kRowThreads);
    const auto kernel = width == 8 ? extremes_kernel<8> : extremes_kernel<1>;
    return launch(kernel, grid, threads, 0, stream, x, octets_aligned(x), b, finite, static_cast<uint32_t>(chunks),
                  extremes);
}

const char* launch_scales(const Extremes* extremes, const Blocks& b, const Scales& scales, cudaStream_t stream) {
    const uint32_t blocks = b.block_rows * b.block_cols;
    return launch(scales_kernel, grid_of(blocks), kThreads, 0, stream, extremes, b, scales, blocks);
}

const char* launch_range(const Extremes* extremes, const Blocks& b, float* low, float* high, cudaStream_t stream) {
    const uint32_t count = b.block_rows * b.block_cols;
    return launch(range_kernel, grid_of(count), kThreads, 0, stream, extremes, low, high, count);
}

const char* launch_global_scale(const Extremes* extremes, const Blocks& b, float* out, cudaStream_t stream) {
    const uint32_t count = b.block_rows * b.block_cols;
    return launch(global_scale_kernel, grid_of(count), kThreads, 0, stream, extremes, b.rule, out, count);
}

}  // namespace cuda
}  // namespace lowbit
