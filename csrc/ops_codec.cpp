// CPU kernels of lowbit_native::* for codecs and quantization: from stable tensors to plain pointers.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "cpu/codec.h"
#include "ops_params.h"
#include "ops_tensors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;
using namespace lowbit;

const float* outer_data(const std::optional<Tensor>& t) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && t->numel() == 1, "outer_scale must be one float32");
    return static_cast<const float*>(t->const_data_ptr());
}

cpu::Scales scales_of(const std::optional<Tensor>& scale, const std::optional<Tensor>& zero_point,
                      const std::optional<Tensor>& outer, cpu::Shape shape, const SchemeParams& s) {
    STD_TORCH_CHECK(!scale || (s.affine != 0) == zero_point.has_value(),
                    "affine schemes, and no others, have zero points");
    return {scale ? scale_data(*scale, shape, s, false) : nullptr,
            zero_point ? scale_data(*zero_point, shape, s, true) : nullptr, outer_data(outer)};
}

void encode(Tensor x, Tensor out, int64_t format, bool saturate, Ints rng) {
    cpu::encode(values(x), shape_of(x), kept_format(format), rounding_of(rng), saturate, rng_of(rng),
                new_bytes(out, x.size(0), x.size(1), "out"));
}

void decode(Tensor codes, Tensor out, int64_t format) {
    cpu::decode(bytes(codes, out.size(0), out.size(1), "codes"), shape_of(out), kept_format(format), results(out));
}

void pack(Tensor codes, Tensor out, int64_t bits) {
    const cpu::Shape shape = shape_of(codes);
    const int width = static_cast<int>(bits);
    cpu::pack(bytes(codes, shape.rows, shape.cols, "codes"), shape, width,
              new_bytes(out, shape.rows, cpu::packed_cols(shape.cols, width), "out"));
}

void unpack(Tensor packed, Tensor out, int64_t bits) {
    const cpu::Shape shape = shape_of(out);
    const int width = static_cast<int>(bits);
    cpu::unpack(bytes(packed, shape.rows, cpu::packed_cols(shape.cols, width), "packed"), shape, width,
                new_bytes(out, shape.rows, shape.cols, "out"));
}

void outer_scale(Tensor x, Tensor out, int64_t scheme) {
    STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.numel() == 1, "out must be one float32");
    *static_cast<float*>(out.mutable_data_ptr()) =
        cpu::outer_scale(values(x), shape_of(x), kept_scheme(scheme, x.size(0), x.size(1)));
}

void quantize(Tensor x, std::optional<Tensor> outer, Tensor codes, Tensor scale, std::optional<Tensor> zero_point,
              int64_t scheme, Ints rng) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    STD_TORCH_CHECK(!s.affine || zero_point, "an affine scheme needs zero_point to write to");
    const cpu::NewScales to{new_scale_data(scale, shape, s, false),
                            zero_point ? new_scale_data(*zero_point, shape, s, true) : nullptr, outer_data(outer)};
    cpu::quantize(values(x), shape, s, to, rounding_of(rng), rng_of(rng),
                  new_bytes(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes"));
}

void quantize_static(Tensor x, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                     Tensor codes, int64_t scheme, Ints rng) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    cpu::quantize_static(values(x), shape, s, scales_of(scale, zero_point, outer, shape, s), rounding_of(rng),
                         rng_of(rng),
                         new_bytes(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes"));
}

void dequantize(Tensor codes, Tensor scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer, Tensor out,
                int64_t scheme) {
    const cpu::Shape shape = shape_of(out);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    cpu::dequantize(bytes(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes"), shape, s,
                    scales_of(scale, zero_point, outer, shape, s), results(out));
}

void fake_quantize(Tensor x, std::optional<Tensor> scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                   Tensor out, int64_t scheme, Ints rng) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    STD_TORCH_CHECK(out.size(0) == shape.rows && out.size(1) == shape.cols, "out must have x's shape");
    cpu::fake_quantize(values(x), shape, s, scales_of(scale, zero_point, outer, shape, s), rounding_of(rng),
                       rng_of(rng), results(out));
}

void fake_quantize_backward(Tensor grad, Tensor x, std::optional<Tensor> scale, std::optional<Tensor> zero_point,
                            std::optional<Tensor> outer, Tensor grad_x, std::optional<Tensor> grad_scale,
                            int64_t scheme) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    for (const Tensor& t : {grad, grad_x}) {
        STD_TORCH_CHECK(t.size(0) == shape.rows && t.size(1) == shape.cols, "gradients must have x's shape");
    }
    STD_TORCH_CHECK(grad.scalar_type() == grad_x.scalar_type(), "grad_x must have grad's dtype");
    const cpu::Scales from = scales_of(scale, zero_point, outer, shape, s);
    float* slopes = nullptr;
    if (grad_scale) {
        STD_TORCH_CHECK(
            scale && grad_scale->scalar_type() == ScalarType::Float && grad_scale->numel() == scale->numel(),
            "grad_scale must be float32, one for each scale given");
        slopes = static_cast<float*>(grad_scale->mutable_data_ptr());
    }
    cpu::fake_quantize_backward(values(grad), values(x), shape, s, from, results(grad_x), slopes);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) {
    m.impl("encode", TORCH_BOX(&encode));
    m.impl("decode", TORCH_BOX(&decode));
    m.impl("pack", TORCH_BOX(&pack));
    m.impl("unpack", TORCH_BOX(&unpack));
    m.impl("outer_scale", TORCH_BOX(&outer_scale));
    m.impl("quantize", TORCH_BOX(&quantize));
    m.impl("quantize_static", TORCH_BOX(&quantize_static));
    m.impl("dequantize", TORCH_BOX(&dequantize));
    m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
    m.impl("fake_quantize_backward", TORCH_BOX(&fake_quantize_backward));
}
