// The CPU kernels of quantization: checks, then cpu/codec/codec.h.
#include "cpu/codec/codec.h"

#include "ops_params.h"
#include "ops_random.h"

namespace lowbit {
namespace {

using entry::Out;
using entry::Outs;
using entry::Text;
using MaybeInt = std::optional<int64_t>;

// -- arguments -------------------------------------------------------------------------------------------------------
// A scheme on x, or on what codes decode to; nothing for a name that is none.
std::optional<SchemeParams> scheme_on(const Text& name, const Tensor& x) {
    if (x.numel() == 0 || x.dim() == 0) return std::nullopt;
    const int64_t cols = x.size(x.dim() - 1);
    return named_scheme(name.view(), x.numel() / cols, cols);
}

Out codes_out(const Tensor& x, const SchemeParams& s) {
    return {sizes_with(x, cpu::packed_cols(x.size(x.dim() - 1), s.format.bits)), ScalarType::Byte};
}

uint8_t* new_codes_of(const Tensor& t, cpu::Shape shape, const SchemeParams& s) {
    return new_bytes_of(t, shape.rows, cpu::packed_cols(shape.cols, s.format.bits));
}

void check_global_scale(const MaybeTensor& t, cpu::Shape shape, const SchemeParams& s) {
    require((s.global_scale != 0) == t.has_value());
    const int64_t count = global_scale_count(s, shape.rows);
    require(!t || (t->scalar_type() == ScalarType::Float && t->numel() == count && t->is_contiguous()));
}

const float* floats_of(const MaybeTensor& t) { return static_cast<const float*>(data_of(t)); }

// Scales that are given, contiguous; they live as long as this does.
struct Given {
    MaybeTensor scale, zero_point, global_scale;

