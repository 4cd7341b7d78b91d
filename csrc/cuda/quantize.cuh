// Quantizing octets, shared by the one-pass kernel (scales and codes together) and the kernel that is given scales.
#pragma once

#include "cuda/block.cuh"

namespace lowbit {
namespace cuda {

// Where results go: packed codes, or (fake quantization) the decoded values.
struct Sink {
    Codes codes;  // data null: values
    Matrix values;
    bool aligned;
};

struct QuantizeArgs {
    Matrix x;
    bool x_aligned;
    Scales scales;  // scale null: computed scales are not kept
    Sink sink;
    Blocks blocks;
    bool dynamic;  // scales come from x itself: a NaN scale makes canonical codes
    Rng rng;
};

inline Sink sink_of(const Codes& codes, int bits) { return {codes, {}, codes_aligned(codes, bits)}; }
inline Sink sink_of(const Matrix& values) { return {{}, values, octets_aligned(values)}; }

// The code of one element of a block.
template <int Kind, bool Stochastic>
LOWBIT_HD uint32_t quantize_element(uint32_t bits, const BlockScale& scale, const Codec& codec, bool dynamic,
                                    uint32_t noise) {
    if (dynamic && is_nan(bits_of(scale.value))) return canonical_code<Kind>(codec);
    const float v = quotient(float_of(bits), divisor_of(scale.value));
    return encode_element<Kind, Stochastic>(v, codec, scale.zero_point, true, noise);
}

// Encodes and stores `count` elements from (row, col). `scale_at(j)` is the scale of the j-th.
template <int Kind, bool Stochastic, class ScaleAt>
__device__ __forceinline__ void quantize_octet(const uint32_t (&bits)[8], const QuantizeArgs& args, uint32_t row,
                                               uint32_t col, int count, ScaleAt scale_at) {
    const Codec& codec = args.blocks.codec;
    uint32_t noise[8] = {}, out[8] = {};
    if (Stochastic) noise_octet(noise, args.rng.offset + row * args.rng.pitch + col, args.rng);
    const bool coded = args.sink.codes.data != nullptr;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (j >= count) continue;
        const BlockScale scale = scale_at(j);
        out[j] = quantize_element<Kind, Stochastic>(bits[j], scale, codec, args.dynamic, noise[j]);
        if (!coded) out[j] = scale_element(decode_element<Kind>(out[j], codec), scale.zero_point, scale.value);
    }
    if (coded) {
        const int width = codec.format.bits;
        store_codes(join_codes(out, width), args.sink.codes, args.sink.aligned, width, row, col, count);
    } else {
        store_octet(out, args.sink.values, args.sink.aligned, row, col, count);
    }
}

// Calls `run` with the format's kind and the rounding as compile-time constants.
template <template <int, bool> class Run, class... Args>
const char* for_kind(int kind, int rounding, const Args&... args) {
    if (kind == kKindFloat) {
        return rounding == kStochastic ? Run<kKindFloat, true>::run(args...) : Run<kKindFloat, false>::run(args...);
    }
    if (kind == kKindInteger) {
        return rounding == kStochastic ? Run<kKindInteger, true>::run(args...) : Run<kKindInteger, false>::run(args...);
    }
    if (kind != kKindCodebook) return "lowbit: e8m0 holds scales, not elements";
    if (rounding == kStochastic) return "lowbit: codebooks round to nearest only";
    return Run<kKindCodebook, false>::run(args...);
}

// quantize_fused.cu: whether one pass serves these blocks, and that pass.
bool is_fused(const Blocks& blocks);
const char* launch_fused(const QuantizeArgs& args, int rounding, cudaStream_t stream);

// quantize_given.cu: codes for the scales in `args.scales`, for blocks of any shape.
const char* launch_given(const QuantizeArgs& args, int rounding, cudaStream_t stream);

// extremes.cu: the maxima of every block into `extremes` (cleared first); `finite` leaves Inf and NaN out.
const char* launch_extremes(const Matrix& x, const Blocks& blocks, bool finite, Extremes* extremes,
                            cudaStream_t stream);
// Scales of all blocks from their maxima.
const char* launch_scales(const Extremes* extremes, const Blocks& blocks, const Scales& scales, cudaStream_t stream);
const char* launch_outer(const Extremes* extremes, const Blocks& blocks, float* out, cudaStream_t stream);

}  // namespace cuda
}  // namespace lowbit
