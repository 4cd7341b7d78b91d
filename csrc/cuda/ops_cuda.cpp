// The CUDA kernels of the ops: tensors to the plain descriptions of cuda/launch.h, through LibTorch's stable ABI.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "cuda/launch.h"
#include "ops_entry.h"
#include "ops_params.h"

namespace {

namespace lb = lowbit::cuda;
using lowbit::dense;
using lowbit::dtype_of;
using lowbit::in_rows;
using lowbit::MaybeTensor;
using lowbit::ScalarType;
using lowbit::Tensor;
using lowbit::entry::MaybeText;
using lowbit::entry::Text;
using MaybeInt = std::optional<int64_t>;

// torch's current CUDA stream. The stable C++ API gives a raw stream from torch 2.13 on only, and its C function is
// declared for CUDA builds only, so it is looked up in the library that the running torch has loaded.
void* current_stream(int32_t device) {
    using Get = AOTITorchError (*)(int32_t, void**);
    static const Get get = [] {
        void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        void* found = dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
        return reinterpret_cast<Get>(found);
    }();
    STD_TORCH_CHECK(get != nullptr, "lowbit: this torch has no CUDA; install a CUDA build of torch, then lowbit again");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(get(device, &stream));
    return stream;
}

// Makes a tensor's device current for as long as it lives, and knows its stream.
class On {
  public:
    explicit On(const Tensor& x) : guard_(x.get_device_index()), stream_(current_stream(x.get_device_index())) {}
    void* stream() const { return stream_; }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    void* stream_;
};

void done(const char* error) { STD_TORCH_CHECK(error == nullptr, error == nullptr ? "" : error); }

// -- arguments ---------------------------------------------------------------------------------------------------

lb::Matrix matrix_of(const Tensor& x, const char* name) {
    const lowbit::Rows rows = lowbit::rows_of(x, name);
    return {x.data_ptr(), dtype_of(x), rows.shape.rows, rows.shape.cols, rows.stride};
}

// Rows of packed codes, `cols` of them a row, `bits` each.
lb::Codes codes_of(const Tensor& x, const char* name, int64_t rows, int64_t cols, int64_t bits) {
    const lowbit::Rows bytes = lowbit::rows_of(x, name);
    const int64_t width = (cols * bits + 7) / 8;
    STD_TORCH_CHECK(x.element_size() == 1 && bytes.shape.rows == rows && bytes.shape.cols == width, "lowbit: ", name,
                    " must be [", rows, ", ", width, "] bytes, got [", bytes.shape.rows, ", ", bytes.shape.cols, "]");
    return {static_cast<uint8_t*>(x.data_ptr()), rows, cols, bytes.stride};
}

lowbit::FormatParams format_of(const Text& name) {
    const auto format = lowbit::named_format(name.view());
    STD_TORCH_CHECK(format.has_value(), "lowbit: unknown format");
    return *format;
}

lowbit::SchemeParams scheme_of(const Text& name, int64_t rows, int64_t cols) {
    const auto scheme = lowbit::named_scheme(name.view(), rows, cols);
    STD_TORCH_CHECK(scheme.has_value(), "lowbit: unknown scheme");
    return *scheme;
}
lowbit::SchemeParams scheme_of(const Text& name, const lb::Matrix& x) { return scheme_of(name, x.rows, x.cols); }

// How elements are rounded; seed and step stay on the device, in memory that lives as long as this does.
class Random {
  public:
    Random(const Text& rounding, const lb::Matrix& x, const MaybeTensor& rng, int64_t stream, int64_t offset,
           MaybeInt pitch)
        : rounding(rounding.view() == "stochastic" ? lowbit::kStochastic : lowbit::kNearest) {
        if (this->rounding == lowbit::kNearest) return;
        STD_TORCH_CHECK(rng.has_value() && rng->scalar_type() == ScalarType::Long && rng->numel() == 2,
                        "lowbit: stochastic rounding takes rng, int64 [seed, step]");
        key_ = dense(rng);
        const int64_t place[] = {stream, offset, pitch.value_or(x.cols)};
        this->rng = lowbit::device_rng_params(static_cast<const int64_t*>(key_->data_ptr()), place);
    }
    const int rounding;
    lowbit::Rng rng{};

  private:
    MaybeTensor key_;
};

// Scales that are given or to be written, contiguous; of those given, a copy lives as long as this does.
struct Scales {
    MaybeTensor scale, zero_point, global_scale;

