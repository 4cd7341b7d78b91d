// What the host side (ops_cuda.cpp, without CUDA headers) and the kernels (.cu, without torch headers) share: plain
// structs and launchers. A launcher enqueues on `stream` (a cudaStream_t) of the current device, never waits for it,
// and returns nullptr, or a static message that says what is wrong.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace lowbit {
namespace cuda {

// A float matrix: unit column stride, `pitch` elements from row to row.
struct Matrix {
    void* data;
    Dtype dtype;
    int64_t rows, cols, pitch;
};

// Stored codes: packed rows, `pitch` bytes from row to row. Unit stride within a row.
struct Codes {
    uint8_t* data;
    int64_t rows, cols, pitch;  // cols counts codes
};

// Scales as stored, [ceil(rows / r), ceil(cols / c)], contiguous; zero points likewise or null; the global
// scale, or one a row as the scheme says, or null.
struct Scales {
    void* scale;
    void* zero_point;
    const float* global_scale;
};

// Codes are one a byte here.
const char* launch_encode(const Matrix& x, const Codes& out, const FormatParams& format, bool saturate, int rounding,
                          const Rng& rng, void* stream);
const char* launch_decode(const Codes& codes, const Matrix& out, const FormatParams& format, void* stream);
const char* launch_pack(const Codes& codes, const Codes& packed, int bits, void* stream);
const char* launch_unpack(const Codes& packed, const Codes& codes, int bits, void* stream);

// Bytes of device memory that global_scale, and quantize or fake_quantize with scales computed from x, need meanwhile.
int64_t global_scale_scratch(const SchemeParams& scheme, int64_t rows);
int64_t quantize_scratch(const SchemeParams& scheme, int64_t rows, int64_t cols);

const char* launch_global_scale(const Matrix& x, float* out, const SchemeParams& scheme, void* scratch, void* stream);

// The least and the largest element of each block, 0 counted among them; NaN of a block that holds Inf or NaN.
int64_t block_range_scratch(const SchemeParams& scheme, int64_t rows, int64_t cols);
const char* launch_block_range(const Matrix& x, float* low, float* high, const SchemeParams& scheme, void* scratch,
                               void* stream);

// Computes and stores scales (and zero points) and packed codes.
const char* launch_quantize(const Matrix& x, const Scales& scales, const Codes& out, const SchemeParams& scheme,
                            int rounding, const Rng& rng, void* scratch, void* stream);
// Packed codes for the scales given.
const char* launch_quantize_static(const Matrix& x, const Scales& scales, const Codes& out, const SchemeParams& scheme,
                                   int rounding, const Rng& rng, void* stream);
const char* launch_dequantize(const Codes& codes, const Scales& scales, const Matrix& out, const SchemeParams& scheme,
                              void* stream);
// `out` has x's dtype. Scales are computed from x when `scales.scale` is null, and then need scratch.
const char* launch_fake_quantize(const Matrix& x, const Scales& scales, const Matrix& out, const SchemeParams& scheme,
                                 int rounding, const Rng& rng, void* scratch, void* stream);

int64_t fake_quantize_backward_scratch(const SchemeParams& scheme, int64_t rows, int64_t cols, bool dynamic);
// `grad_x` has grad's dtype. `grad_scale`, fp32 and one a block, for scales that are given; or null.
const char* launch_fake_quantize_backward(const Matrix& grad, const Matrix& x, const Scales& scales,
                                          const Matrix& grad_x, float* grad_scale, const SchemeParams& scheme,
                                          void* scratch, void* stream);

// One operand of scaled_mm: codes of `scheme`, or bf16 values when `coded` is false (then pitch is in bytes still).
struct MmOperand {
    Codes codes;
    bool coded;
    SchemeParams scheme;
    Scales scales;
};

struct MmEpilogue {
    void* out;  // [M, N], contiguous
    Dtype out_dtype;
    const void* bias;  // [N], or null
    Dtype bias_dtype;
};

// a [M, K] @ b [N, K].T. docs/numerics.md section 9; refuses what lowbit/backends/cuda.py refuses.
const char* launch_scaled_mm(const MmOperand& a, const MmOperand& b, const MmEpilogue& epilogue, int64_t k,
                             void* stream);

}  // namespace cuda
}  // namespace lowbit
