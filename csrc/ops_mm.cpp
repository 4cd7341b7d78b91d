// lowbit_native::scaled_mm and linear on the CPU: tensors to the plain description that cpu/mm.h multiplies.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "cpu/linear.h"
#include "cpu/mm.h"
#include "cpu/mm_stored.h"
#include "ops_params.h"

namespace {

namespace mm = lowbit::cpu::mm;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

mm::Element element_of(const Tensor& x, const char* name) {
    switch (x.scalar_type()) {
        case ScalarType::Float:
            return mm::Element::f32;
        case ScalarType::BFloat16:
            return mm::Element::bf16;
        case ScalarType::Half:
            return mm::Element::f16;
        default:
            STD_TORCH_CHECK(false, "lowbit: ", name, " must be float32, bfloat16 or float16");
    }
}

void put_rows(mm::Operand& x, const char* name, const Tensor& data, int64_t packed, int bits) {
    STD_TORCH_CHECK(data.dim() == 2 && data.element_size() == 1 && data.size(1) == packed, "lowbit: ", name,
                    " must be a matrix of ", packed, " bytes a row");
    x.row_stride = data.stride(0);
    x.col_stride = data.stride(1);
    STD_TORCH_CHECK(bits == 8 || x.col_stride == 1 || packed <= 1, "lowbit: packed rows of ", name,
                    " must be contiguous");
}

// Panels as lowbit/panels.py makes them.
void put_panels(mm::Operand& x, const char* name, const Tensor& data, int64_t packed, int bits) {
    const int64_t panels = (x.rows + mm::kPanelRows - 1) / mm::kPanelRows, depth = (packed + 3) / 4;
    STD_TORCH_CHECK((bits == 8 || bits == 4) && data.element_size() == 1 && data.size(0) == panels &&
                        data.size(1) == depth && data.size(2) == mm::kPanelRows && data.size(3) == 4 &&
                        data.is_contiguous(),
                    "lowbit: panels of ", name, " must be [", panels, ", ", depth, ", ", mm::kPanelRows,
                    ", 4] bytes, contiguous, of 8- or 4-bit codes");
    x.panel_bytes = depth * mm::kPanelRows * 4;
}

mm::Operand operand_of(const char* name, const Tensor& data, int64_t scheme, const std::optional<Tensor>& scale,
                       const std::optional<Tensor>& zero_point, const std::optional<Tensor>& outer, int64_t cols) {
    mm::Operand x;
    x.data = data.const_data_ptr();
    if (scheme < 0) {
        STD_TORCH_CHECK(data.dim() == 2 && data.size(1) == cols, "lowbit: ", name, " must be a matrix of ", cols,
                        " columns");
        x.dtype = element_of(data, name);
        x.rows = data.size(0);
        x.row_stride = data.stride(0);
        x.col_stride = data.stride(1);
        return x;
    }
    STD_TORCH_CHECK(scale.has_value() && scale->dim() == 2, "lowbit: ", name, " needs a matrix of scales");
    const bool panels = data.dim() == 4;
    x.rows = panels ? scale->size(0) : data.size(0);
    const lowbit::SchemeParams params = lowbit::kept_scheme(scheme, x.rows, cols);
    const int bits = params.format.bits;
    (panels ? put_panels : put_rows)(x, name, data, (cols * bits + 7) / 8, bits);
    STD_TORCH_CHECK(!params.affine || (zero_point.has_value() && zero_point->dim() == 2), "lowbit: ", name,
                    " is affine and needs a matrix of zero points");
    x.table = &mm::table_of(params.format);
    x.block_rows = params.block_rows;
    x.block_cols = params.block_cols;
    x.scale = scale->const_data_ptr();
    x.scale_format = params.scale_format;
    x.scale_row_stride = scale->stride(0);
    x.scale_col_stride = scale->stride(1);
    if (params.affine) {
        x.zero_point = static_cast<const uint8_t*>(zero_point->const_data_ptr());
        x.zero_row_stride = zero_point->stride(0);
        x.zero_col_stride = zero_point->stride(1);
    }
    if (params.outer) {
        STD_TORCH_CHECK(outer.has_value() && outer->numel() == 1, "lowbit: ", name, " needs one outer scale");
        x.outer = static_cast<const float*>(outer->const_data_ptr());
    }
    return x;
}

// Bias and output: `out` holds [rows, b.rows], contiguous, with any number of axes.
void add_rest(mm::Problem& p, int64_t rows, int64_t cols, const std::optional<Tensor>& bias, Tensor& out) {
    p.depth = cols;
    if (bias.has_value()) {
        STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == p.b.rows, "lowbit: bias must be [", p.b.rows, "]");
        p.bias = bias->const_data_ptr();
        p.bias_dtype = element_of(*bias, "bias");
        p.bias_stride = bias->stride(0);
    }
    STD_TORCH_CHECK(
        out.dim() >= 1 && out.size(out.dim() - 1) == p.b.rows && out.numel() == rows * p.b.rows && out.is_contiguous(),
        "lowbit: out must be contiguous, of ", rows, " rows of ", p.b.rows);
    p.out = out.mutable_data_ptr();
    p.out_dtype = element_of(out, "out");
}

