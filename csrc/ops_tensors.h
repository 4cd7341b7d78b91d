// Stable tensors as the matrices, codes and scales that the CPU kernels take. An argument that does not fit throws
// Unserved, which has no words: Python checks the call again and words the error (ops_entry.h).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <exception>
#include <optional>
#include <vector>

#include "cpu/codec/codec.h"

namespace lowbit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

struct Unserved : std::exception {
    const char* what() const noexcept override { return "lowbit: a kernel does not take these arguments"; }
};
inline void require(bool fits) {
    if (!fits) throw Unserved();
}

inline bool is_float(ScalarType t) {
    return t == ScalarType::Float || t == ScalarType::BFloat16 || t == ScalarType::Half;
}
inline Dtype dtype_of(const Tensor& t) {
    switch (t.scalar_type()) {
        case ScalarType::Float:
            return Dtype::kFloat32;
        case ScalarType::BFloat16:
            return Dtype::kBFloat16;
        case ScalarType::Half:
            return Dtype::kFloat16;
        default:
            throw Unserved();
    }
}

// A tensor of any rank as [rows, cols], cols its last axis: a matrix with unit column stride, or contiguous. A scalar
// is [1, 1].
struct Rows {
    cpu::Shape shape;
    int64_t stride;
};
inline Rows rows_of(const Tensor& t) {
    if (t.dim() == 0) return {{1, 1}, 1};
    const int64_t cols = t.size(t.dim() - 1);
    if (t.dim() == 2) {
        require(cols <= 1 || t.stride(1) == 1);
        return {{t.size(0), cols}, t.stride(0)};
    }
    require(t.is_contiguous());
    return {{cols > 0 ? t.numel() / cols : 0, cols}, cols};
}
// Whether rows_of takes a tensor as it lies.
inline bool lies_in_rows(const Tensor& t) {
    if (t.dim() == 2) return t.size(1) <= 1 || t.stride(1) == 1;
    return t.is_contiguous();
}
// A tensor of any rank as a matrix: a view where strides allow.
inline Tensor as_matrix(const Tensor& t) {
    if (t.dim() == 2) return t;
    const int64_t cols = t.size(t.dim() - 1), sizes[] = {cols > 0 ? t.numel() / cols : 0, cols};
    return torch::stable::reshape(t, {sizes, 2});
}
// The same numbers as rows_of takes them: the tensor itself, a view, or where its strides ask for it a copy.
inline Tensor in_rows(const Tensor& t) {
    if (lies_in_rows(t)) return t;
    return t.dim() == 2 ? torch::stable::contiguous(t) : in_rows(as_matrix(t));
}
inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline MaybeTensor dense(const MaybeTensor& t) { return t ? MaybeTensor(dense(*t)) : std::nullopt; }

inline cpu::Shape shape_of(const Tensor& t) {
    require(t.numel() > 0);
    return rows_of(t).shape;
}

inline cpu::Values values_of(const Tensor& t) { return {t.const_data_ptr(), dtype_of(t), rows_of(t).stride}; }
inline cpu::Results results_of(const Tensor& t, cpu::Shape shape) {
    const Rows rows = rows_of(t);
    require(rows.shape.rows == shape.rows && rows.shape.cols == shape.cols);
    return {const_cast<void*>(t.const_data_ptr()), dtype_of(t), rows.stride};
}

inline void check_bytes(const Tensor& t, int64_t rows, int64_t cols) {
    require(t.scalar_type() == ScalarType::Byte && t.is_contiguous());
    require((t.dim() == 0 ? 1 : t.size(t.dim() - 1)) == cols && t.numel() == rows * cols);
}
inline const uint8_t* bytes_of(const Tensor& t, int64_t rows, int64_t cols) {
    check_bytes(t, rows, cols);
    return static_cast<const uint8_t*>(t.const_data_ptr());
}
inline uint8_t* new_bytes_of(const Tensor& t, int64_t rows, int64_t cols) {
    check_bytes(t, rows, cols);
    return static_cast<uint8_t*>(t.mutable_data_ptr());
}

constexpr ScalarType kScaleTypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Byte,
                                      ScalarType::Byte};
inline ScalarType scale_type(const SchemeParams& s) { return kScaleTypes[s.scale_format]; }
inline ScalarType zero_type(const SchemeParams& s) { return s.format.is_signed ? ScalarType::Char : ScalarType::Byte; }

inline cpu::Shape scale_shape(cpu::Shape shape, const SchemeParams& s) {
    return {(shape.rows + s.block_rows - 1) / s.block_rows, (shape.cols + s.block_cols - 1) / s.block_cols};
}

// Scales (and zero points) hold one entry a block, in the scheme's scale format.
inline void check_scale(const Tensor& t, cpu::Shape shape, const SchemeParams& s, bool zero_point) {
    const cpu::Shape blocks = scale_shape(shape, s);
    require(t.dim() == 2 && t.is_contiguous());
    require(t.size(0) == blocks.rows && t.size(1) == blocks.cols);
    require(t.scalar_type() == (zero_point ? zero_type(s) : scale_type(s)));
}

inline const void* data_of(const MaybeTensor& t) { return t ? t->const_data_ptr() : nullptr; }

// A new contiguous tensor on the CPU.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, ScalarType dtype) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
    AtenTensorHandle made;
    const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                    type, aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}
inline std::vector<int64_t> sizes_of(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }
// The sizes of `t` with another last one.
inline std::vector<int64_t> sizes_with(const Tensor& t, int64_t last) {
    std::vector<int64_t> sizes = sizes_of(t);
    sizes.back() = last;
    return sizes;
}

}  // namespace lowbit
