// Quantizing octets, shared by the one-pass kernel (scales and codes together) and the kernel that is given scales.
#pragma once

#include "cuda/block.cuh"

namespace lowbit {
namespace cuda {

// Where results go: packed codes, or (fake quantization) the decoded values, or the gradients that get through.
struct Sink {
    Codes codes;  // data null: values
    Matrix values;
    bool aligned;
    Matrix grad;  // of the values, for gradients
};

// What kernels make of elements: codes by one of the roundings of common/params.h, or this.
constexpr int kGradient = 2;

struct QuantizeArgs {
    Matrix x;
    bool x_aligned;
    Scales scales;  // scale null: computed scales are not kept
    Sink sink;
    Blocks blocks;
    bool dynamic;  // scales come from x itself: a NaN scale makes canonical codes
    Rng rng;
};

inline Sink sink_of(const Codes& codes, int bits) { return {codes, {}, codes_aligned(codes, bits), {}}; }
inline Sink sink_of(const Matrix& values) { return {{}, values, octets_aligned(values), {}}; }
inline Sink sink_of(const Matrix& values, const Matrix& grad) {
    return {{}, values, octets_aligned(values) && octets_aligned(grad), grad};
}

// The code of one element of a block.
template <int Kind, bool Stochastic>
LOWBIT_HD uint32_t quantize_element(uint32_t bits, const BlockScale& scale, const Codec& codec, bool dynamic,
                                    uint32_t noise) {
    if (dynamic && is_nan(bits_of(scale.value))) return canonical_code<Kind>(codec);
    const float v = quotient(float_of(bits), divisor_of(scale.value));
    return encode_element<Kind, Stochastic>(v, codec, scale.zero_point, true, noise);
}

// Encodes and stores `count` elements from (row, col). `scale_at(j)` is the scale of the j-th.
template <int Kind, int Mode, class ScaleAt>
__device__ __forceinline__ void quantize_octet(const uint32_t (&bits)[8], const QuantizeArgs& args, uint32_t row,
                                               uint32_t col, int count, ScaleAt scale_at) {
    const Codec& codec = args.blocks.codec;
    constexpr bool kNoisy = Mode == kStochastic;
    uint32_t noise[8] = {}, out[8] = {};
    if (kNoisy) noise_octet(noise, args.rng.offset + row * args.rng.pitch + col, args.rng);
    const bool coded = args.sink.codes.data != nullptr;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j >= count) continue;
        const BlockScale scale = scale_at(j);
        out[j] = quantize_element<Kind, kNoisy>(bits[j], scale, codec, args.dynamic, noise[j]);
        if (!coded) out[j] = scale_element(decode_element<Kind>(out[j], codec), scale.zero_point, scale.value);
    }
    if (coded) {
        const int width = codec.format.bits;
        store_codes(join_codes(out, width), args.sink.codes, args.sink.aligned, width, row, col, count);
    } else {
        store_octet(out, args.sink.values, args.sink.aligned, row, col, count);
    }
}

// The gradients of `count` elements from (row, col): those that come, where the element is in range.
template <int Kind, class ScaleAt>
__device__ __forceinline__ void gradient_octet(const uint32_t (&bits)[8], const QuantizeArgs& args, uint32_t row,
                                               uint32_t col, int count, ScaleAt scale_at) {
    const Blocks& b = args.blocks;
    uint32_t kept = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j >= count) continue;
        const BlockScale scale = scale_at(j);
        const float v = quotient(float_of(bits[j]), divisor_of(scale.value));
        kept |= static_cast<uint32_t>(in_range<Kind>(v, b.codec, scale.zero_point, b.rule.divisor)) << j;
    }
    const Sink& sink = args.sink;
    if (sink.grad.dtype == Dtype::kFloat32) {
        select_octet<uint32_t>(sink.grad, sink.values, sink.aligned, row, col, count, kept);
    } else {
        select_octet<uint16_t>(sink.grad, sink.values, sink.aligned, row, col, count, kept);
    }
}

template <int Kind, int Mode, class ScaleAt>
__device__ __forceinline__ void finish_octet(const uint32_t (&bits)[8], const QuantizeArgs& args, uint32_t row,
                                             uint32_t col, int count, ScaleAt scale_at) {
    if constexpr (Mode == kGradient) {
        gradient_octet<Kind>(bits, args, row, col, count, scale_at);
    } else {
        quantize_octet<Kind, Mode>(bits, args, row, col, count, scale_at);
    }
}

// Calls `run` with the format's kind and the mode as compile-time constants.
template <template <int, int> class Run, int Mode, class... Args>
const char* for_kind(int kind, const Args&... args) {
    if (kind == kKindFloat) return Run<kKindFloat, Mode>::run(args...);
    if (kind == kKindInteger) return Run<kKindInteger, Mode>::run(args...);
    if (kind != kKindCodebook) return "lowbit: e8m0 holds scales, not elements";
    return Run<kKindCodebook, Mode>::run(args...);
}

template <template <int, int> class Run, class... Args>
const char* for_mode(int kind, int mode, const Args&... args) {
    if (mode == kGradient) return for_kind<Run, kGradient>(kind, args...);
    return mode == kStochastic ? for_kind<Run, kStochastic>(kind, args...) : for_kind<Run, kNearest>(kind, args...);
}

// quantize_fused.cu: whether one pass serves these blocks, and that pass.
bool is_fused(const Blocks& blocks);
const char* launch_fused(const QuantizeArgs& args, int mode, cudaStream_t stream);

// quantize_given.cu: codes for the scales in `args.scales`, for blocks of any shape.
const char* launch_given(const QuantizeArgs& args, int mode, cudaStream_t stream);

// extremes.cu: the maxima of every block into `extremes` (cleared first); `finite` leaves Inf and NaN out.
const char* launch_extremes(const Matrix& x, const Blocks& blocks, bool finite, Extremes* extremes,
                            cudaStream_t stream);
// Scales of all blocks from their maxima.
const char* launch_scales(const Extremes* extremes, const Blocks& blocks, const Scales& scales, cudaStream_t stream);
const char* launch_range(const Extremes* extremes, const Blocks& blocks, float* low, float* high, cudaStream_t stream);
// Global scales of blocks that are each what one spans.
const char* launch_global_scale(const Extremes* extremes, const Blocks& blocks, float* out, cudaStream_t stream);

// backward.cu: the gradients of the scales in `args.scales`, and the bytes of scratch that they take.
int64_t slopes_scratch(const Blocks& blocks);
const char* launch_slopes(const QuantizeArgs& args, float* grad_scale, void* scratch, cudaStream_t stream);

}  // namespace cuda
}  // namespace lowbit