void scaled_mm(const Tensor& a, int64_t a_scheme, std::optional<Tensor> a_scale, std::optional<Tensor> a_zero_point,
               std::optional<Tensor> a_outer, const Tensor& b, int64_t b_scheme, std::optional<Tensor> b_scale,
               std::optional<Tensor> b_zero_point, std::optional<Tensor> b_outer, std::optional<Tensor> bias,
               Tensor out, int64_t cols) {
    STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "lowbit: a and b must be matrices");
    mm::Problem p;
    p.a = operand_of("a", a, a_scheme, a_scale, a_zero_point, a_outer, cols);
    p.b = operand_of("b", b, b_scheme, b_scale, b_zero_point, b_outer, cols);
    add_rest(p, p.a.rows, cols, bias, out);
    mm::multiply(p);
}

// x [..., K] is a matrix, or contiguous.
void linear(const Tensor& x, int64_t input, const Tensor& weight, int64_t scheme, std::optional<Tensor> scale,
            std::optional<Tensor> zero_point, std::optional<Tensor> outer, std::optional<Tensor> bias, Tensor out) {
    STD_TORCH_CHECK(x.dim() == 2 || (x.dim() >= 1 && x.is_contiguous()), "lowbit: x must be a matrix, or contiguous");
    const int64_t cols = x.size(x.dim() - 1);
    STD_TORCH_CHECK(cols > 0, "lowbit: x must have columns");
    const int64_t rows = x.numel() / cols;
    mm::Operand a;
    a.data = x.const_data_ptr();
    a.dtype = element_of(x, "x");
    a.rows = rows;
    a.row_stride = x.dim() == 2 ? x.stride(0) : cols;
    a.col_stride = x.stride(x.dim() - 1);
    mm::Problem p;
    p.b = operand_of("weight", weight, scheme, scale, zero_point, outer, cols);
    add_rest(p, rows, cols, bias, out);
    if (input < 0) {
        p.a = a;
        return mm::multiply(p);
    }
    STD_TORCH_CHECK(a.col_stride == 1 || cols == 1, "lowbit: rows of x must be contiguous");
    constexpr lowbit::Dtype kDtypes[] = {lowbit::Dtype::kFloat32, lowbit::Dtype::kBFloat16, lowbit::Dtype::kFloat16};
    const lowbit::cpu::Values values{a.data, kDtypes[static_cast<int>(a.dtype)], a.row_stride};
    lowbit::cpu::linear({values, {rows, cols}, lowbit::kept_scheme(input, rows, cols)}, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) {
    m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
    m.impl("linear", TORCH_BOX(&linear));
}
