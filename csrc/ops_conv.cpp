// The op conv on CPU tensors: the plain description that cpu/conv/conv.h computes.
#include "cpu/conv/conv.h"

#include "ops_matmul.h"
#include "ops_params.h"

namespace lowbit {
namespace {

// `numbers`: kernel, stride, dilation and zeros before, three of each. x [N, D, H, W, C], out [N, D', H', W', O].
mm::Window window_of(const Tensor& x, const Tensor& out, int64_t groups, const std::vector<int64_t>& numbers) {
    STD_TORCH_CHECK(x.dim() == 5 && x.is_contiguous() && out.dim() == 5 && out.is_contiguous() && numbers.size() == 12,
                    "lowbit: conv takes contiguous x and out of five axes, and twelve numbers");
    mm::Window w;
    w.batch = x.size(0);
    w.channels = x.size(4);
    w.groups = groups;
    STD_TORCH_CHECK(groups > 0 && w.channels % groups == 0 && out.size(0) == w.batch, "lowbit: conv: groups or batch");
    for (int i = 0; i < 3; ++i) {
        w.size[i] = x.size(1 + i);
        w.out[i] = out.size(1 + i);
        w.kernel[i] = numbers[i];
        w.stride[i] = numbers[3 + i];
        w.dilation[i] = numbers[6 + i];
        w.before[i] = numbers[9 + i];
        STD_TORCH_CHECK(w.kernel[i] > 0 && w.stride[i] > 0 && w.dilation[i] > 0 && w.before[i] >= 0 && w.size[i] > 0 &&
                            w.out[i] > 0,
                        "lowbit: conv: sizes must be positive");
    }
    return w;
}

void conv(const Tensor& x, int64_t input, bool once, MaybeTensor input_scale, MaybeTensor input_zero_point,
          MaybeTensor input_outer, const Tensor& weight, int64_t scheme, const Tensor& scale, MaybeTensor zero_point,
          MaybeTensor outer, MaybeTensor bias, int64_t out_scheme, MaybeTensor out_scale, MaybeTensor out_zero_point,
          const Tensor& out, int64_t groups, std::vector<int64_t> numbers) {
    const mm::Window w = window_of(x, out, groups, numbers);
    const int64_t cols = weight.size(0), rows = w.rows();
    mm::Problem p;
    p.depth = w.depth();
    p.b = operand_of("weight", {weight, kept_scheme(scheme, cols, p.depth), scale, zero_point, outer}, p.depth);
    STD_TORCH_CHECK(cols % groups == 0 && (groups == 1 || p.b.block_rows >= cols || cols / groups % p.b.block_rows == 0),
                    "lowbit: conv: groups must have rows of the weight, and scales, of their own");
    add_bias(p, bias);
    std::optional<cpu::PixelInput> from;
    if (input >= 0) {
        const cpu::Shape shape = once ? cpu::Shape{w.pixels(), w.channels} : cpu::Shape{rows * groups, p.depth};
        const SchemeParams s = kept_scheme(input, shape.rows, shape.cols);
        STD_TORCH_CHECK(once ? s.format.bits == 8 : s.block_rows == 1, "lowbit: conv: not a scheme of pixels");
        from = cpu::PixelInput{s, given_scales({s, input_scale, input_zero_point, input_outer}, shape), once};
    }
    std::optional<cpu::Output> to;
    if (out_scheme >= 0) {
        const SchemeParams s = kept_scheme(out_scheme, rows, cols);
        STD_TORCH_CHECK(out_scale.has_value() && s.outer == 0, "lowbit: an output in codes needs its scale");
        to = cpu::Output{s, given_scales({s, out_scale, out_zero_point, {}}, {rows, cols}),
                         new_bytes_of(out, rows, cpu::packed_cols(cols, s.format.bits), "out")};
    } else {
        add_out(p, rows, out);
    }
    cpu::conv({x.const_data_ptr(), dtype_of(x, "x"), w.channels}, w, from ? &*from : nullptr, p, to ? &*to : nullptr);
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) { m.impl("conv", TORCH_BOX(&lowbit::conv)); }
