// Row kernels: the arithmetic on one run of elements, compiled once for each instruction set.
//
// The loops over rows, blocks and threads (codec.cpp, quantize.cpp) are the same for all; they call these through a
// table. row_kernels_scalar.cpp is the specification element by element; row_kernels_body.inl is the vector code, whose
// results equal the scalar ones in every bit (csrc/tests holds that).
#pragma once

#include <cstdint>

#include "common/fused.h"
#include "common/optim.h"
#include "common/params.h"
#include "common/scales.h"
#include "cpu/codec/book.h"
#include "cpu/isa.h"

namespace lowbit::cpu {

// A format to encode to, with everything that a loop should not compute again.
struct Encoder {
    FormatParams format;
    bool saturate;
    bool stochastic;
    const BookIndex* book = nullptr;  // codebooks
    uint32_t nan_code = 0;            // of a positive NaN
    uint32_t canonical = 0;           // the code that fills a block with Inf or NaN
    uint32_t limit = kInf;  // fp32 bits: magnitudes are clamped to it, after which overflow needs no care; where
                            // saturating, the largest value (not of integers)
    bool vector = true;     // whether vector code can: not for formats that reach the ends of fp32's range, nor for
                            // codebooks of many entries without cells
    bool coarse = true;     // whether quotients below 2^-33 are encoded like zero, and those from 2^63 on like Inf:
                            // Factors::kReciprocal may serve
    // Floats of at most 16 binades (`looked_up`), by the low four bits of the exponent field: what is added to round,
    // and what is taken from the sum to leave the code.
    bool looked_up = false;
    alignas(64) uint32_t magic[16] = {};
    alignas(64) uint32_t base[16] = {};
};
Encoder make_encoder(const FormatParams& format, bool saturate, bool stochastic);

// A format to decode from; `table` holds the fp32 bits of every code.
struct Decoder {
    explicit Decoder(const FormatParams& format);
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    FormatParams format;
    const uint32_t* table;

