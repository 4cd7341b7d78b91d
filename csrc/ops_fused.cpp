// The CPU kernels of rms_norm, swiglu and rotary: checks, then cpu/fused.
#include "cpu/fused/fused.h"

#include <algorithm>
#include <string_view>

#include "ops_entry.h"

namespace lowbit {
namespace {

using entry::Text;

float* floats_at(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

// `weight` is contiguous, and lives as long as this.
cpu::NormWeight norm_weight(const Tensor& weight, int64_t offset, cpu::Shape shape) {
    require(weight.numel() == shape.cols && (offset == 0 || offset == 1));
    return {weight.const_data_ptr(), dtype_of(weight), offset};
}

bool rms_norm(const Tensor& given, const Tensor& given_weight, double eps, int64_t offset, const Tensor& out,
              const Tensor& rstd) {
    const Tensor x = in_rows(given), weight = dense(given_weight);
    const cpu::Shape shape = shape_of(x);
    require(rstd.scalar_type() == ScalarType::Float && rstd.is_contiguous() && rstd.numel() == shape.rows);
    cpu::rms_norm(values_of(x), shape, norm_weight(weight, offset, shape), static_cast<float>(eps),
                  results_of(out, shape), floats_at(rstd));
    return true;
}

bool rms_norm_backward(const Tensor& given_grad, const Tensor& given_x, const Tensor& given_weight,
                       const Tensor& given_rstd, int64_t offset, bool weight_grad, const Tensor& grad_x,
                       const Tensor& grad_weight) {
    const Tensor grad = in_rows(given_grad), x = in_rows(given_x), weight = dense(given_weight),
                 rstd = dense(given_rstd);
    const cpu::Shape shape = shape_of(x);
    results_of(grad, shape);
    require(rstd.scalar_type() == ScalarType::Float && rstd.numel() == shape.rows);
    if (weight_grad) {
        require(grad_weight.is_contiguous() && grad_weight.numel() == shape.cols &&
                grad_weight.scalar_type() == weight.scalar_type());
    }
    cpu::rms_norm_backward(values_of(grad), values_of(x), shape, norm_weight(weight, offset, shape),
                           static_cast<const float*>(rstd.const_data_ptr()), results_of(grad_x, shape),
                           weight_grad ? grad_weight.mutable_data_ptr() : nullptr);
    return true;
}

// Nothing for a name that is none.
std::optional<Activation> activation_of(const Text& name) {
    constexpr std::string_view kNames[] = {"silu", "gelu_tanh"};
    const auto* found = std::find(std::begin(kNames), std::end(kNames), name.view());
    if (found == std::end(kNames)) return std::nullopt;
    return static_cast<Activation>(found - kNames);
}

bool swiglu(const Tensor& given_gate, const Tensor& given_up, const Text& name, const Tensor& out) {
    const auto activation = activation_of(name);
    if (!activation) return false;
    const Tensor gate = in_rows(given_gate), up = in_rows(given_up);
    const cpu::Shape shape = shape_of(gate);
    results_of(up, shape);
    cpu::swiglu(*activation, values_of(gate), values_of(up), shape, results_of(out, shape));
    return true;
}

bool swiglu_backward(const Tensor& given_grad, const Tensor& given_gate, const Tensor& given_up, const Text& name,
                     const Tensor& grad_gate, const Tensor& grad_up) {
    const auto activation = activation_of(name);
    if (!activation) return false;
    const Tensor grad = in_rows(given_grad), gate = in_rows(given_gate), up = in_rows(given_up);
    const cpu::Shape shape = shape_of(gate);
    results_of(grad, shape), results_of(up, shape);
    cpu::swiglu_backward(*activation, values_of(grad), values_of(gate), values_of(up), shape,
                         results_of(grad_gate, shape), results_of(grad_up, shape));
    return true;
}

// A tensor that is broadcast to `sizes` and one more axis, with at most three before that.
cpu::Lines lines_of(const Tensor& t, const int64_t (&sizes)[3]) {
    cpu::Lines lines{t.const_data_ptr(), dtype_of(t), {}};
    const int64_t dims = t.dim();
    require(dims >= 1 && dims <= 4 && (t.size(dims - 1) <= 1 || t.stride(dims - 1) == 1));
    for (int64_t axis = dims - 2, k = 2; axis >= 0; --axis, --k) {
        require(t.size(axis) == 1 || t.size(axis) == sizes[k]);
        lines.strides[k] = t.size(axis) == 1 ? 0 : t.stride(axis);
    }
    return lines;
}

// The tensor itself where its last axis has the stride 1.
Tensor with_lines(const Tensor& t) {
    const int64_t last = t.dim() - 1;
    return last < 0 || t.size(last) <= 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}

bool rotary(const Tensor& given_x, const Tensor& given_cos, const Tensor& given_sin, bool interleaved,
            const Tensor& out) {
    const Tensor x = with_lines(given_x), cos = with_lines(given_cos), sin = with_lines(given_sin);
    const int64_t dims = x.dim();
    require(dims >= 2 && dims <= 4 && cos.dim() >= 1 && x.numel() > 0);
    int64_t sizes[] = {1, 1, 1};
    for (int64_t axis = dims - 2, k = 2; axis >= 0; --axis, --k) sizes[k] = x.size(axis);
    const int64_t cols = x.size(dims - 1), pairs = cos.size(cos.dim() - 1);
    require(pairs > 0 && 2 * pairs <= cols && sin.dim() >= 1 && sin.size(sin.dim() - 1) == pairs);
    require(out.is_contiguous() && out.numel() == x.numel() && out.scalar_type() == x.scalar_type());
    cpu::rotary(lines_of(x, sizes), lines_of(cos, sizes), lines_of(sin, sizes), sizes, cols, pairs, interleaved,
                out.mutable_data_ptr());
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_KERNEL(rms_norm, &lowbit::rms_norm, CPU)
LOWBIT_KERNEL(rms_norm_backward, &lowbit::rms_norm_backward, CPU)
LOWBIT_KERNEL(swiglu, &lowbit::swiglu, CPU)
LOWBIT_KERNEL(swiglu_backward, &lowbit::swiglu_backward, CPU)
LOWBIT_KERNEL(rotary, &lowbit::rotary, CPU)
