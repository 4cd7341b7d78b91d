// quantize, quantize_static, fake_quantize, its gradient, global_scale and block_range: which kernels run, and with
// what scratch.
#include "cuda/quantize/quantize.cuh"

namespace lowbit {
namespace cuda {
namespace {

int64_t aligned_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Device memory of two-pass quantization: maxima of all blocks, then scales and zero points where nobody keeps them.
struct Scratch {
    int64_t scale_at, zero_point_at, bytes;
};

Scratch scratch_of(const Blocks& b) {
    const int64_t blocks = static_cast<int64_t>(b.block_rows) * b.block_cols;
    const int64_t scale_at = aligned_up(blocks * static_cast<int64_t>(sizeof(Extremes)));
    const int64_t zero_point_at = scale_at + aligned_up(blocks * scale_bytes(b.rule.scale_format));
    return {scale_at, zero_point_at, zero_point_at + blocks};
}

// Scales from x itself, then what `mode` makes of the elements into args.sink.
const char* quantize_dynamic(QuantizeArgs args, int mode, void* scratch, cudaStream_t stream) {
    if (is_fused(args.blocks)) return launch_fused(args, mode, stream);
    const Scratch layout = scratch_of(args.blocks);
    uint8_t* base = static_cast<uint8_t*>(scratch);
    Extremes* extremes = reinterpret_cast<Extremes*>(base);
    if (args.scales.scale == nullptr) {
        args.scales.scale = base + layout.scale_at;
        args.scales.zero_point = base + layout.zero_point_at;
    }
    const char* error = launch_extremes(args.x, args.blocks, false, extremes, stream);
    if (error == nullptr) error = launch_scales(extremes, args.blocks, args.scales, stream);
    return error != nullptr ? error : launch_given(args, mode, stream);
}

const char* make_args(const Matrix& x, const Scales& scales, const Sink& sink, const SchemeParams& scheme,
                      const Rng& rng, bool dynamic, QuantizeArgs* args) {
    args->x = x;
    args->x_aligned = octets_aligned(x);
    args->scales = scales;
    args->sink = sink;
    args->dynamic = dynamic;
    args->rng = rng;
    return make_blocks(scheme, x.rows, x.cols, &args->blocks);
}

}  // namespace

int64_t global_scale_scratch(const SchemeParams& scheme, int64_t rows) {
    return global_scale_count(scheme, rows) * static_cast<int64_t>(sizeof(Extremes));
}

int64_t quantize_scratch(const SchemeParams& scheme, int64_t rows, int64_t cols) {
    Blocks blocks;
    if (make_blocks(scheme, rows, cols, &blocks) != nullptr || is_fused(blocks)) return 0;
    return scratch_of(blocks).bytes;
}

const char* launch_global_scale(const Matrix& x, float* out, const SchemeParams& scheme, void* scratch, void* stream) {
    SchemeParams whole = scheme;  // its blocks are what global scales span
    whole.block_rows = scheme.global_scale == kGlobalScaleRow ? 1 : x.rows;
    whole.block_cols = x.cols;
    Blocks blocks;
    const char* error = make_blocks(whole, x.rows, x.cols, &blocks);
    if (error != nullptr) return error;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    Extremes* extremes = static_cast<Extremes*>(scratch);
    error = launch_extremes(x, blocks, true, extremes, on);
    return error != nullptr ? error : launch_global_scale(extremes, blocks, out, on);
}

int64_t block_range_scratch(const SchemeParams& scheme, int64_t rows, int64_t cols) {
    Blocks b;
    if (make_blocks(scheme, rows, cols, &b) != nullptr) return 0;
    return static_cast<int64_t>(b.block_rows) * b.block_cols * static_cast<int64_t>(sizeof(Extremes));
}

const char* launch_block_range(const Matrix& x, float* low, float* high, const SchemeParams& scheme, void* scratch,
                               void* stream) {
    Blocks blocks;
    const char* error = make_blocks(scheme, x.rows, x.cols, &blocks);
    if (error != nullptr) return error;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    Extremes* extremes = static_cast<Extremes*>(scratch);
    error = launch_extremes(x, blocks, false, extremes, on);
    return error != nullptr ? error : launch_range(extremes, blocks, low, high, on);
}

const char* launch_quantize(const Matrix& x, const Scales& scales, const Codes& out, const SchemeParams& scheme,
                            int rounding, const Rng& rng, void* scratch, void* stream) {
    QuantizeArgs args;
    const char* error = make_args(x, scales, sink_of(out, scheme.format.bits), scheme, rng, true, &args);
    return error != nullptr ? error : quantize_dynamic(args, rounding, scratch, static_cast<cudaStream_t>(stream));
}

const char* launch_quantize_static(const Matrix& x, const Scales& scales, const Codes& out, const SchemeParams& scheme,
                                   int rounding, const Rng& rng, void* stream) {
    QuantizeArgs args;
    const char* error = make_args(x, scales, sink_of(out, scheme.format.bits), scheme, rng, false, &args);
    return error != nullptr ? error : launch_given(args, rounding, static_cast<cudaStream_t>(stream));
}

const char* launch_fake_quantize(const Matrix& x, const Scales& scales, const Matrix& out, const SchemeParams& scheme,
                                 int rounding, const Rng& rng, void* scratch, void* stream) {
    QuantizeArgs args;
    const bool dynamic = scales.scale == nullptr;
    const char* error = make_args(x, scales, sink_of(out), scheme, rng, dynamic, &args);
    if (error != nullptr) return error;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    return dynamic ? quantize_dynamic(args, rounding, scratch, on) : launch_given(args, rounding, on);
}

int64_t fake_quantize_backward_scratch(const SchemeParams& scheme, int64_t rows, int64_t cols, bool dynamic) {
    if (dynamic) return quantize_scratch(scheme, rows, cols);
    Blocks blocks;
    return make_blocks(scheme, rows, cols, &blocks) != nullptr ? 0 : slopes_scratch(blocks);
}

const char* launch_fake_quantize_backward(const Matrix& grad, const Matrix& x, const Scales& scales,
                                          const Matrix& grad_x, float* grad_scale, const SchemeParams& scheme,
                                          void* scratch, void* stream) {
    QuantizeArgs args;
    const bool dynamic = scales.scale == nullptr;
    const char* error = make_args(x, scales, sink_of(grad_x, grad), scheme, {}, dynamic, &args);
    if (error != nullptr) return error;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    if (dynamic) return quantize_dynamic(args, kGradient, scratch, on);
    error = launch_given(args, kGradient, on);
    return error != nullptr || grad_scale == nullptr ? error : launch_slopes(args, grad_scale, scratch, on);
}

}  // namespace cuda
}  // namespace lowbit
