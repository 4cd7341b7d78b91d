// Gradients of scales that are given, and of their zero points: sums over their blocks, always in the same order
// (docs/numerics.md section 10).
//
// A block is cut into pieces of kPiece elements, row by row; a team of threads sums each, and where a block has
// several, a second kernel adds their sums.
#include "cuda/quantize/quantize.cuh"

namespace lowbit {
namespace cuda {
namespace {

constexpr uint32_t kPiece = 8192;

uint32_t pieces_of(const Blocks& b) {
    return static_cast<uint32_t>((static_cast<uint64_t>(b.rows) * b.cols + kPiece - 1) / kPiece);
}

// The sum over all threads of a team of `size` (a power of two up to a warp, or the whole block of threads).
__device__ __forceinline__ float sum_team(float mine, uint32_t size) {
    __shared__ float of_warp[kThreads / 32];
    for (uint32_t lane = (size < 32 ? size : 32) / 2; lane > 0; lane /= 2) {
        mine += float_of(__shfl_xor_sync(~0u, bits_of(mine), lane));
    }
    if (size <= 32) return mine;
    __syncthreads();  // the previous piece's sums have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) sum += of_warp[w];
    return sum;
}

// What one element adds to the gradient of its scale, and to that of its zero point.
struct Slope {
    float scale, zero_point;
};
template <int Kind>
__device__ __forceinline__ Slope slope(const QuantizeArgs& args, const BlockScale& scale, uint32_t row, uint32_t col) {
    const Blocks& b = args.blocks;
    const Matrix &x = args.x, &grad = args.sink.grad;
    const float from = float_of(load_bits(x.data, x.dtype, row * x.pitch + col));
    const float v = quotient(from, divisor_of(scale.value));
    const uint32_t code = encode_element<Kind, false>(v, b.codec, scale.zero_point, true, 0);
    const float level = float_of(decode_element<Kind>(code, b.codec)) - scale.zero_point;
    const bool kept = in_range<Kind>(v, b.codec, scale.zero_point, b.rule.divisor);
    const float from_above = float_of(load_bits(grad.data, grad.dtype, row * grad.pitch + col));
    return {(kept ? level - v : level) * from_above, kept ? 0.0f : -scale.value * from_above};
}

// The sum of every piece, [blocks, pieces], `total` in all; with zero points as many of theirs after them.
template <int Kind>
__global__ void __launch_bounds__(kThreads) slopes_kernel(const __grid_constant__ QuantizeArgs args, uint32_t pieces,
                                                          uint32_t team, uint32_t total, float* __restrict__ sums) {
    const Blocks& b = args.blocks;
    const uint32_t mine = threadIdx.x % team, teams = kThreads / team;
    const uint32_t rows = static_cast<uint32_t>(args.x.rows), cols = static_cast<uint32_t>(args.x.cols);
    for (uint32_t first = blockIdx.x * teams; first < total; first += gridDim.x * teams) {
        const uint32_t at = first + threadIdx.x / team;
        float sum = 0.0f, zero_sum = 0.0f;
        if (at < total) {
            const uint32_t block = at / pieces, top = block / b.block_cols * b.rows,
                           left = block % b.block_cols * b.cols;
            const uint32_t height = rows - top < b.rows ? rows - top : b.rows;
            const uint32_t width = cols - left < b.cols ? cols - left : b.cols;
            const uint64_t begin = static_cast<uint64_t>(at % pieces) * kPiece;
            const uint64_t size = static_cast<uint64_t>(height) * width, rest = size > begin ? size - begin : 0;
            const uint32_t count = rest < kPiece ? static_cast<uint32_t>(rest) : kPiece;
            const uint32_t down = top + static_cast<uint32_t>(begin / width);
            const uint32_t skip = static_cast<uint32_t>(begin % width);
            const BlockScale scale = read_scale(args.scales, b, block);
            for (uint32_t i = mine; i < count; i += team) {
                const Slope one = slope<Kind>(args, scale, down + (skip + i) / width, left + (skip + i) % width);
                sum += one.scale;
                zero_sum += one.zero_point;
            }
        }
        sum = sum_team(sum, team);
        if (at < total && mine == 0) sums[at] = sum;
        if (!b.rule.affine) continue;
        zero_sum = sum_team(zero_sum, team);
        if (at < total && mine == 0) sums[total + at] = zero_sum;
    }
}

__global__ void __launch_bounds__(kThreads)
    pieces_kernel(const float* __restrict__ sums, uint32_t pieces, float* __restrict__ out) {
    const float* of_block = sums + static_cast<int64_t>(blockIdx.x) * pieces;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < pieces; i += kThreads) sum += of_block[i];
    sum = sum_team(sum, kThreads);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

template <int Kind, int Mode>
struct Run {
    static const char* run(const QuantizeArgs& args, uint32_t pieces, uint32_t team, uint32_t total, float* sums,
                           cudaStream_t stream) {
        const uint32_t threads = total > UINT32_MAX / team ? UINT32_MAX : total * team;
        return launch(slopes_kernel<Kind>, grid_of(threads), kThreads, 0, stream, args, pieces, team, total, sums);
    }
};

}  // namespace

int64_t slopes_scratch(const Blocks& b) {
    const int64_t pieces = pieces_of(b), blocks = static_cast<int64_t>(b.block_rows) * b.block_cols;
    return pieces == 1 ? 0 : (b.rule.affine ? 2 : 1) * blocks * pieces * static_cast<int64_t>(sizeof(float));
}

const char* launch_slopes(const QuantizeArgs& args, float* grad_scale, void* scratch, cudaStream_t stream) {
    const Blocks& b = args.blocks;
    const uint32_t pieces = pieces_of(b), size = b.rows * b.cols;
    const uint64_t blocks = static_cast<uint64_t>(b.block_rows) * b.block_cols;
    if (blocks * pieces > INT32_MAX)
        return "lowbit CUDA kernels take at most 2^31 - 1 blocks; split the tensor by rows";
    uint32_t team = pieces > 1 || size > 1024 ? kThreads : 1;
    while (team < 32 && team < size) team *= 2;
    float* sums = pieces > 1 ? static_cast<float*>(scratch) : grad_scale;
    const uint32_t total = static_cast<uint32_t>(blocks) * pieces;
    const char* error = for_kind<Run, kGradient>(b.codec.format.kind, args, pieces, team, total, sums, stream);
    if (error != nullptr || pieces == 1) return error;
    const uint32_t outputs = static_cast<uint32_t>(blocks) * (b.rule.affine ? 2 : 1);
    return launch(pieces_kernel, outputs, kThreads, 0, stream, sums, pieces, grad_scale);
}

}  // namespace cuda
}  // namespace lowbit