    lb::Scales on(const lowbit::SchemeParams& scheme, int64_t rows, int64_t cols) const {
        const lowbit::cpu::Shape blocks = lowbit::scale_shape({rows, cols}, scheme);
        const auto data = [&](const MaybeTensor& x, const char* name) -> void* {
            if (!x.has_value()) return nullptr;
            STD_TORCH_CHECK(x->is_contiguous() && x->numel() == blocks.rows * blocks.cols, "lowbit: ", name,
                            " must be contiguous, one of ", blocks.rows * blocks.cols, " blocks each, got ",
                            x->numel());
            return x->data_ptr();
        };
        STD_TORCH_CHECK(
            (scheme.global_scale != 0) == global_scale.has_value() &&
                (!global_scale.has_value() ||
                 (global_scale->numel() == lowbit::global_scale_count(scheme, rows) && global_scale->is_contiguous())),
            "lowbit: schemes with a global scale, and no others, have global scales, contiguous");
        void* zeros = data(zero_point, "zero_point");
        STD_TORCH_CHECK(!scale.has_value() || (scheme.affine != 0) == (zeros != nullptr),
                        "lowbit: affine schemes, and no others, have zero points");
        return {data(scale, "scale"), zeros,
                global_scale.has_value() ? static_cast<const float*>(global_scale->data_ptr()) : nullptr};
    }
    lb::Scales on(const lowbit::SchemeParams& scheme, const lb::Matrix& x) const { return on(scheme, x.rows, x.cols); }
};
Scales given(const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale) {
    return {dense(scale), dense(zero_point), dense(global_scale)};
}

// A scheme's blocks, with one number each.
lowbit::SchemeParams plain(lowbit::SchemeParams scheme) {
    scheme.global_scale = scheme.affine = 0;
    return scheme;
}

// Device memory that torch frees in stream order when the tensor dies at the end of the op.
Tensor scratch_of(const Tensor& like, int64_t bytes) {
    const int64_t size[] = {bytes};
    return torch::stable::new_empty(like, {size, 1}, ScalarType::Byte);
}

// -- ops ---------------------------------------------------------------------------------------------------------

void encode(const Tensor& given_x, const Text& format, const Text& rounding, bool saturate, const MaybeTensor& rng,
            int64_t stream, int64_t offset, MaybeInt pitch, const Tensor& out) {
    const On on(given_x);
    const Tensor x = in_rows(given_x);
    const lb::Matrix from = matrix_of(x, "x");
    const Random random(rounding, from, rng, stream, offset, pitch);
    done(lb::launch_encode(from, codes_of(out, "out", from.rows, from.cols, 8), format_of(format), saturate,
                           random.rounding, random.rng, on.stream()));
}

void decode(const Tensor& given_codes, const Text& format, ScalarType, const Tensor& out) {
    const On on(given_codes);
    const Tensor codes = dense(given_codes);
    const lb::Matrix to = matrix_of(out, "out");
    done(lb::launch_decode(codes_of(codes, "codes", to.rows, to.cols, 8), to, format_of(format), on.stream()));
}

void pack(const Tensor& given_codes, int64_t bits, const Tensor& out) {
    const On on(given_codes);
    const Tensor codes = dense(given_codes);
    const lowbit::cpu::Shape shape = lowbit::shape_of(codes, "codes");
    done(lb::launch_pack(codes_of(codes, "codes", shape.rows, shape.cols, 8),
                         codes_of(out, "out", shape.rows, shape.cols, bits), static_cast<int>(bits), on.stream()));
}

void unpack(const Tensor& given_packed, int64_t bits, int64_t, const Tensor& out) {
    const On on(given_packed);
    const Tensor packed = dense(given_packed);
    const lowbit::cpu::Shape shape = lowbit::shape_of(out, "out");
    done(lb::launch_unpack(codes_of(packed, "packed", shape.rows, shape.cols, bits),
                           codes_of(out, "out", shape.rows, shape.cols, 8), static_cast<int>(bits), on.stream()));
}

void global_scale(const Tensor& given_x, const Text& scheme, const Tensor& out) {
    const On on(given_x);
    const Tensor x = in_rows(given_x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    STD_TORCH_CHECK(out.numel() == lowbit::global_scale_count(params, from.rows),
                    "lowbit: one global scale for each that x has");
    const Tensor scratch = scratch_of(x, lb::global_scale_scratch(params, from.rows));
    done(lb::launch_global_scale(from, static_cast<float*>(out.data_ptr()), params, scratch.data_ptr(), on.stream()));
}

void block_range(const Tensor& given_x, const Text& scheme, const Tensor& low, const Tensor& high) {
    const On on(given_x);
    const Tensor x = in_rows(given_x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    for (const Tensor& end : {low, high}) Scales{end, {}, {}}.on(plain(params), from);
    const Tensor scratch = scratch_of(x, lb::block_range_scratch(params, from.rows, from.cols));
    done(lb::launch_block_range(from, static_cast<float*>(low.data_ptr()), static_cast<float*>(high.data_ptr()), params,
                                scratch.data_ptr(), on.stream()));
}

void quantize(const Tensor& given_x, const Text& scheme, const MaybeTensor& given_global_scale, const Text& rounding,
              const MaybeTensor& rng, int64_t stream, int64_t offset, MaybeInt pitch, const MaybeTensor& factors,
              const Tensor& codes, const Tensor& scale, const Tensor& zero_point) {
    STD_TORCH_CHECK(!factors, "factors are multiplied with before the kernel is called");
    const On on(given_x);
    const Tensor x = in_rows(given_x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const Random random(rounding, from, rng, stream, offset, pitch);
    const Scales scales{scale, params.affine ? MaybeTensor(zero_point) : std::nullopt, dense(given_global_scale)};
    const Tensor scratch = scratch_of(x, lb::quantize_scratch(params, from.rows, from.cols));
    done(lb::launch_quantize(from, scales.on(params, from),
                             codes_of(codes, "codes", from.rows, from.cols, params.format.bits), params,
                             random.rounding, random.rng, scratch.data_ptr(), on.stream()));
}

void quantize_static(const Tensor& given_x, const Text& scheme, const Tensor& scale, const MaybeTensor& zero_point,
                     const MaybeTensor& global_scale, const Text& rounding, const MaybeTensor& rng, int64_t stream,
                     int64_t offset, MaybeInt pitch, const Tensor& codes) {
    const On on(given_x);
    const Tensor x = in_rows(given_x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const Random random(rounding, from, rng, stream, offset, pitch);
    const Scales scales = given(scale, zero_point, global_scale);
    done(lb::launch_quantize_static(from, scales.on(params, from),
                                    codes_of(codes, "codes", from.rows, from.cols, params.format.bits), params,
                                    random.rounding, random.rng, on.stream()));
}

void dequantize(const Tensor& given_codes, const Text& scheme, int64_t, const Tensor& scale,
                const MaybeTensor& zero_point, const MaybeTensor& global_scale, ScalarType, const Tensor& out) {
    const On on(given_codes);
    const Tensor codes = dense(given_codes);
    const lb::Matrix to = matrix_of(out, "out");
    const lowbit::SchemeParams params = scheme_of(scheme, to);
    const Scales scales = given(scale, zero_point, global_scale);
    done(lb::launch_dequantize(codes_of(codes, "codes", to.rows, to.cols, params.format.bits), scales.on(params, to),
                               to, params, on.stream()));
}

void fake_quantize(const Tensor& given_x, const Text& scheme, const MaybeTensor& scale, const MaybeTensor& zero_point,
                   const MaybeTensor& global_scale, const Text& rounding, const MaybeTensor& rng, int64_t stream,
                   int64_t offset, MaybeInt pitch, const Tensor& out) {
    const On on(given_x);
    const Tensor x = in_rows(given_x);
    const lb::Matrix from = matrix_of(x, "x"), to = matrix_of(out, "out");
    STD_TORCH_CHECK(from.rows == to.rows && from.cols == to.cols && from.dtype == to.dtype,
                    "lowbit: out must have x's shape and dtype");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const Random random(rounding, from, rng, stream, offset, pitch);
    const Scales scales = given(scale, zero_point, global_scale);
    const Tensor scratch = scratch_of(x, scale.has_value() ? 0 : lb::quantize_scratch(params, from.rows, from.cols));
    done(lb::launch_fake_quantize(from, scales.on(params, from), to, params, random.rounding, random.rng,
                                  scratch.data_ptr(), on.stream()));
}

void fake_quantize_backward(const Tensor& given_grad, const Tensor& given_x, const Text& scheme,
                            const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale,
                            const Tensor& grad_x, const Tensor& grad_scale) {
    const On on(given_grad);
    const Tensor grad = in_rows(given_grad), x = in_rows(given_x);
    const lb::Matrix come = matrix_of(grad, "grad"), from = matrix_of(x, "x"), to = matrix_of(grad_x, "grad_x");
    STD_TORCH_CHECK(from.rows == to.rows && from.cols == to.cols && from.rows == come.rows && from.cols == come.cols &&
                        come.dtype == to.dtype,
                    "lowbit: gradients must have x's shape, and one dtype");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const Scales scales = given(scale, zero_point, global_scale);
    float* slopes = nullptr;
    if (scale.has_value()) {
        STD_TORCH_CHECK(grad_scale.is_contiguous() && grad_scale.scalar_type() == ScalarType::Float &&
                            grad_scale.numel() == (params.affine ? 2 : 1) * scale->numel(),
                        "lowbit: grad_scale must be contiguous float32, one for each scale and zero point given");
        slopes = static_cast<float*>(grad_scale.data_ptr());
    }
    const Tensor scratch =
        scratch_of(x, lb::fake_quantize_backward_scratch(params, from.rows, from.cols, !scale.has_value()));
    done(lb::launch_fake_quantize_backward(come, from, scales.on(params, from), to, slopes, params, scratch.data_ptr(),
                                           on.stream()));
}

lb::MmOperand operand_of(const Tensor& data, const MaybeText& scheme, const Scales& scales, int64_t cols) {
    const lowbit::Rows rows = lowbit::rows_of(data, name);
    lb::MmOperand side = {};
    side.coded = scheme.has_value();
    if (!side.coded) {
        STD_TORCH_CHECK(data.scalar_type() == ScalarType::BFloat16 && rows.shape.cols == cols,
                        "lowbit: scaled_mm on CUDA takes ", name, " as codes or as bfloat16 [rows, ", cols, "]");
        side.codes = {static_cast<uint8_t*>(data.data_ptr()), rows.shape.rows, cols, 2 * rows.stride};
        return side;
    }
    side.scheme = scheme_of(*scheme, rows.shape.rows, cols);
    side.codes = codes_of(data, name, rows.shape.rows, cols, side.scheme.format.bits);
    side.scales = scales.on(side.scheme, rows.shape.rows, cols);
    return side;
}

void scaled_mm(const Tensor& a, const Tensor& b, int64_t cols, const MaybeText& a_scheme, const MaybeText& b_scheme,
               const MaybeTensor& a_scale, const MaybeTensor& a_zero_point, const MaybeTensor& a_global_scale,
               const MaybeTensor& b_scale, const MaybeTensor& b_zero_point, const MaybeTensor& b_global_scale,
               const MaybeTensor& given_bias, ScalarType, const Tensor& out) {
    const On on(a);
    const Tensor a_rows = in_rows(a), b_rows = in_rows(b);
    const Scales a_scales = given(a_scale, a_zero_point, a_global_scale),
                 b_scales = given(b_scale, b_zero_point, b_global_scale);
    const lb::MmOperand left = operand_of(a_rows, a_scheme, a_scales, cols),
                        right = operand_of(b_rows, b_scheme, b_scales, cols);
    STD_TORCH_CHECK(out.is_contiguous() && out.size(0) == left.codes.rows && out.size(1) == right.codes.rows,
                    "lowbit: out must be a contiguous [", left.codes.rows, ", ", right.codes.rows, "]");
    lb::MmEpilogue epilogue = {out.data_ptr(), dtype_of(out), nullptr, lowbit::Dtype::kFloat32};
    const MaybeTensor bias = dense(given_bias);
    if (bias.has_value()) {
        STD_TORCH_CHECK(bias->numel() == right.codes.rows, "lowbit: bias must be of ", right.codes.rows, " elements");
        epilogue.bias = bias->data_ptr();
        epilogue.bias_dtype = dtype_of(*bias);
    }
    done(lb::launch_scaled_mm(left, right, epilogue, cols, on.stream()));
}

}  // namespace

LOWBIT_KERNEL(encode, &encode, CUDA)
LOWBIT_KERNEL(decode, &decode, CUDA)
LOWBIT_KERNEL(pack, &pack, CUDA)
LOWBIT_KERNEL(unpack, &unpack, CUDA)
LOWBIT_KERNEL(global_scale, &global_scale, CUDA)
LOWBIT_KERNEL(block_range, &block_range, CUDA)
LOWBIT_KERNEL(quantize, &quantize, CUDA)
LOWBIT_KERNEL(quantize_static, &quantize_static, CUDA)
LOWBIT_KERNEL(dequantize, &dequantize, CUDA)
LOWBIT_KERNEL(fake_quantize, &fake_quantize, CUDA)
LOWBIT_KERNEL(fake_quantize_backward, &fake_quantize_backward, CUDA)
LOWBIT_KERNEL(scaled_mm, &scaled_mm, CUDA)
