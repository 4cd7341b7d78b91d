#include "ops_conv.h"

#include "cpu/conv/conv.h"
#include "ops_params.h"

namespace lowbit {

// Axes that x lacks of three come first, of one pixel and one tap.
mm::Window window_of(const Tensor& x, const Geometry& geometry) {
    const int64_t axes = x.dim() - 2, missing = 3 - axes;
    const auto has = [&](const std::vector<int64_t>& numbers, int64_t each) {
        return static_cast<int64_t>(numbers.size()) == each * axes;
    };
    STD_TORCH_CHECK(axes >= 1 && axes <= 3 && has(geometry.kernel, 1) && has(geometry.stride, 1) &&
                        has(geometry.padding, 2) && has(geometry.dilation, 1),
                    "lowbit: conv takes x of 1 to 3 axes besides N and C, and a number for each");
    mm::Window w;
    w.batch = x.size(0);
    w.channels = x.size(axes + 1);
    w.groups = geometry.groups;
    STD_TORCH_CHECK(w.batch > 0 && w.groups > 0 && w.channels > 0 && w.channels % w.groups == 0,
                    "lowbit: conv: groups must divide the channels");
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
        STD_TORCH_CHECK(
            w.size[i] > 0 && w.kernel[i] > 0 && w.stride[i] > 0 && w.dilation[i] > 0 && w.before[i] >= 0 && after >= 0,
            "lowbit: conv: sizes must be positive");
        const int64_t room = w.size[i] + w.before[i] + after - w.dilation[i] * (w.kernel[i] - 1) - 1;
        STD_TORCH_CHECK(room >= 0, "lowbit: conv: the kernel is larger than the padded input");
        w.out[i] = room / w.stride[i] + 1;
    }
    return w;
}

bool serves(const mm::Window& w, const std::optional<PixelRounding>& input, const Coded& weight) {
    const int64_t cols = weight.data.size(0), tall = weight.scheme->block_rows;
    if (w.groups > 1 && tall < cols && cols / w.groups % tall != 0) return false;
    if (!input) return true;
    const SchemeParams& s = input->rounded.scheme;
    return input->once ? s.format.bits == 8 : s.block_rows == 1;
}

void conv(const Tensor& given, const mm::Window& w, const std::optional<PixelRounding>& input, const Coded& weight,
          const MaybeTensor& bias, const std::optional<Rounded>& output, const Tensor& out) {
    STD_TORCH_CHECK(out.is_contiguous() && weight.data.dim() == 2,
                    "lowbit: conv takes a contiguous out, and a matrix as weight");
    STD_TORCH_CHECK(serves(w, input, weight),
                    "lowbit: conv: groups must have scales of their own, and x one or a patch's");
    const Tensor x = dense(given);
    const int64_t cols = weight.data.size(0), rows = w.rows();
    mm::Problem p;
    p.depth = w.depth();
    p.b = operand_of("weight", weight, p.depth);
    STD_TORCH_CHECK(cols % w.groups == 0, "lowbit: conv: groups must have rows of the weight of their own");
    add_bias(p, bias);
    const bool are_codes = x.scalar_type() == torch::headeronly::ScalarType::Byte;
    std::optional<cpu::PixelInput> from;
    if (input) {
        const SchemeParams& s = input->rounded.scheme;
        const cpu::Shape shape =
            input->once ? cpu::Shape{w.pixels(), w.channels} : cpu::Shape{rows * w.groups, p.depth};
        from = cpu::PixelInput{s, given_scales(input->rounded, shape), input->once, are_codes};
    }
    STD_TORCH_CHECK(!are_codes || (from && from->once && from->given.scale != nullptr),
                    "lowbit: conv: codes have one scale, which is given");
    std::optional<cpu::Output> to;
    if (output) {
        const SchemeParams& s = output->scheme;
        STD_TORCH_CHECK(output->scale.has_value() && s.global_scale == 0, "lowbit: an output in codes needs its scale");
        to = cpu::Output{s, given_scales(*output, {rows, cols}),
                         new_bytes_of(out, rows, cpu::packed_cols(cols, s.format.bits), "out")};
    } else {
        add_out(p, rows, out);
    }
    const Dtype dtype = are_codes ? Dtype::kFloat32 : dtype_of(x, "x");  // of codes nothing reads it
    cpu::conv({x.const_data_ptr(), dtype, w.channels}, w, from ? &*from : nullptr, p, to ? &*to : nullptr);
}

namespace {

void conv_op(const Tensor& x, int64_t input, MaybeTensor input_scale, MaybeTensor input_zero_point,
             MaybeTensor input_global_scale, const Tensor& weight, int64_t scheme, const Tensor& scale,
             MaybeTensor zero_point, MaybeTensor global_scale, MaybeTensor bias, int64_t out_scheme,
             MaybeTensor out_scale, MaybeTensor out_zero_point, const Tensor& out, std::vector<int64_t> kernel,
             std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups) {
    const mm::Window w = window_of(x, {kernel, stride, padding, dilation, groups});
    std::optional<PixelRounding> from;
    if (input >= 0) {
        const auto find = [&](int64_t rows, int64_t cols) { return std::optional(kept_scheme(input, rows, cols)); };
        from = pixel_rounding(w, find, input_scale, input_zero_point, input_global_scale);
    }
    std::optional<Rounded> to;
    if (out_scheme >= 0) {
        to = Rounded{kept_scheme(out_scheme, w.rows(), weight.size(0)), out_scale, out_zero_point, {}};
    }
    conv(x, w, from, {weight, kept_scheme(scheme, weight.size(0), w.depth()), scale, zero_point, global_scale}, bias,
         to, out);
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) { m.impl("conv", TORCH_BOX(&lowbit::conv_op)); }
