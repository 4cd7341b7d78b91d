// The native operations on the CPU, as plain pointers and integers: what lowbit_native's ops and _native call.
//
// Matrices are [rows, cols] with unit column stride; codes are packed rows of packed_cols(cols, bits) bytes, without
// gaps, except where one a byte is said. Every function runs in the default floating environment, on as many threads as
// threads.h offers, and gives the same bits for any number of them.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace lowbit::cpu {

struct Shape {
    int64_t rows, cols;
};

// Numbers in memory: `stride` elements from row to row.
// What elements are multiplied with first, in fp32: the factor of their row, or of their column, or nothing.
struct Values {
    const void* data;
    Dtype dtype;
    int64_t stride;
    const float* row_factors = nullptr;
    const float* col_factors = nullptr;

    bool has_factors() const { return row_factors != nullptr || col_factors != nullptr; }
    // As what elements are read.
    Dtype element() const { return has_factors() ? Dtype::kFloat32 : dtype; }
};
struct Results {
    void* data;
    Dtype dtype;
    int64_t stride;
};

// Stored scales [ceil(rows / block_rows), ceil(cols / block_cols)], contiguous, in the scheme's scale format; zero
// points likewise (int8 or uint8), or null; the global scale, or one a row (as the scheme says), or null.
struct Scales {
    const void* scale;
    const void* zero_point;
    const float* global_scale;
};
struct NewScales {
    void* scale;
    void* zero_point;
    const float* global_scale;  // given, not computed
};

inline int64_t packed_cols(int64_t cols, int bits) { return (cols * bits + 7) / 8; }

// Codes one a byte. No scale: `x` is rounded as it stands.
void encode(const Values& x, Shape shape, const FormatParams& format, Rounding rounding, bool saturate, const Rng& rng,
            uint8_t* codes);
void decode(const uint8_t* codes, Shape shape, const FormatParams& format, const Results& out);

void pack(const uint8_t* codes, Shape shape, int bits, uint8_t* packed);
void unpack(const uint8_t* packed, Shape shape, int bits, uint8_t* codes);

// Global scales, global_scale_count() of them: the finite amax of what each spans over the product of the largest
// values of both levels; 1 where nothing is finite and non-zero.
void global_scale(const Values& x, Shape shape, const SchemeParams& scheme, float* out);

// The least and the largest element of each block, 0 counted among them; NaN of a block that holds Inf or NaN.
void block_range(const Values& x, Shape shape, const SchemeParams& scheme, float* low, float* high);

// Scales from x, and codes.
void quantize(const Values& x, Shape shape, const SchemeParams& scheme, const NewScales& scales, Rounding rounding,
              const Rng& rng, uint8_t* codes);
void quantize_static(const Values& x, Shape shape, const SchemeParams& scheme, const Scales& scales, Rounding rounding,
                     const Rng& rng, uint8_t* codes);
void dequantize(const uint8_t* codes, Shape shape, const SchemeParams& scheme, const Scales& scales,
                const Results& out);

// quantize and dequantize at once, in x's dtype; scales are computed from x where `scales.scale` is null.
void fake_quantize(const Values& x, Shape shape, const SchemeParams& scheme, const Scales& scales, Rounding rounding,
                   const Rng& rng, const Results& out);

// The gradient of x, in grad's dtype: grad's bits where x was in range, else +0. `grad_scale`, fp32 and one a block,
// for scales that are given, and after them one for each zero point: the sums over their blocks, added in an order that
// depends on the shape alone; or null.
void fake_quantize_backward(const Values& grad, const Values& x, Shape shape, const SchemeParams& scheme,
                            const Scales& scales, const Results& grad_x, float* grad_scale);

}  // namespace lowbit::cpu
