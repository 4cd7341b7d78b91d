// lowbit_native::scaled_mm and linear on the CPU: tensors to the plain description that cpu/mm.h multiplies.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "cpu/linear.h"
#include "cpu/mm.h"
#include "cpu/mm_stored.h"
#include "ops_params.h"
#include "ops_planned.h"

namespace {

namespace mm = lowbit::cpu::mm;
using lowbit::Pointers;
using lowbit::Work;
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
    STD_TORCH_CHECK(params.affine ? zero_point.has_value() && zero_point->dim() == 2 : !zero_point.has_value(),
                    "lowbit: ", name, " needs a matrix of zero points if it is affine, and has none if not");
    x.table = &mm::table_of(params.format);
    x.block_rows = params.block_rows;
    x.block_cols = params.block_cols;
    x.scale_format = params.scale_format;
    x.scale_row_stride = scale->stride(0);
    x.scale_col_stride = scale->stride(1);
    if (params.affine) {
        x.zero_row_stride = zero_point->stride(0);
        x.zero_col_stride = zero_point->stride(1);
    }
    const int64_t outers = lowbit::outer_count(params, x.rows);
    STD_TORCH_CHECK(params.outer ? outer.has_value() && outer->numel() == outers : !outer.has_value(), "lowbit: ", name,
                    " needs ", outers, " outer scales if its scheme has a global scale, and has none if not");
    if (params.outer == lowbit::kOuterRow) x.outer_row_stride = outer->stride(0);
    return x;
}

// `t`: data, scale, zero point, outer scale.
mm::Operand placed(mm::Operand x, Pointers t) {
    x.data = t[0];
    x.scale = t[1];
    x.zero_point = static_cast<const uint8_t*>(t[2]);
    x.outer = static_cast<const float*>(t[3]);
    return x;
}

// Bias and output: `out` holds [rows, b.rows], contiguous, with any number of axes.
void add_rest(mm::Problem& p, int64_t rows, int64_t cols, const std::optional<Tensor>& bias, const Tensor& out) {
    p.depth = cols;
    if (bias.has_value()) {
        STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == p.b.rows, "lowbit: bias must be [", p.b.rows, "]");
        p.bias_dtype = element_of(*bias, "bias");
        p.bias_stride = bias->stride(0);
    }
    STD_TORCH_CHECK(
        out.dim() >= 1 && out.size(out.dim() - 1) == p.b.rows && out.numel() == rows * p.b.rows && out.is_contiguous(),
        "lowbit: out must be contiguous, of ", rows, " rows of ", p.b.rows);
    p.out_dtype = element_of(out, "out");
}

// The memory of both operands is to be added.
mm::Problem placed(mm::Problem p, Pointers bias_and_out) {
    p.bias = bias_and_out[0];
    p.out = bias_and_out[1];
    return p;
}

// Each op answers its work on the pointers of its tensors, in the order in which it takes them (ops_planned.h).

Work scaled_mm(const Tensor& a, int64_t a_scheme, std::optional<Tensor> a_scale, std::optional<Tensor> a_zero_point,
               std::optional<Tensor> a_outer, const Tensor& b, int64_t b_scheme, std::optional<Tensor> b_scale,
               std::optional<Tensor> b_zero_point, std::optional<Tensor> b_outer, std::optional<Tensor> bias,
               const Tensor& out, int64_t cols) {
    STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "lowbit: a and b must be matrices");
    mm::Problem like;
    like.a = operand_of("a", a, a_scheme, a_scale, a_zero_point, a_outer, cols);
    like.b = operand_of("b", b, b_scheme, b_scale, b_zero_point, b_outer, cols);
    add_rest(like, like.a.rows, cols, bias, out);
    return [=](Pointers t) {
        mm::Problem p = placed(like, t + 8);
        p.a = placed(like.a, t);
        p.b = placed(like.b, t + 4);
        mm::multiply(p);
    };
}

// x [..., K] is a matrix, or contiguous.
Work linear(const Tensor& x, int64_t input, const Tensor& weight, int64_t scheme, std::optional<Tensor> scale,
            std::optional<Tensor> zero_point, std::optional<Tensor> outer, std::optional<Tensor> bias,
            const Tensor& out) {
    STD_TORCH_CHECK(x.dim() == 2 || (x.dim() >= 1 && x.is_contiguous()), "lowbit: x must be a matrix, or contiguous");
    const int64_t cols = x.size(x.dim() - 1);
    STD_TORCH_CHECK(cols > 0, "lowbit: x must have columns");
    const int64_t rows = x.numel() / cols;
    mm::Problem like;
    like.a.dtype = element_of(x, "x");
    like.a.rows = rows;
    like.a.row_stride = x.dim() == 2 ? x.stride(0) : cols;
    like.a.col_stride = x.stride(x.dim() - 1);
    like.b = operand_of("weight", weight, scheme, scale, zero_point, outer, cols);
    add_rest(like, rows, cols, bias, out);
    if (input < 0) {
        return [=](Pointers t) {
            mm::Problem p = placed(like, t + 5);
            p.a.data = t[0];
            p.b = placed(like.b, t + 1);
            mm::multiply(p);
        };
    }
    STD_TORCH_CHECK(like.a.col_stride == 1 || cols == 1, "lowbit: rows of x must be contiguous");
    constexpr lowbit::Dtype kDtypes[] = {lowbit::Dtype::kFloat32, lowbit::Dtype::kBFloat16, lowbit::Dtype::kFloat16};
    const lowbit::Dtype dtype = kDtypes[static_cast<int>(like.a.dtype)];
    const lowbit::SchemeParams of_input = lowbit::kept_scheme(input, rows, cols);
    return [=](Pointers t) {
        mm::Problem p = placed(like, t + 5);
        p.b = placed(like.b, t + 1);
        lowbit::cpu::linear({{t[0], dtype, like.a.row_stride}, {rows, cols}, of_input}, p);
    };
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) {
    LOWBIT_PLANNED(m, scaled_mm);
    LOWBIT_PLANNED(m, linear);
}