    Given(const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale, cpu::Shape shape,
          const SchemeParams& s)
        : scale(dense(scale)), zero_point(dense(zero_point)), global_scale(dense(global_scale)) {
        require(scale ? (s.affine != 0) == zero_point.has_value() : !zero_point);
        if (this->scale) check_scale(*this->scale, shape, s, false);
        if (this->zero_point) check_scale(*this->zero_point, shape, s, true);
        check_global_scale(this->global_scale, shape, s);
    }
    operator cpu::Scales() const { return {data_of(scale), data_of(zero_point), floats_of(global_scale)}; }
};

// -- ranges ----------------------------------------------------------------------------------------------------------
bool global_scale(const Tensor& given, const Text& scheme, const Tensor& out) {
    const Tensor x = in_rows(given);
    const cpu::Shape shape = shape_of(x);
    const auto s = scheme_on(scheme, x);
    if (!s) return false;
    check_global_scale(out, shape, *s);
    cpu::global_scale(values_of(x), shape, *s, static_cast<float*>(out.mutable_data_ptr()));
    return true;
}

bool block_range(const Tensor& given, const Text& scheme, const Tensor& low, const Tensor& high) {
    const Tensor x = in_rows(given);
    const cpu::Shape shape = shape_of(x);
    const auto s = scheme_on(scheme, x);
    if (!s) return false;
    const cpu::Shape blocks = scale_shape(shape, *s);
    for (const Tensor& t : {low, high}) {
        require(t.scalar_type() == ScalarType::Float && t.numel() == blocks.rows * blocks.cols && t.is_contiguous());
    }
    cpu::block_range(values_of(x), shape, *s, static_cast<float*>(low.mutable_data_ptr()),
                     static_cast<float*>(high.mutable_data_ptr()));
    return true;
}

// -- codes with scales -----------------------------------------------------------------------------------------------
// x with what its elements are multiplied with first; `factors`, contiguous, lives as long.
cpu::Values times(cpu::Values x, cpu::Shape shape, const MaybeTensor& factors) {
    if (!factors) return x;
    const int64_t rows = factors->dim() == 2 ? factors->size(0) : 0, cols = rows ? factors->size(1) : 0;
    const bool by_row = rows == shape.rows && cols == 1, by_col = rows == 1 && cols == shape.cols;
    require(factors->scalar_type() == ScalarType::Float && (by_row || by_col));
    (by_row ? x.row_factors : x.col_factors) = static_cast<const float*>(factors->const_data_ptr());
    return x;
}

Outs<3> quantize_outputs(const Tensor& x, const Text& scheme, const MaybeTensor&, const Text&, const MaybeTensor&,
                         int64_t, int64_t, MaybeInt, const MaybeTensor&) {
    const auto s = scheme_on(scheme, x);
    if (!s) return std::nullopt;
    const int64_t cols = x.size(x.dim() - 1);
    const cpu::Shape blocks = scale_shape({x.numel() / cols, cols}, *s);
    std::vector<int64_t> scales{blocks.rows, blocks.cols}, zeros{0};
    if (s->affine) zeros = scales;
    return Outs<3>{{codes_out(x, *s), Out{scales, scale_type(*s)}, Out{zeros, zero_type(*s)}}};
}

bool quantize(const Tensor& given, const Text& scheme, const MaybeTensor& global_scale, const Text& rounding,
              const MaybeTensor& rng, int64_t stream, int64_t offset, MaybeInt pitch, const MaybeTensor& given_factors,
              const Tensor& codes, const Tensor& scale, const Tensor& zero_point) {
    const Tensor x = in_rows(given);
    const cpu::Shape shape = shape_of(x);
    const auto s = scheme_on(scheme, x);
    if (!s) return false;
    const auto random = random_of(rounding, shape.cols, rng, stream, offset, pitch);
    if (!random) return false;
    const MaybeTensor above = dense(global_scale), factors = dense(given_factors);
    check_scale(scale, shape, *s, false);
    if (s->affine) check_scale(zero_point, shape, *s, true);
    check_global_scale(above, shape, *s);
    const cpu::NewScales scales{scale.mutable_data_ptr(), s->affine ? zero_point.mutable_data_ptr() : nullptr,
                                floats_of(above)};
    cpu::quantize(times(values_of(x), shape, factors), shape, *s, scales, random->rounding, random->rng,
                  new_codes_of(codes, shape, *s));
    return true;
}

Outs<1> quantize_static_outputs(const Tensor& x, const Text& scheme, const Tensor&, const MaybeTensor&,
                                const MaybeTensor&, const Text&, const MaybeTensor&, int64_t, int64_t, MaybeInt) {
    const auto s = scheme_on(scheme, x);
    if (!s) return std::nullopt;
    return Outs<1>{{codes_out(x, *s)}};
}

bool quantize_static(const Tensor& given, const Text& scheme, const Tensor& scale, const MaybeTensor& zero_point,
                     const MaybeTensor& global_scale, const Text& rounding, const MaybeTensor& rng, int64_t stream,
                     int64_t offset, MaybeInt pitch, const Tensor& codes) {
    const Tensor x = in_rows(given);
    const cpu::Shape shape = shape_of(x);
    const auto s = scheme_on(scheme, x);
    if (!s) return false;
    const auto random = random_of(rounding, shape.cols, rng, stream, offset, pitch);
    if (!random) return false;
    const Given scales(scale, zero_point, global_scale, shape, *s);
    cpu::quantize_static(values_of(x), shape, *s, scales, random->rounding, random->rng,
                         new_codes_of(codes, shape, *s));
    return true;
}

Outs<1> dequantize_outputs(const Tensor& codes, const Text&, int64_t cols, const Tensor&, const MaybeTensor&,
                           const MaybeTensor&, ScalarType dtype) {
    if (!is_float(dtype) || codes.dim() == 0 || codes.numel() == 0 || cols <= 0) return std::nullopt;
    return Outs<1>{{Out{sizes_with(codes, cols), dtype}}};
}

bool dequantize(const Tensor& given, const Text& scheme, int64_t, const Tensor& scale, const MaybeTensor& zero_point,
                const MaybeTensor& global_scale, ScalarType, const Tensor& out) {
    const auto s = scheme_on(scheme, out);
    if (!s) return false;
    const Tensor codes = dense(given);
    const cpu::Shape shape = shape_of(out);
    const Given scales(scale, zero_point, global_scale, shape, *s);
    cpu::dequantize(bytes_of(codes, shape.rows, cpu::packed_cols(shape.cols, s->format.bits)), shape, *s, scales,
                    results_of(out, shape));
    return true;
}

// -- what trains through them ----------------------------------------------------------------------------------------
Outs<1> fake_quantize_outputs(const Tensor& x, const Text&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                              const Text&, const MaybeTensor&, int64_t, int64_t, MaybeInt) {
    if (x.numel() == 0 || x.dim() == 0) return std::nullopt;
    return Outs<1>{{Out{sizes_of(x), x.scalar_type()}}};
}

bool fake_quantize(const Tensor& given, const Text& scheme, const MaybeTensor& scale, const MaybeTensor& zero_point,
                   const MaybeTensor& global_scale, const Text& rounding, const MaybeTensor& rng, int64_t stream,
                   int64_t offset, MaybeInt pitch, const Tensor& out) {
    const Tensor x = in_rows(given);
    const cpu::Shape shape = shape_of(x);
    const auto s = scheme_on(scheme, x);
    if (!s) return false;
    const auto random = random_of(rounding, shape.cols, rng, stream, offset, pitch);
    if (!random) return false;
    const Given scales(scale, zero_point, global_scale, shape, *s);
    cpu::fake_quantize(values_of(x), shape, *s, scales, random->rounding, random->rng, results_of(out, shape));
    return true;
}

bool fake_quantize_backward(const Tensor& given_grad, const Tensor& given, const Text& scheme, const MaybeTensor& scale,
                            const MaybeTensor& zero_point, const MaybeTensor& global_scale, const Tensor& grad_x,
                            const Tensor& grad_scale) {
    const Tensor x = in_rows(given), grad = in_rows(given_grad);
    const cpu::Shape shape = shape_of(x);
    const auto s = scheme_on(scheme, x);
    if (!s) return false;
    require(grad.scalar_type() == grad_x.scalar_type());
    const Given scales(scale, zero_point, global_scale, shape, *s);
    require(grad_scale.scalar_type() == ScalarType::Float && grad_scale.is_contiguous() &&
            grad_scale.numel() == (scale ? (s->affine ? 2 : 1) * scale->numel() : 0));
    results_of(grad, shape);
    cpu::fake_quantize_backward(values_of(grad), values_of(x), shape, *s, scales, results_of(grad_x, shape),
                                scale ? static_cast<float*>(grad_scale.mutable_data_ptr()) : nullptr);
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_KERNEL(global_scale, &lowbit::global_scale, CPU)
LOWBIT_KERNEL(block_range, &lowbit::block_range, CPU)
LOWBIT_OP(quantize, &lowbit::quantize, &lowbit::quantize_outputs)
LOWBIT_OP(quantize_static, &lowbit::quantize_static, &lowbit::quantize_static_outputs)
LOWBIT_OP(dequantize, &lowbit::dequantize, &lowbit::dequantize_outputs)
LOWBIT_OP(fake_quantize, &lowbit::fake_quantize, &lowbit::fake_quantize_outputs)
LOWBIT_KERNEL(fake_quantize_backward, &lowbit::fake_quantize_backward, CPU)
