// CPU kernels of lowbit_native::* for codecs and quantization: from stable tensors to plain pointers.
#include <optional>
#include <vector>

#include "cpu/codec.h"
#include "ops_params.h"
#include "ops_planned.h"
#include "ops_tensors.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;
using namespace lowbit;

void check_outer(const std::optional<Tensor>& t, cpu::Shape shape, const SchemeParams& s) {
    const int64_t count = outer_count(s, shape.rows);
    STD_TORCH_CHECK(!t || (t->scalar_type() == ScalarType::Float && t->numel() == count && t->is_contiguous()),
                    "outer_scale must be ", count, " numbers, float32 and contiguous");
}

void check_range(const Tensor& t, cpu::Shape shape, const SchemeParams& s) {
    const int64_t down = (shape.rows + s.block_rows - 1) / s.block_rows;
    const int64_t blocks = down * ((shape.cols + s.block_cols - 1) / s.block_cols);
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.numel() == blocks && t.is_contiguous(),
                    "low and high must be ", blocks, " numbers, float32 and contiguous");
}

void check_scales(const std::optional<Tensor>& scale, const std::optional<Tensor>& zero_point,
                  const std::optional<Tensor>& outer, cpu::Shape shape, const SchemeParams& s) {
    STD_TORCH_CHECK(!scale || (s.affine != 0) == zero_point.has_value(),
                    "affine schemes, and no others, have zero points");
    if (scale) check_scale(*scale, shape, s, false);
    if (zero_point) check_scale(*zero_point, shape, s, true);
    check_outer(outer, shape, s);
}

const uint8_t* bytes(const void* data) { return static_cast<const uint8_t*>(data); }
uint8_t* new_bytes(void* data) { return static_cast<uint8_t*>(data); }
const float* level(const void* outer) { return static_cast<const float*>(outer); }

// Each op answers its work on the pointers of its tensors, in the order in which it takes them (ops_planned.h).

Work encode(const Tensor& x, const Tensor& out, int64_t format, bool saturate, Ints rng) {
    const cpu::Shape shape = shape_of(x);
    check_bytes(out, shape.rows, shape.cols, "out");
    return [=, x = matrix(x, "x"), f = kept_format(format), how = rounding_of(rng), random = rng_of(rng)](Pointers t) {
        cpu::encode(x.values(t[0]), shape, f, how, saturate, random, new_bytes(t[1]));
    };
}

Work decode(const Tensor& codes, const Tensor& out, int64_t format) {
    const cpu::Shape shape = shape_of(out);
    check_bytes(codes, shape.rows, shape.cols, "codes");
    return [=, out = matrix(out, "out"), f = kept_format(format)](Pointers t) {
        cpu::decode(bytes(t[0]), shape, f, out.results(t[1]));
    };
}

Work pack(const Tensor& codes, const Tensor& out, int64_t bits) {
    const cpu::Shape shape = shape_of(codes);
    const int width = static_cast<int>(bits);
    check_bytes(codes, shape.rows, shape.cols, "codes");
    check_bytes(out, shape.rows, cpu::packed_cols(shape.cols, width), "out");
    return [=](Pointers t) { cpu::pack(bytes(t[0]), shape, width, new_bytes(t[1])); };
}

Work unpack(const Tensor& packed, const Tensor& out, int64_t bits) {
    const cpu::Shape shape = shape_of(out);
    const int width = static_cast<int>(bits);
    check_bytes(packed, shape.rows, cpu::packed_cols(shape.cols, width), "packed");
    check_bytes(out, shape.rows, shape.cols, "out");
    return [=](Pointers t) { cpu::unpack(bytes(t[0]), shape, width, new_bytes(t[1])); };
}

Work outer_scale(const Tensor& x, const Tensor& out, int64_t scheme) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    check_outer(out, shape, s);
    return
        [=, x = matrix(x, "x")](Pointers t) { cpu::outer_scale(x.values(t[0]), shape, s, static_cast<float*>(t[1])); };
}

Work block_range(const Tensor& x, const Tensor& low, const Tensor& high, int64_t scheme) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    for (const Tensor& t : {low, high}) check_range(t, shape, s);
    return [=, x = matrix(x, "x")](Pointers t) {
        cpu::block_range(x.values(t[0]), shape, s, static_cast<float*>(t[1]), static_cast<float*>(t[2]));
    };
}

