// The CPU kernels of scaled_mm, linear and linear_packed: the plain description that cpu/matmul/matmul.h multiplies.
#include "ops_matmul.h"

#include "cpu/matmul/gemm_kernels.h"
#include "cpu/matmul/linear.h"
#include "cpu/matmul/packed.h"
#include "ops_params.h"

namespace lowbit {

using entry::MaybeText;
using entry::Out;
using entry::Outs;
using entry::Text;

namespace {

mm::Element element_of(const Tensor& x) {
    switch (x.scalar_type()) {
        case ScalarType::Float:
            return mm::Element::f32;
        case ScalarType::BFloat16:
            return mm::Element::bf16;
        case ScalarType::Half:
            return mm::Element::f16;
        default:
            throw Unserved();
    }
}

void put_rows(mm::Operand& x, const Tensor& data, int64_t packed, int bits) {
    require(data.dim() == 2 && data.element_size() == 1 && data.size(1) == packed);
    x.row_stride = data.stride(0);
    x.col_stride = data.stride(1);
    require(bits == 8 || x.col_stride == 1 || packed <= 1);
}

mm::Operand float_operand(const Tensor& data, int64_t cols) {
    require(data.dim() == 2 && data.size(1) == cols);
    mm::Operand x;
    x.dtype = element_of(data);
    x.data = data.const_data_ptr();
    x.rows = data.size(0);
    x.row_stride = data.stride(0);
    x.col_stride = data.stride(1);
    return x;
}

void put_format(mm::Operand& x, const SchemeParams& s) {
    x.table = &mm::table_of(s.format);
    x.block_rows = s.block_rows;
    x.block_cols = s.block_cols;
    x.scale_format = s.scale_format;
}

}  // namespace

mm::Operand operand_of(const Coded& codes, int64_t cols) {
    if (!codes.scheme) return float_operand(codes.data, cols);
    const SchemeParams& s = *codes.scheme;
    const int bits = s.format.bits;
    mm::Operand x;
    x.data = codes.data.const_data_ptr();
    x.rows = codes.data.size(0);
    put_rows(x, codes.data, (cols * bits + 7) / 8, bits);
    put_format(x, s);
    const cpu::Shape blocks = scale_shape({x.rows, cols}, s);
    auto check = [&](const Tensor& t, ScalarType dtype) {
        require(t.dim() == 2 && t.size(0) == blocks.rows && t.size(1) == blocks.cols && t.scalar_type() == dtype);
    };
    require(codes.scale.has_value());
    // Layers keep floating-point scales as the integers of their bits.
    constexpr ScalarType kBits[] = {ScalarType::Int, ScalarType::Short, ScalarType::Short, ScalarType::Byte,
                                    ScalarType::Byte};
    const bool as_bits = codes.scale->scalar_type() == kBits[s.scale_format];
    check(*codes.scale, as_bits ? kBits[s.scale_format] : scale_type(s));
    x.scale = codes.scale->const_data_ptr();
    x.scale_row_stride = codes.scale->stride(0);
    x.scale_col_stride = codes.scale->stride(1);
    require((s.affine != 0) == codes.zero_point.has_value());
    if (s.affine) {
        check(*codes.zero_point, zero_type(s));
        x.zero_point = static_cast<const uint8_t*>(codes.zero_point->const_data_ptr());
        x.zero_row_stride = codes.zero_point->stride(0);
        x.zero_col_stride = codes.zero_point->stride(1);
    }
    const int64_t global_scales = global_scale_count(s, x.rows);
    require((s.global_scale != 0) == codes.global_scale.has_value() &&
            (!codes.global_scale ||
             (codes.global_scale->numel() == global_scales && codes.global_scale->element_size() == 4)));
    x.global_scale = static_cast<const float*>(data_of(codes.global_scale));
    if (s.global_scale == kGlobalScaleRow) x.global_scale_row_stride = codes.global_scale->stride(0);
    return x;
}

std::optional<Coded> coded(const Tensor& data, const entry::Text& scheme, const MaybeTensor& scale,
                           const MaybeTensor& zero_point, const MaybeTensor& global_scale, int64_t cols) {
    if (data.dim() != 2 || data.numel() == 0 || data.scalar_type() != ScalarType::Byte) return std::nullopt;
    const auto s = named_scheme(scheme.view(), data.size(0), cols);
    if (!s) return std::nullopt;
    return Coded{s->format.bits == 8 ? data : in_rows(data), s, scale, zero_point, global_scale};
}

bool rounded(std::optional<Rounded>& to, const entry::MaybeText& scheme, int64_t rows, int64_t cols,
             const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale) {
    if (!scheme) return !scale && !zero_point && !global_scale;
    const auto s = named_scheme(scheme->view(), rows, cols);
    if (s) to.emplace(*s, scale, zero_point, global_scale);
    return s.has_value();
}

void add_bias(mm::Problem& p, const MaybeTensor& bias) {
    if (!bias.has_value()) return;
    require(bias->dim() == 1 && bias->size(0) == p.b.rows);
    p.bias = bias->const_data_ptr();
    p.bias_dtype = element_of(*bias);
    p.bias_stride = bias->stride(0);
}

void add_out(mm::Problem& p, int64_t rows, const Tensor& out) {
    require(out.dim() >= 1 && out.size(out.dim() - 1) == p.b.rows && out.numel() == rows * p.b.rows &&
            out.is_contiguous());
    p.out_dtype = element_of(out);
    p.out = out.mutable_data_ptr();
}

cpu::Scales given_scales(const Rounded& r, cpu::Shape shape) {
    const SchemeParams& s = r.scheme;
    if (!r.scale) {
        require(!r.zero_point && !r.global_scale);
        return {};
    }
    check_scale(*r.scale, shape, s, false);
    require((s.affine != 0) == r.zero_point.has_value());
    if (r.zero_point) check_scale(*r.zero_point, shape, s, true);
    require(
        (s.global_scale != 0) == r.global_scale.has_value() &&
        (!r.global_scale || (r.global_scale->scalar_type() == ScalarType::Float && r.global_scale->is_contiguous() &&
                             r.global_scale->numel() == global_scale_count(s, shape.rows))));
    return {data_of(r.scale), data_of(r.zero_point), static_cast<const float*>(data_of(r.global_scale))};
}

namespace {

void multiply_rows(const Tensor& x, const std::optional<Rounded>& input, mm::Problem& p, const MaybeTensor& bias,
                   const std::optional<Rounded>& output, const Tensor& out) {
    const int64_t axes = x.dim();
    require(axes >= 1);
    const int64_t cols = x.size(axes - 1), step = x.stride(axes - 1);
    require(cols > 0);
    // Floats of a matrix that are multiplied as they are may lie in any way; rows that are quantized are contiguous.
    if (axes == 2 ? input && step != 1 && cols > 1 : !x.is_contiguous()) {
        return multiply_rows(in_rows(x), input, p, bias, output, out);
    }
    const int64_t rows = x.numel() / cols;
    p.a.dtype = element_of(x);
    p.a.data = x.const_data_ptr();
    p.a.rows = rows;
    p.a.row_stride = axes == 2 ? x.stride(0) : cols;
    p.a.col_stride = step;
    p.depth = cols;
    add_bias(p, bias);
    std::optional<cpu::Output> codes;
    if (output) {
        require(output->scale.has_value() && output->scheme.global_scale == 0);
        const cpu::Shape shape{rows, p.b.rows};
        codes = cpu::Output{output->scheme, given_scales(*output, shape),
                            new_bytes_of(out, rows, cpu::packed_cols(shape.cols, output->scheme.format.bits))};
    } else {
        add_out(p, rows, out);
        if (!input) return mm::multiply(p);
    }
    std::optional<cpu::Input> floats;
    if (input) {
        const cpu::Shape shape{rows, cols};
        floats = cpu::Input{{p.a.data, dtype_of(x), p.a.row_stride}, shape, input->scheme, given_scales(*input, shape)};
    }
    cpu::linear(floats ? &*floats : nullptr, p, codes ? &*codes : nullptr);
}

std::optional<Coded> coded_or_float(const Tensor& data, const MaybeText& scheme, const MaybeTensor& scale,
                                    const MaybeTensor& zero_point, const MaybeTensor& global_scale, int64_t cols) {
    if (scheme) return coded(data, *scheme, scale, zero_point, global_scale, cols);
    if (scale || zero_point || global_scale) return std::nullopt;
    return Coded{data, std::nullopt, {}, {}, {}};
}

// Whether Python chooses among kernels for a float operand: where the processor multiplies bf16 as such, torch's
// float32 matmul precision may ask for that. Only Python can read it.
bool precision_decides(const Tensor& x) {
    const ScalarType dtype = x.scalar_type();
    if (dtype != ScalarType::Float && dtype != ScalarType::Half) return false;
    if (mm::kernels_in_use().spin[static_cast<int>(mm::Kind::bf16)] == nullptr) return false;
    StableIValue stack[1];
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("lowbit_table::may_round_to_bf16", "", stack, TORCH_ABI_VERSION));
    return torch::stable::detail::to<bool>(stack[0]);
}

// -- scaled_mm -------------------------------------------------------------------------------------------------------
Outs<1> scaled_mm_outputs(const Tensor& a, const Tensor& b, int64_t cols, const MaybeText& a_scheme,
                          const MaybeText& b_scheme, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                          const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                          ScalarType out_dtype) {
    if (!is_float(out_dtype) || a.dim() != 2 || b.dim() != 2 || cols == 0) return std::nullopt;
    if (a.numel() == 0 || b.numel() == 0) return std::nullopt;
    if ((!a_scheme && precision_decides(a)) || (!b_scheme && precision_decides(b))) return std::nullopt;
    return Outs<1>{{Out{{a.size(0), b.size(0)}, out_dtype}}};
}

bool scaled_mm(const Tensor& a, const Tensor& b, int64_t cols, const MaybeText& a_scheme, const MaybeText& b_scheme,
               const MaybeTensor& a_scale, const MaybeTensor& a_zero_point, const MaybeTensor& a_global_scale,
               const MaybeTensor& b_scale, const MaybeTensor& b_zero_point, const MaybeTensor& b_global_scale,
               const MaybeTensor& bias, ScalarType, const Tensor& out) {
    const auto left = coded_or_float(a, a_scheme, a_scale, a_zero_point, a_global_scale, cols),
               right = coded_or_float(b, b_scheme, b_scale, b_zero_point, b_global_scale, cols);
    if (!left || !right) return false;
    mm::Problem p;
    p.a = operand_of(*left, cols);
    p.b = operand_of(*right, cols);
    p.depth = cols;
    add_bias(p, bias);
    add_out(p, p.a.rows, out);
    mm::multiply(p);
    return true;
}

// -- linear ----------------------------------------------------------------------------------------------------------
Outs<1> linear_outputs(const Tensor& x, const Tensor& weight, const Text&, const Tensor&, const MaybeTensor&,
                       const MaybeTensor&, const MaybeTensor&, const MaybeText& input_scheme, ScalarType out_dtype,
                       const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeText& out_scheme,
                       const MaybeTensor&, const MaybeTensor&) {
    if (!is_float(out_dtype) || x.dim() == 0 || x.numel() == 0 || weight.dim() != 2) return std::nullopt;
    if (!input_scheme && precision_decides(x)) return std::nullopt;
    const int64_t cols = weight.size(0);
    if (!out_scheme) return Outs<1>{{Out{sizes_with(x, cols), out_dtype}}};
    const auto s = named_scheme(out_scheme->view(), 1, cols);
    if (!s) return std::nullopt;
    return Outs<1>{{Out{sizes_with(x, cpu::packed_cols(cols, s->format.bits)), ScalarType::Byte}}};
}

// x holds codes already: their product, which becomes codes as a whole.
void multiply_codes(const Tensor& x, const Rounded& input, mm::Problem& p, const MaybeTensor& bias,
                    const std::optional<Rounded>& output, const Tensor& out) {
    const int64_t cols = x.size(x.dim() - 1);
    const Tensor codes = as_matrix(x);
    p.a = operand_of({codes, input.scheme, input.scale, input.zero_point, input.global_scale}, cols);
    p.depth = cols;
    add_bias(p, bias);
    const Tensor y = output ? new_tensor({p.a.rows, p.b.rows}, ScalarType::Float) : out;
    add_out(p, p.a.rows, y);
    mm::multiply(p);
    if (!output) return;
    const SchemeParams& s = output->scheme;
    const cpu::Shape shape{p.a.rows, p.b.rows};
    cpu::quantize_static(values_of(y), shape, s, given_scales(*output, shape), kNearest, {},
                         new_bytes_of(out, shape.rows, cpu::packed_cols(shape.cols, s.format.bits)));
}

bool linear(const Tensor& x, const Tensor& weight, const Text& scheme, const Tensor& scale,
            const MaybeTensor& zero_point, const MaybeTensor& global_scale, const MaybeTensor& bias,
            const MaybeText& input_scheme, ScalarType, const MaybeTensor& input_scale,
            const MaybeTensor& input_zero_point, const MaybeTensor& input_global_scale, const MaybeText& out_scheme,
            const MaybeTensor& out_scale, const MaybeTensor& out_zero_point, const Tensor& out) {
    const int64_t cols = x.size(x.dim() - 1), rows = x.numel() / cols;
    std::optional<Rounded> input, output;
    if (!rounded(input, input_scheme, rows, cols, input_scale, input_zero_point, input_global_scale)) return false;
    if (!rounded(output, out_scheme, rows, weight.size(0), out_scale, out_zero_point, {})) return false;
    const auto codes = coded(weight, scheme, scale, zero_point, global_scale, cols);
    if (!codes || (output && !output->scale)) return false;
    mm::Problem p;
    p.b = operand_of(*codes, cols);
    if (x.scalar_type() != ScalarType::Byte) {
        multiply_rows(x, input, p, bias, output, out);
    } else {
        if (!input || !input->scale || input->scheme.format.bits != 8) return false;
        multiply_codes(x, *input, p, bias, output, out);
    }
    return true;
}

// -- linear_packed ---------------------------------------------------------------------------------------------------
// The header of a packed weight, in 64-bit words; lowbit/tensor/prepack.py writes it, and says what each word is.
constexpr int64_t kPackedMagic = 0x326b636150626c00;  // "\0lbPack2"
constexpr int64_t kPackedHeader = 1024;               // bytes
enum PackedWord : int {
    kPackedRows = 2,
    kPackedCols = 3,
    kPackedCodes = 4,  // where each part begins, in bytes
    kPackedScale = 5,
    kPackedZero = 6,
    kPackedGlobalScale = 7,
    kPackedPanel = 8,     // bytes of a panel
    kPackedHasInput = 9,  // whether x is quantized
    kPackedScheme = 16,   // Scheme.params()
    kPackedInput = 40,
};
struct Packed {
    const int64_t* words;
    int64_t rows, cols;
};

// `buffer` is contiguous.
Packed packed_of(const Tensor& buffer) {
    require(buffer.dim() == 1 && buffer.scalar_type() == ScalarType::Byte && buffer.numel() >= kPackedHeader);
    const auto* words = static_cast<const int64_t*>(buffer.const_data_ptr());
    require(words[0] == kPackedMagic && words[1] == buffer.numel());
    return {words, words[2], words[3]};
}

using MaybeType = std::optional<ScalarType>;

Outs<1> linear_packed_outputs(const Tensor& x, const Tensor&, int64_t out_features, const MaybeTensor&,
                              MaybeType out_dtype) {
    const ScalarType dtype = out_dtype.value_or(x.scalar_type());
    if (x.dim() == 0 || x.numel() == 0 || !is_float(dtype)) return std::nullopt;
    return Outs<1>{{Out{sizes_with(x, out_features), dtype}}};
}

bool linear_packed(const Tensor& x, const Tensor& buffer, int64_t out_features, const MaybeTensor& bias,
                   MaybeType dtype, const Tensor& out) {
    if (!buffer.is_contiguous()) return linear_packed(x, dense(buffer), out_features, bias, dtype, out);
    const Packed packed = packed_of(buffer);
    if (packed.rows != out_features) return false;
    const int64_t* words = packed.words;
    const int64_t cols = x.size(x.dim() - 1);
    require(x.dim() >= 1 && cols == packed.cols);
    const SchemeParams s = scheme_of(words + kPackedScheme, packed.rows, cols);
    const auto* base = reinterpret_cast<const uint8_t*>(words);
    mm::Problem p;
    p.b.data = base + words[kPackedCodes];
    p.b.rows = packed.rows;
    p.b.panel_bytes = words[kPackedPanel];
    put_format(p.b, s);
    p.b.scale = base + words[kPackedScale];
    p.b.scale_row_stride = scale_shape({packed.rows, cols}, s).cols;
    p.b.scale_col_stride = mm::kPanelRows;
    if (s.affine) p.b.zero_point = base + words[kPackedZero];
    if (s.global_scale) p.b.global_scale = reinterpret_cast<const float*>(base + words[kPackedGlobalScale]);
    if (s.global_scale == kGlobalScaleRow) p.b.global_scale_row_stride = 1;
    std::optional<Rounded> input;
    if (words[kPackedHasInput] != 0) {
        const int64_t rows = cols > 0 ? x.numel() / cols : 0;
        input = Rounded{scheme_of(words + kPackedInput, rows, cols), {}, {}, {}};
    }
    multiply_rows(x, input, p, bias, {}, out);
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_OP(scaled_mm, &lowbit::scaled_mm, &lowbit::scaled_mm_outputs)
LOWBIT_OP(linear, &lowbit::linear, &lowbit::linear_outputs)
LOWBIT_OP(linear_packed, &lowbit::linear_packed, &lowbit::linear_packed_outputs)
