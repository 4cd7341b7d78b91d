// Codes, fake-quantized values or their gradients for scales that are already in memory: static scales, and the second
// pass over blocks too large or too narrow for the one-pass kernel.
#include "cuda/quantize/quantize.cuh"

namespace lowbit {
namespace cuda {
namespace {

template <int Kind, int Mode>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_given_kernel(const __grid_constant__ QuantizeArgs args, const Octets octets) {
    const Blocks& b = args.blocks;
    const uint32_t cols = static_cast<uint32_t>(args.x.cols);
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < octets.total; i += gridDim.x * kThreads) {
        const uint32_t row = i / octets.per_row, col = 8 * (i - row * octets.per_row);
        const int count = cols - col < 8 ? static_cast<int>(cols - col) : 8;
        uint32_t bits[8];
        load_octet(bits, args.x, args.x_aligned, row, col, count);
        BlockScale scale = read_scale(args.scales, b, b.index(row, col));
        finish_octet<Kind, Mode>(bits, args, row, col, count, [&](int j) {
            if (!b.whole_octets && j > 0 && (col + j) % b.cols == 0) {
                scale = read_scale(args.scales, b, b.index(row, col + j));
            }
            return scale;
        });
    }
}

template <int Kind, int Mode>
struct Run {
    static const char* run(const QuantizeArgs& args, const Octets& octets, cudaStream_t stream) {
        return launch(quantize_given_kernel<Kind, Mode>, grid_of(octets.total), kThreads, 0, stream, args, octets);
    }
};

}  // namespace

const char* launch_given(const QuantizeArgs& args, int mode, cudaStream_t stream) {
    Octets octets;
    const char* error = make_octets(args.x.rows, args.x.cols, &octets);
    if (error != nullptr) return error;
    return for_mode<Run>(args.blocks.codec.format.kind, mode, args, octets, stream);
}

}  // namespace cuda
}  // namespace lowbit