Work quantize(const Tensor& x, std::optional<Tensor> outer, const Tensor& codes, const Tensor& scale,
              std::optional<Tensor> zero_point, int64_t scheme, Ints rng) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    STD_TORCH_CHECK(!s.affine || zero_point, "an affine scheme needs zero_point to write to");
    check_scale(scale, shape, s, false);
    if (zero_point) check_scale(*zero_point, shape, s, true);
    check_outer(outer, shape, s);
    check_bytes(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes");
    return [=, x = matrix(x, "x"), how = rounding_of(rng), random = rng_of(rng)](Pointers t) {
        cpu::quantize(x.values(t[0]), shape, s, {t[3], t[4], level(t[1])}, how, random, new_bytes(t[2]));
    };
}

Work quantize_static(const Tensor& x, const Tensor& scale, std::optional<Tensor> zero_point,
                     std::optional<Tensor> outer, const Tensor& codes, int64_t scheme, Ints rng) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    check_scales(scale, zero_point, outer, shape, s);
    check_bytes(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes");
    return [=, x = matrix(x, "x"), how = rounding_of(rng), random = rng_of(rng)](Pointers t) {
        cpu::quantize_static(x.values(t[0]), shape, s, {t[1], t[2], level(t[3])}, how, random, new_bytes(t[4]));
    };
}

Work dequantize(const Tensor& codes, const Tensor& scale, std::optional<Tensor> zero_point, std::optional<Tensor> outer,
                const Tensor& out, int64_t scheme) {
    const cpu::Shape shape = shape_of(out);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    check_bytes(codes, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "codes");
    check_scales(scale, zero_point, outer, shape, s);
    return [=, out = matrix(out, "out")](Pointers t) {
        cpu::dequantize(bytes(t[0]), shape, s, {t[1], t[2], level(t[3])}, out.results(t[4]));
    };
}

Work fake_quantize(const Tensor& x, std::optional<Tensor> scale, std::optional<Tensor> zero_point,
                   std::optional<Tensor> outer, const Tensor& out, int64_t scheme, Ints rng) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    check_scales(scale, zero_point, outer, shape, s);
    STD_TORCH_CHECK(out.size(0) == shape.rows && out.size(1) == shape.cols, "out must have x's shape");
    return [=, x = matrix(x, "x"), out = matrix(out, "out"), how = rounding_of(rng), random = rng_of(rng)](Pointers t) {
        cpu::fake_quantize(x.values(t[0]), shape, s, {t[1], t[2], level(t[3])}, how, random, out.results(t[4]));
    };
}

Work fake_quantize_backward(const Tensor& grad, const Tensor& x, std::optional<Tensor> scale,
                            std::optional<Tensor> zero_point, std::optional<Tensor> outer, const Tensor& grad_x,
                            std::optional<Tensor> grad_scale, int64_t scheme) {
    const cpu::Shape shape = shape_of(x);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols);
    for (const Tensor& t : {grad, grad_x}) {
        STD_TORCH_CHECK(t.size(0) == shape.rows && t.size(1) == shape.cols, "gradients must have x's shape");
    }
    STD_TORCH_CHECK(grad.scalar_type() == grad_x.scalar_type(), "grad_x must have grad's dtype");
    check_scales(scale, zero_point, outer, shape, s);
    STD_TORCH_CHECK(!grad_scale || (scale && grad_scale->scalar_type() == ScalarType::Float &&
                                    grad_scale->numel() == scale->numel()),
                    "grad_scale must be float32, one for each scale given");
    return [=, x = matrix(x, "x"), grad = matrix(grad, "grad"), grad_x = matrix(grad_x, "grad_x")](Pointers t) {
        cpu::fake_quantize_backward(grad.values(t[0]), x.values(t[1]), shape, s, {t[2], t[3], level(t[4])},
                                    grad_x.results(t[5]), static_cast<float*>(t[6]));
    };
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) {
    LOWBIT_PLANNED(m, encode);
    LOWBIT_PLANNED(m, decode);
    LOWBIT_PLANNED(m, pack);
    LOWBIT_PLANNED(m, unpack);
    LOWBIT_PLANNED(m, outer_scale);
    LOWBIT_PLANNED(m, block_range);
    LOWBIT_PLANNED(m, quantize);
    LOWBIT_PLANNED(m, quantize_static);
    LOWBIT_PLANNED(m, dequantize);
    LOWBIT_PLANNED(m, fake_quantize);
    LOWBIT_PLANNED(m, fake_quantize_backward);
}