  private:
    uint32_t own_[256];
};

// What elements are divided by (encode) or multiplied with (decode), and their zero points.
struct Factors {
    enum Mode {
        kNone,
        kBlocks,   // each[b] for block b: the first `lead` elements, then `width` at a time
        kInverse,  // encode: the same, but each[b] is a power of two's reciprocal, which is exact, and multiplied with
        kReciprocal,  // encode: the same by way of inverse[b], the reciprocal of the plain scale each[b]; not
                      // `finite`: of any elements, whatever their quotients
        kEach,        // each[i] for element i
    } mode = kNone;
    const float* each = nullptr;
    const float* zeros = nullptr;  // zero points, one for every entry of `each`; null: none
    int64_t lead = 0, width = 0;   // multiples of kAlign where several blocks follow each other
    bool finite = false;           // encode: elements are finite and factors positive, so that no quotient is NaN
    const float* inverse = nullptr;
};
constexpr int64_t kAlign = 16;

// Scales that may be divided by by way of their reciprocals: 0, or such that elements of the block give quotients of a
// magnitude below 2^64, and those of 2^-33 a remainder without underflow (quotient_by in factors.inl).
constexpr float kLeastPlain = 0x1p-64f, kMostPlain = 0x1p125f, kMostQuotient = 0x1p64f;
// And those that any element may be divided by so: 2^63 of them are a number.
constexpr float kMostGiven = 0x1p64f;

// The fp32 numbers that some blocks' scales stand for; arrays with room for a multiple of kAlign.
struct ScaleRow {
    float* value;
    float* divisor;  // Factors::each of encode: divisor_of(value)
    float* inverse;  // 1 / value, or 0 of 0; read_scales: null if nobody wants them
    float* zero;     // zero points, of affine schemes alone
};
// Whether reciprocals are exact, so that encode multiplies with them.
inline bool has_inverse(const ScaleRule& rule, const float* global_scale) {
    return rule.scale_format == kScaleE8m0 && global_scale == nullptr;
}

// A moment of an optimizer on some elements: its codes come, or its numbers; its numbers go.
struct MomentRow {
    const Decoder* decoder;  // of codes; null: numbers come
    const float* from;       // those numbers
    float* numbers;          // what goes; may be `from`
    // Of codes alone:
    const uint8_t* codes = nullptr;
    Factors factors = {};
    int64_t block = 0;               // elements that share a maximum (and a factor, unless each has its own)
    uint32_t* high = nullptr;        // maxima, raised as block_stats() does
    const uint8_t* ahead = nullptr;  // codes that are prefetched
};

// The elements of a step, and as many moments as its rule has. grad_dtype: dtype, or fp32.
struct StepRow {
    const void* param;
    Dtype dtype;
    const void* grad;
    Dtype grad_dtype;
    int64_t n;
    void* new_param;    // may be param
    const void* ahead;  // parameters that are prefetched
    MomentRow moments[kMaxMoments];
};

struct RowKernels {
    // Codes, one a byte, of x / factor. `noise` is 16 bits an element, for stochastic rounding. `ahead`
    // is as many elements that will be needed soon: they are prefetched; x itself if nothing is known.
    void (*encode)(const Encoder& encoder, const void* x, Dtype dtype, int64_t n, const Factors& factors,
                   const uint16_t* noise, const void* ahead, uint8_t* codes);
    // 1 where x / factor is encoded without clamping, else 0; the encoder saturates.
    void (*in_range)(const Encoder& encoder, const void* x, Dtype dtype, int64_t n, const Factors& factors,
                     const void* ahead, uint8_t* kept);
    // x / factor as fp32.
    // With kReciprocal magnitudes below 2^-33 are no more than about as small.
    void (*quotients)(const void* x, Dtype dtype, int64_t n, const Factors& factors, float* out);
    // What elements add to the gradient of their scale: (level - x / factor) * grad where `kept` is 1, else level *
    // grad, with level the number of the element's code less its zero point. And `grad` where `kept` is 0, else +0, for
    // that of their zero point; null: nobody asks. Not with kNone and kReciprocal.
    void (*slopes)(const Encoder& encoder, const Decoder& decoder, const void* x, Dtype dtype, const float* grad,
                   const uint8_t* kept, int64_t n, const Factors& factors, float* slopes, float* outside);
    // (value - zero) * factor; with factors every NaN is the positive canonical one, without it has its code's sign.
    void (*decode)(const Decoder& decoder, const uint8_t* codes, int64_t n, const Factors& factors, void* out,
                   Dtype dtype);
    // Raises high[b] and low[b] to the largest positive and negative magnitude (fp32 bits; NaN counts as one above Inf)
    // of block b, `block` elements each. Without `both`, high[b] gets the amax and low is not touched.
    void (*block_stats)(const void* x, Dtype dtype, int64_t n, int64_t block, bool both, uint32_t* high, uint32_t* low);
    // The same with each element its own block.
    void (*column_stats)(const void* x, Dtype dtype, int64_t n, bool both, uint32_t* high, uint32_t* low);
    // The largest finite magnitude, fp32 bits.
    uint32_t (*finite_amax)(const void* x, Dtype dtype, int64_t n);
    // Scales of n blocks from their maxima (arrays with room for a multiple of kAlign); keeps them at `scales`, and
    // zero points at `zero_points`, unless null. Whether all are plain (not NaN will do where has_inverse()).
    bool (*make_scales)(const uint32_t* high, const uint32_t* low, int64_t n, const ScaleRule& rule,
                        const float* global_scale, void* scales, void* zero_points, const ScaleRow& row);
    // The numbers that n stored scales stand for; whether all are such that any element may be divided by way of their
    // reciprocals.
    bool (*read_scales)(const void* scales, const void* zero_points, int64_t n, const ScaleRule& rule,
                        const float* global_scale, const ScaleRow& row);
    // x times `factor`, or times each[i] where that is not null, as fp32.
    void (*product)(const void* x, Dtype dtype, int64_t n, float factor, const float* each, float* out);
    // The 16 random bits of elements [8 * block, 8 * (block + count)).
    void (*noise)(uint64_t block, int64_t count, const Rng& rng, uint16_t* out);
    // One step of an optimizer.
    void (*step)(const StepRule& rule, const StepRow& row);
    // Numbers of 16 bits in fp32, and back: to nearest, or to bf16 with 16 random bits an element (`noise` not null).
    void (*widen)(const void* x, Dtype dtype, int64_t n, float* out);
    void (*narrow)(const float* x, Dtype dtype, int64_t n, const uint16_t* noise, void* out);
    // Weights of 24 bits (common/optim.h) in fp32, and back.
    void (*join24)(const uint16_t* high, const int8_t* low, int64_t n, float* out);
    void (*split24)(const float* x, int64_t n, uint16_t* high, int8_t* low);
    // The sum of squares of n numbers as integers in steps of 1 / scale; and what each adds to its own sum.
    int64_t (*square_sum)(const float* x, int64_t n, double scale);
    void (*add_squares)(const float* x, int64_t n, const double* scales, int64_t* sums);
    // On fp32 numbers, by docs/numerics.md section 15. The sum of n terms, which are replaced; sums[i] += terms[i], and
    // += a[i] * b[i].
    float (*sum_terms)(float* terms, int64_t n);
    void (*add_terms)(const float* terms, int64_t n, float* sums);
    void (*add_products)(const float* a, const float* b, int64_t n, float* sums);
    // x * rstd * weight; and (scaled - normed * share) * rstd.
    void (*norm)(const float* x, const float* weight, float rstd, int64_t n, float* out);
    void (*norm_gradient)(const float* scaled, const float* normed, float share, float rstd, int64_t n, float* out);
    // activation(gate) * up, and the gradients of both.
    void (*gated)(Activation activation, const float* gate, const float* up, int64_t n, float* out);
    void (*gated_gradient)(Activation activation, const float* grad, const float* gate, const float* up, int64_t n,
                           float* grad_gate, float* grad_up);
    // The first 2 * pairs of x, rotated.
    void (*rotate)(const float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved, float* out);
    // Whole groups of eight codes to and from `bits` bytes.
    void (*pack)(const uint8_t* codes, int64_t groups, int bits, uint8_t* out);
    void (*unpack)(const uint8_t* packed, int64_t groups, int bits, uint8_t* codes);
};

// The table for the instruction set in use (isa.h).
const RowKernels& row_kernels();

// row_kernels_scalar(), and its like for every other instruction set: from row_kernels_NAME.cpp.
#define LOWBIT_ROW_KERNELS(name, ...) const RowKernels& row_kernels_##name();
LOWBIT_ISAS(LOWBIT_ROW_KERNELS)
#undef LOWBIT_ROW_KERNELS

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }
inline const void* advance(const void* p, int64_t elements, Dtype dtype) {
    return static_cast<const char*>(p) + elements * size_of(dtype);
}
inline void* advance(void* p, int64_t elements, Dtype dtype) {
    return static_cast<char*>(p) + elements * size_of(dtype);
}

}  // namespace lowbit::cpu
