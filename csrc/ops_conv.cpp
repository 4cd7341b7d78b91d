// The CPU kernel of conv: the plain description that cpu/conv/conv.h takes.
#include "cpu/conv/conv.h"

#include <algorithm>

#include "ops_matmul.h"
#include "ops_params.h"

namespace lowbit {
namespace {

using entry::MaybeText;
using entry::Out;
using entry::Outs;
using entry::Text;
using Ints = std::vector<int64_t>;

// As the op's arguments of these names: a number for each axis of x [N, *S, C], two of `padding`.
struct Geometry {
    const Ints &kernel, &stride, &padding, &dilation;
    int64_t groups;
};

// Axes that x lacks of three come first, of one pixel and one tap.
mm::Window window_of(const Tensor& x, const Geometry& geometry) {
    const int64_t axes = x.dim() - 2, missing = 3 - axes;
    const auto has = [&](const Ints& numbers, int64_t each) {
        return static_cast<int64_t>(numbers.size()) == each * axes;
    };
    require(axes >= 1 && axes <= 3 && has(geometry.kernel, 1) && has(geometry.stride, 1) && has(geometry.padding, 2) &&
            has(geometry.dilation, 1));
    mm::Window w;
    w.batch = x.size(0);
    w.channels = x.size(axes + 1);
    w.groups = geometry.groups;
    require(w.batch > 0 && w.groups > 0 && w.channels > 0 && w.channels % w.groups == 0);
    for (int64_t i = 0; i < 3; ++i) {
        const int64_t axis = i - missing;
        const auto at = static_cast<size_t>(axis);
        const bool is_there = axis >= 0;
        const int64_t after = is_there ? geometry.padding[2 * at + 1] : 0;
        w.size[i] = is_there ? x.size(1 + axis) : 1;
        w.kernel[i] = is_there ? geometry.kernel[at] : 1;
        w.stride[i] = is_there ? geometry.stride[at] : 1;
        w.dilation[i] = is_there ? geometry.dilation[at] : 1;
        w.before[i] = is_there ? geometry.padding[2 * at] : 0;
        require(w.size[i] > 0 && w.kernel[i] > 0 && w.stride[i] > 0 && w.dilation[i] > 0 && w.before[i] >= 0 &&
                after >= 0);
        const int64_t room = w.size[i] + w.before[i] + after - w.dilation[i] * (w.kernel[i] - 1) - 1;
        require(room >= 0);
        w.out[i] = room / w.stride[i] + 1;
    }
    return w;
}

// How x is quantized: `once`, by one scale, or each patch by itself.
struct PixelRounding {
    Rounded rounded;
    bool once;
};
// Nothing for a name that is no scheme.
std::optional<PixelRounding> pixel_rounding(const mm::Window& w, const Text& scheme, const MaybeTensor& scale,
                                            const MaybeTensor& zero_point, const MaybeTensor& global_scale) {
    constexpr int64_t any = int64_t{1} << 40;  // longer than every axis, as only blocks that span one become
    const auto whole = named_scheme(scheme.view(), any, any);
    if (!whole) return std::nullopt;
    const bool once = whole->block_rows == any && whole->block_cols == any;
    const cpu::Shape shape = once ? cpu::Shape{w.pixels(), w.channels} : cpu::Shape{w.rows() * w.groups, w.depth()};
    return PixelRounding{{*named_scheme(scheme.view(), shape.rows, shape.cols), scale, zero_point, global_scale}, once};
}

// Whether groups have scales of their own, and x has one for the tensor, or scales for each patch.
bool serves(const mm::Window& w, const std::optional<PixelRounding>& input, const Coded& weight) {
    const int64_t cols = weight.data.size(0), tall = weight.scheme->block_rows;
    if (w.groups > 1 && tall < cols && cols / w.groups % tall != 0) return false;
    if (!input) return true;
    const SchemeParams& s = input->rounded.scheme;
    return input->once ? s.format.bits == 8 : s.block_rows == 1 && !input->rounded.scale;
}

Outs<1> conv_outputs(const Tensor& x, const Tensor& weight, const Text&, const Tensor&, const MaybeTensor&,
                     const MaybeTensor&, const MaybeTensor&, const Ints& kernel, const Ints& stride,
                     const Ints& padding, const Ints& dilation, int64_t groups, const MaybeText&, ScalarType out_dtype,
                     const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeText& out_scheme,
                     const MaybeTensor&, const MaybeTensor&) {
    if (!is_float(out_dtype) || x.numel() == 0 || weight.dim() != 2) return std::nullopt;
    const mm::Window w = window_of(x, {kernel, stride, padding, dilation, groups});
    int64_t width = weight.size(0);
    if (out_scheme) {
        const auto s = named_scheme(out_scheme->view(), 1, width);
        if (!s) return std::nullopt;
        width = cpu::packed_cols(width, s->format.bits);
    }
    Ints sizes = sizes_with(x, width);
    std::copy_n(w.out + 3 - kernel.size(), kernel.size(), sizes.begin() + 1);
    return Outs<1>{{Out{sizes, out_scheme ? ScalarType::Byte : out_dtype}}};
}

bool conv(const Tensor& given, const Tensor& weight, const Text& scheme, const Tensor& scale,
          const MaybeTensor& zero_point, const MaybeTensor& global_scale, const MaybeTensor& bias, const Ints& kernel,
          const Ints& stride, const Ints& padding, const Ints& dilation, int64_t groups, const MaybeText& input_scheme,
          ScalarType, const MaybeTensor& input_scale, const MaybeTensor& input_zero_point,
          const MaybeTensor& input_global_scale, const MaybeText& out_scheme, const MaybeTensor& out_scale,
          const MaybeTensor& out_zero_point, const Tensor& out) {
    const mm::Window w = window_of(given, {kernel, stride, padding, dilation, groups});
    const int64_t cols = weight.size(0), rows = w.rows();
    std::optional<PixelRounding> input;
    if (input_scheme) {
        input = pixel_rounding(w, *input_scheme, input_scale, input_zero_point, input_global_scale);
        if (!input) return false;
    }
    if (!(input_scheme && input_scale) && (input_scale || input_zero_point || input_global_scale)) return false;
    std::optional<Rounded> output;
    if (!rounded(output, out_scheme, rows, cols, out_scale, out_zero_point, {})) return false;
    const auto codes = coded(weight, scheme, scale, zero_point, global_scale, w.depth());
    if (!codes || !serves(w, input, *codes)) return false;
    mm::Problem p;
    p.depth = w.depth();
    p.b = operand_of(*codes, p.depth);
    require(cols % w.groups == 0);
    add_bias(p, bias);
    const Tensor x = dense(given);
    const bool are_codes = x.scalar_type() == ScalarType::Byte;
    std::optional<cpu::PixelInput> from;
    if (input) {
        const cpu::Shape shape =
            input->once ? cpu::Shape{w.pixels(), w.channels} : cpu::Shape{rows * w.groups, p.depth};
        from = cpu::PixelInput{input->rounded.scheme, given_scales(input->rounded, shape), input->once, are_codes};
    }
    require(!are_codes || (from && from->once && from->given.scale != nullptr));
    std::optional<cpu::Output> to;
    if (output) {
        const SchemeParams& s = output->scheme;
        require(output->scale.has_value() && s.global_scale == 0);
        to = cpu::Output{s, given_scales(*output, {rows, cols}),
                         new_bytes_of(out, rows, cpu::packed_cols(cols, s.format.bits))};
    } else {
        add_out(p, rows, out);
    }
    const Dtype dtype = are_codes ? Dtype::kFloat32 : dtype_of(x);  // of codes nothing reads it
    cpu::conv({x.const_data_ptr(), dtype, w.channels}, w, from ? &*from : nullptr, p, to ? &*to : nullptr);
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_OP(conv, &lowbit::conv, &lowbit::conv_outputs)
