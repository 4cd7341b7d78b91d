// CPU kernels of lowbit_native::* for codecs and quantization: from stable tensors to plain pointers.
#include "ops_codec.h"

#include <vector>

#include "ops_params.h"

namespace lowbit {
namespace {

void check_global_scale(const MaybeTensor& t, cpu::Shape shape, const SchemeParams& s) {
    STD_TORCH_CHECK((s.global_scale != 0) == t.has_value(),
                    "schemes with a global scale, and no others, have a global_scale");
    const int64_t count = global_scale_count(s, shape.rows);
    STD_TORCH_CHECK(!t || (t->scalar_type() == ScalarType::Float && t->numel() == count && t->is_contiguous()),
                    "global_scale must be ", count, " numbers, float32 and contiguous");
}

void check_scales(const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale,
                  cpu::Shape shape, const SchemeParams& s) {
    STD_TORCH_CHECK(!scale || (s.affine != 0) == zero_point.has_value(),
                    "affine schemes, and no others, have zero points");
    if (scale) check_scale(*scale, shape, s, false);
    if (zero_point) check_scale(*zero_point, shape, s, true);
    check_global_scale(global_scale, shape, s);
}

const float* level(const MaybeTensor& global_scale) { return static_cast<const float*>(data_of(global_scale)); }

cpu::Scales scales_of(const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale) {
    return {data_of(scale), data_of(zero_point), level(global_scale)};
}

}  // namespace

void encode(const Tensor& x, const Tensor& out, const FormatParams& format, bool saturate, const Random& random) {
    const cpu::Shape shape = shape_of(x, "x");
    cpu::encode(values_of(x, "x"), shape, format, random.rounding, saturate, random.rng,
                new_bytes_of(out, shape.rows, shape.cols, "out"));
}

void decode(const Tensor& codes, const Tensor& out, const FormatParams& format) {
    const cpu::Shape shape = shape_of(out, "out");
    cpu::decode(bytes_of(codes, shape.rows, shape.cols, "codes"), shape, format, results_of(out, "out", shape));
}

void quantize(const Tensor& x, const MaybeTensor& global_scale, const Tensor& codes, const Tensor& scale,
              const MaybeTensor& zero_point, const SchemeParams& s, const Random& random) {
    const cpu::Shape shape = shape_of(x, "x");
    STD_TORCH_CHECK(!s.affine || zero_point, "an affine scheme needs zero_point to write to");
    check_scale(scale, shape, s, false);
    if (zero_point) check_scale(*zero_point, shape, s, true);
    check_global_scale(global_scale, shape, s);
    cpu::quantize(values_of(x, "x"), shape, s, {scale.mutable_data_ptr(), new_data_of(zero_point), level(global_scale)},
                  random.rounding, random.rng,
                  new_bytes_of(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes"));
}

void quantize_static(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point,
                     const MaybeTensor& global_scale, const Tensor& codes, const SchemeParams& s,
                     const Random& random) {
    const cpu::Shape shape = shape_of(x, "x");
    check_scales(scale, zero_point, global_scale, shape, s);
    cpu::quantize_static(values_of(x, "x"), shape, s, scales_of(scale, zero_point, global_scale), random.rounding,
                         random.rng,
                         new_bytes_of(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes"));
}

void dequantize(const Tensor& codes, const Tensor& scale, const MaybeTensor& zero_point,
                const MaybeTensor& global_scale, const Tensor& out, const SchemeParams& s) {
    const cpu::Shape shape = shape_of(out, "out");
    check_scales(scale, zero_point, global_scale, shape, s);
    cpu::dequantize(bytes_of(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes"), shape, s,
                    scales_of(scale, zero_point, global_scale), results_of(out, "out", shape));
}

void fake_quantize(const Tensor& x, const MaybeTensor& scale, const MaybeTensor& zero_point,
                   const MaybeTensor& global_scale, const Tensor& out, const SchemeParams& s, const Random& random) {
    const cpu::Shape shape = shape_of(x, "x");
    check_scales(scale, zero_point, global_scale, shape, s);
    cpu::fake_quantize(values_of(x, "x"), shape, s, scales_of(scale, zero_point, global_scale), random.rounding,
                       random.rng, results_of(out, "out", shape));
}

// -- lowbit_native::*, whose formats and schemes are numbers ---------------------------------------------------------
namespace native {

using Ints = std::vector<int64_t>;

SchemeParams scheme_for(int64_t number, const Tensor& x) {
    const cpu::Shape shape = shape_of(x, "x");
    return kept_scheme(number, shape.rows, shape.cols);
}

void encode(const Tensor& x, const Tensor& out, int64_t format, bool saturate, const MaybeTensor& rng, Ints place) {
    lowbit::encode(x, out, kept_format(format), saturate, random_of(rng, place));
}
void decode(const Tensor& codes, const Tensor& out, int64_t format) { lowbit::decode(codes, out, kept_format(format)); }

void pack(const Tensor& codes, const Tensor& out, int64_t bits) {
    const cpu::Shape shape = shape_of(codes, "codes");
    const int width = static_cast<int>(bits);
    cpu::pack(bytes_of(codes, shape.rows, shape.cols, "codes"), shape, width,
              new_bytes_of(out, shape.rows, cpu::packed_cols(shape.cols, width), "out"));
}
void unpack(const Tensor& packed, const Tensor& out, int64_t bits) {
    const cpu::Shape shape = shape_of(out, "out");
    const int width = static_cast<int>(bits);
    cpu::unpack(bytes_of(packed, shape.rows, cpu::packed_cols(shape.cols, width), "packed"), shape, width,
                new_bytes_of(out, shape.rows, shape.cols, "out"));
}

void global_scale(const Tensor& x, const Tensor& out, int64_t scheme) {
    const cpu::Shape shape = shape_of(x, "x");
    const SchemeParams s = scheme_for(scheme, x);
    check_global_scale(out, shape, s);
    cpu::global_scale(values_of(x, "x"), shape, s, static_cast<float*>(out.mutable_data_ptr()));
}

void block_range(const Tensor& x, const Tensor& low, const Tensor& high, int64_t scheme) {
    const cpu::Shape shape = shape_of(x, "x");
    const SchemeParams s = scheme_for(scheme, x);
    const cpu::Shape blocks = scale_shape(shape, s);
    for (const Tensor& t : {low, high}) {
        STD_TORCH_CHECK(
            t.scalar_type() == ScalarType::Float && t.numel() == blocks.rows * blocks.cols && t.is_contiguous(),
            "low and high must be ", blocks.rows * blocks.cols, " numbers, float32 and contiguous");
    }
    cpu::block_range(values_of(x, "x"), shape, s, static_cast<float*>(low.mutable_data_ptr()),
                     static_cast<float*>(high.mutable_data_ptr()));
}

void quantize(const Tensor& x, MaybeTensor global_scale, const Tensor& codes, const Tensor& scale,
              MaybeTensor zero_point, int64_t scheme, const MaybeTensor& rng, Ints place) {
    lowbit::quantize(x, global_scale, codes, scale, zero_point, scheme_for(scheme, x), random_of(rng, place));
}
void quantize_static(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, MaybeTensor global_scale,
                     const Tensor& codes, int64_t scheme, const MaybeTensor& rng, Ints place) {
    lowbit::quantize_static(x, scale, zero_point, global_scale, codes, scheme_for(scheme, x), random_of(rng, place));
}
void dequantize(const Tensor& codes, const Tensor& scale, MaybeTensor zero_point, MaybeTensor global_scale,
                const Tensor& out, int64_t scheme) {
    lowbit::dequantize(codes, scale, zero_point, global_scale, out, scheme_for(scheme, out));
}
void fake_quantize(const Tensor& x, MaybeTensor scale, MaybeTensor zero_point, MaybeTensor global_scale,
                   const Tensor& out, int64_t scheme, const MaybeTensor& rng, Ints place) {
    lowbit::fake_quantize(x, scale, zero_point, global_scale, out, scheme_for(scheme, x), random_of(rng, place));
}

void fake_quantize_backward(const Tensor& grad, const Tensor& x, MaybeTensor scale, MaybeTensor zero_point,
                            MaybeTensor global_scale, const Tensor& grad_x, MaybeTensor grad_scale, int64_t scheme) {
    const cpu::Shape shape = shape_of(x, "x");
    const SchemeParams s = scheme_for(scheme, x);
    STD_TORCH_CHECK(grad.scalar_type() == grad_x.scalar_type(), "grad_x must have grad's dtype");
    check_scales(scale, zero_point, global_scale, shape, s);
    STD_TORCH_CHECK(!grad_scale || (scale && grad_scale->scalar_type() == ScalarType::Float &&
                                    grad_scale->numel() == (s.affine ? 2 : 1) * scale->numel()),
                    "grad_scale must be float32, one for each scale and zero point given");
    results_of(grad, "grad", shape);
    cpu::fake_quantize_backward(values_of(grad, "grad"), values_of(x, "x"), shape, s,
                                scales_of(scale, zero_point, global_scale), results_of(grad_x, "grad_x", shape),
                                static_cast<float*>(new_data_of(grad_scale)));
}

}  // namespace native
}  // namespace lowbit

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) {
    namespace native = lowbit::native;
    m.impl("encode", TORCH_BOX(&native::encode));
    m.impl("decode", TORCH_BOX(&native::decode));
    m.impl("pack", TORCH_BOX(&native::pack));
    m.impl("unpack", TORCH_BOX(&native::unpack));
    m.impl("global_scale", TORCH_BOX(&native::global_scale));
    m.impl("block_range", TORCH_BOX(&native::block_range));
    m.impl("quantize", TORCH_BOX(&native::quantize));
    m.impl("quantize_static", TORCH_BOX(&native::quantize_static));
    m.impl("dequantize", TORCH_BOX(&native::dequantize));
    m.impl("fake_quantize", TORCH_BOX(&native::fake_quantize));
    m.impl("fake_quantize_backward", TORCH_BOX(&native::fake_quantize_backward));
}
