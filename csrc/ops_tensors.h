// Stable tensors as the matrices, codes and scales that the CPU kernels take, but for their memory, which is another at
// each call; what does not fit throws.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "cpu/codec.h"

namespace lowbit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype dtype_of(const Tensor& t, const char* what) {
    switch (t.scalar_type()) {
        case ScalarType::Float:
            return Dtype::kFloat32;
        case ScalarType::BFloat16:
            return Dtype::kBFloat16;
        case ScalarType::Half:
            return Dtype::kFloat16;
        default:
            STD_TORCH_CHECK(false, what, " must be float32, bfloat16 or float16");
    }
}

// A matrix whose rows are dense; rows may lie apart where `apart`.
inline void check_matrix(const Tensor& t, const char* what, bool apart) {
    STD_TORCH_CHECK(t.dim() == 2, what, " must be a matrix, got ", t.dim(), " dimensions");
    STD_TORCH_CHECK(t.size(1) <= 1 || t.stride(1) == 1, what, " must have unit column stride, got ", t.stride(1));
    STD_TORCH_CHECK(apart || t.size(0) <= 1 || t.stride(0) == t.size(1), what, " must be contiguous");
}

inline cpu::Shape shape_of(const Tensor& t) {
    STD_TORCH_CHECK(t.dim() == 2 && t.numel() > 0, "needs a matrix with at least one element");
    return {t.size(0), t.size(1)};
}

// A matrix of numbers without its memory.
struct Matrix {
    Dtype dtype;
    int64_t stride;

    cpu::Values values(const void* data) const { return {data, dtype, stride}; }
    cpu::Results results(void* data) const { return {data, dtype, stride}; }
};
inline Matrix matrix(const Tensor& t, const char* what) {
    check_matrix(t, what, true);
    return {dtype_of(t, what), t.stride(0)};
}

inline void check_bytes(const Tensor& t, int64_t rows, int64_t cols, const char* what) {
    check_matrix(t, what, false);
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte, what, " must be uint8");
    STD_TORCH_CHECK(t.size(0) == rows && t.size(1) == cols, what, " must have shape [", rows, ", ", cols, "], got [",
                    t.size(0), ", ", t.size(1), "]");
}

// Scales (and zero points) hold one entry a block, in the scheme's scale format.
inline void check_scale(const Tensor& t, cpu::Shape shape, const SchemeParams& s, bool zero_point) {
    const char* what = zero_point ? "zero_point" : "scale";
    check_matrix(t, what, false);
    const int64_t rows = (shape.rows + s.block_rows - 1) / s.block_rows,
                  cols = (shape.cols + s.block_cols - 1) / s.block_cols;
    STD_TORCH_CHECK(t.size(0) == rows && t.size(1) == cols, what, " must have shape [", rows, ", ", cols, "], got [",
                    t.size(0), ", ", t.size(1), "]");
    constexpr ScalarType kScale[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Byte,
                                     ScalarType::Byte};
    const ScalarType expected = !zero_point          ? kScale[s.scale_format]
                                : s.format.is_signed ? ScalarType::Char
                                                     : ScalarType::Byte;
    STD_TORCH_CHECK(t.scalar_type() == expected, what, " has another dtype than the scheme's");
}

}  // namespace lowbit
