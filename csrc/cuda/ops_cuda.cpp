// lowbit_native::* on CUDA: tensors to the plain descriptions of cuda/launch.h, through LibTorch's stable ABI.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "cuda/launch.h"
#include "ops_params.h"

namespace {

namespace lb = lowbit::cuda;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;
using MaybeTensor = std::optional<Tensor>;

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

lowbit::Dtype dtype_of(const Tensor& x, const char* name) {
    switch (x.scalar_type()) {
        case ScalarType::Float:
            return lowbit::Dtype::kFloat32;
        case ScalarType::BFloat16:
            return lowbit::Dtype::kBFloat16;
        case ScalarType::Half:
            return lowbit::Dtype::kFloat16;
        default:
            STD_TORCH_CHECK(false, "lowbit: ", name, " must be float32, bfloat16 or float16");
    }
}

void require_rows(const Tensor& x, const char* name) {
    STD_TORCH_CHECK(x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1), "lowbit: ", name,
                    " must be a matrix with unit column stride");
}

lb::Matrix matrix_of(const Tensor& x, const char* name) {
    require_rows(x, name);
    return {x.data_ptr(), dtype_of(x, name), x.size(0), x.size(1), x.stride(0)};
}

// Rows of packed codes, `cols` of them a row, `bits` each.
lb::Codes codes_of(const Tensor& x, const char* name, int64_t rows, int64_t cols, int64_t bits) {
    require_rows(x, name);
    const int64_t bytes = (cols * bits + 7) / 8;
    STD_TORCH_CHECK(x.element_size() == 1 && x.size(0) == rows && x.size(1) == bytes, "lowbit: ", name, " must be [",
                    rows, ", ", bytes, "] bytes, got [", x.size(0), ", ", x.size(1), "]");
    return {static_cast<uint8_t*>(x.data_ptr()), rows, cols, x.stride(0)};
}

lowbit::SchemeParams scheme_of(int64_t number, const lb::Matrix& x) {
    return lowbit::kept_scheme(number, x.rows, x.cols);
}

// Of the int64 [seed, step] on the device and of [stream, offset, pitch]; no place asks for rounding to nearest.
int rounding_of(const Ints& place) { return place.empty() ? lowbit::kNearest : lowbit::kStochastic; }
lowbit::Rng rng_of(const MaybeTensor& rng, const Ints& place) {
    if (place.empty()) return {};
    STD_TORCH_CHECK(place.size() == 3 && rng.has_value() && rng->scalar_type() == ScalarType::Long &&
                        rng->numel() == 2 && rng->is_contiguous(),
                    "lowbit: stochastic rounding takes rng, int64 [seed, step], and [stream, offset, pitch]");
    return lowbit::device_rng_params(static_cast<const int64_t*>(rng->data_ptr()), place.data());
}

lb::Scales scales_of(const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale,
                     const lowbit::SchemeParams& scheme, int64_t rows, int64_t cols) {
    const int64_t blocks =
        ((rows + scheme.block_rows - 1) / scheme.block_rows) * ((cols + scheme.block_cols - 1) / scheme.block_cols);
    auto data = [blocks](const MaybeTensor& x, const char* name) -> void* {
        if (!x.has_value()) return nullptr;
        STD_TORCH_CHECK(x->is_contiguous() && x->numel() == blocks, "lowbit: ", name, " must be contiguous, one of ",
                        blocks, " blocks each, got ", x->numel());
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

void encode(const Tensor& x, Tensor out, int64_t format, bool saturate, MaybeTensor rng, Ints place) {
    const On on(x);
    const lb::Matrix from = matrix_of(x, "x");
    done(lb::launch_encode(from, codes_of(out, "out", from.rows, from.cols, 8), lowbit::kept_format(format), saturate,
                           rounding_of(place), rng_of(rng, place), on.stream()));
}

void decode(const Tensor& codes, Tensor out, int64_t format) {
    const On on(codes);
    const lb::Matrix to = matrix_of(out, "out");
    done(
        lb::launch_decode(codes_of(codes, "codes", to.rows, to.cols, 8), to, lowbit::kept_format(format), on.stream()));
}

void pack(const Tensor& codes, Tensor out, int64_t bits) {
    const On on(codes);
    require_rows(codes, "codes");
    const int64_t rows = codes.size(0), cols = codes.size(1);
    done(lb::launch_pack(codes_of(codes, "codes", rows, cols, 8), codes_of(out, "out", rows, cols, bits),
                         static_cast<int>(bits), on.stream()));
}

void unpack(const Tensor& packed, Tensor out, int64_t bits) {
    const On on(packed);
    require_rows(out, "out");
    const int64_t rows = out.size(0), cols = out.size(1);
    done(lb::launch_unpack(codes_of(packed, "packed", rows, cols, bits), codes_of(out, "out", rows, cols, 8),
                           static_cast<int>(bits), on.stream()));
}

void global_scale(const Tensor& x, Tensor out, int64_t scheme) {
    const On on(x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    STD_TORCH_CHECK(out.numel() == lowbit::global_scale_count(params, from.rows),
                    "lowbit: one global scale for each that x has");
    const Tensor scratch = scratch_of(x, lb::global_scale_scratch(params, from.rows));
    done(lb::launch_global_scale(from, static_cast<float*>(out.data_ptr()), params, scratch.data_ptr(), on.stream()));
}

void block_range(const Tensor& x, Tensor low, Tensor high, int64_t scheme) {
    const On on(x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    scales_of(low, {}, {}, plain(params), from.rows, from.cols);
    scales_of(high, {}, {}, plain(params), from.rows, from.cols);
    const Tensor scratch = scratch_of(x, lb::block_range_scratch(params, from.rows, from.cols));
    done(lb::launch_block_range(from, static_cast<float*>(low.data_ptr()), static_cast<float*>(high.data_ptr()), params,
                                scratch.data_ptr(), on.stream()));
}

void quantize(const Tensor& x, MaybeTensor global_scale, Tensor codes, Tensor scale, MaybeTensor zero_point,
              int64_t scheme, MaybeTensor rng, Ints place) {
    const On on(x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const lb::Scales scales = scales_of(scale, zero_point, global_scale, params, from.rows, from.cols);
    const Tensor scratch = scratch_of(x, lb::quantize_scratch(params, from.rows, from.cols));
    done(lb::launch_quantize(from, scales, codes_of(codes, "codes", from.rows, from.cols, params.format.bits), params,
                             rounding_of(place), rng_of(rng, place), scratch.data_ptr(), on.stream()));
}

void quantize_static(const Tensor& x, Tensor scale, MaybeTensor zero_point, MaybeTensor global_scale, Tensor codes,
                     int64_t scheme, MaybeTensor rng, Ints place) {
    const On on(x);
    const lb::Matrix from = matrix_of(x, "x");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const lb::Scales scales = scales_of(scale, zero_point, global_scale, params, from.rows, from.cols);
    done(lb::launch_quantize_static(from, scales, codes_of(codes, "codes", from.rows, from.cols, params.format.bits),
                                    params, rounding_of(place), rng_of(rng, place), on.stream()));
}

void dequantize(const Tensor& codes, Tensor scale, MaybeTensor zero_point, MaybeTensor global_scale, Tensor out,
                int64_t scheme) {
    const On on(codes);
    const lb::Matrix to = matrix_of(out, "out");
    const lowbit::SchemeParams params = scheme_of(scheme, to);
    done(lb::launch_dequantize(codes_of(codes, "codes", to.rows, to.cols, params.format.bits),
                               scales_of(scale, zero_point, global_scale, params, to.rows, to.cols), to, params,
                               on.stream()));
}

void fake_quantize(const Tensor& x, MaybeTensor scale, MaybeTensor zero_point, MaybeTensor global_scale, Tensor out,
                   int64_t scheme, MaybeTensor rng, Ints place) {
    const On on(x);
    const lb::Matrix from = matrix_of(x, "x"), to = matrix_of(out, "out");
    STD_TORCH_CHECK(from.rows == to.rows && from.cols == to.cols && from.dtype == to.dtype,
                    "lowbit: out must have x's shape and dtype");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const lb::Scales scales = scales_of(scale, zero_point, global_scale, params, from.rows, from.cols);
    const Tensor scratch = scratch_of(x, scale.has_value() ? 0 : lb::quantize_scratch(params, from.rows, from.cols));
    done(lb::launch_fake_quantize(from, scales, to, params, rounding_of(place), rng_of(rng, place), scratch.data_ptr(),
                                  on.stream()));
}

void fake_quantize_backward(const Tensor& grad, Tensor x, MaybeTensor scale, MaybeTensor zero_point,
                            MaybeTensor global_scale, Tensor grad_x, MaybeTensor grad_scale, int64_t scheme) {
    const On on(grad);
    const lb::Matrix come = matrix_of(grad, "grad"), from = matrix_of(x, "x"), to = matrix_of(grad_x, "grad_x");
    STD_TORCH_CHECK(from.rows == to.rows && from.cols == to.cols && from.rows == come.rows && from.cols == come.cols &&
                        come.dtype == to.dtype,
                    "lowbit: gradients must have x's shape, and one dtype");
    const lowbit::SchemeParams params = scheme_of(scheme, from);
    const lb::Scales scales = scales_of(scale, zero_point, global_scale, params, from.rows, from.cols);
    float* slopes = nullptr;
    if (grad_scale.has_value()) {
        STD_TORCH_CHECK(scale.has_value() && grad_scale->is_contiguous() &&
                            grad_scale->scalar_type() == ScalarType::Float &&
                            grad_scale->numel() == (params.affine ? 2 : 1) * scale->numel(),
                        "lowbit: grad_scale must be contiguous float32, one for each scale and zero point given");
        slopes = static_cast<float*>(grad_scale->data_ptr());
    }
    const Tensor scratch =
        scratch_of(x, lb::fake_quantize_backward_scratch(params, from.rows, from.cols, !scale.has_value()));
    done(lb::launch_fake_quantize_backward(come, from, scales, to, slopes, params, scratch.data_ptr(), on.stream()));
}

lb::MmOperand operand_of(const char* name, const Tensor& data, int64_t scheme, const MaybeTensor& scale,
                         const MaybeTensor& zero_point, const MaybeTensor& global_scale, int64_t cols) {
    require_rows(data, name);
    lb::MmOperand side = {};
    side.coded = scheme >= 0;
    if (!side.coded) {
        STD_TORCH_CHECK(data.scalar_type() == ScalarType::BFloat16 && data.size(1) == cols,
                        "lowbit: scaled_mm on CUDA takes ", name, " as codes or as bfloat16 [rows, ", cols, "]");
        side.codes = {static_cast<uint8_t*>(data.data_ptr()), data.size(0), cols, 2 * data.stride(0)};
        return side;
    }
    side.scheme = lowbit::kept_scheme(scheme, data.size(0), cols);
    side.codes = codes_of(data, name, data.size(0), cols, side.scheme.format.bits);
    side.scales = scales_of(scale, zero_point, global_scale, side.scheme, data.size(0), cols);
    return side;
}

void scaled_mm(const Tensor& a, int64_t a_scheme, MaybeTensor a_scale, MaybeTensor a_zero_point,
               MaybeTensor a_global_scale, const Tensor& b, int64_t b_scheme, MaybeTensor b_scale,
               MaybeTensor b_zero_point, MaybeTensor b_global_scale, MaybeTensor bias, Tensor out, int64_t cols) {
    const On on(a);
    const lb::MmOperand left = operand_of("a", a, a_scheme, a_scale, a_zero_point, a_global_scale, cols);
    const lb::MmOperand right = operand_of("b", b, b_scheme, b_scale, b_zero_point, b_global_scale, cols);
    STD_TORCH_CHECK(out.is_contiguous() && out.size(0) == left.codes.rows && out.size(1) == right.codes.rows,
                    "lowbit: out must be a contiguous [", left.codes.rows, ", ", right.codes.rows, "]");
    lb::MmEpilogue epilogue = {out.data_ptr(), dtype_of(out, "out"), nullptr, lowbit::Dtype::kFloat32};
    if (bias.has_value()) {
        STD_TORCH_CHECK(bias->is_contiguous() && bias->numel() == right.codes.rows,
                        "lowbit: bias must be contiguous, of ", right.codes.rows, " elements");
        epilogue.bias = bias->data_ptr();
        epilogue.bias_dtype = dtype_of(*bias, "bias");
    }
    done(lb::launch_scaled_mm(left, right, epilogue, cols, on.stream()));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CUDA, m) {
    m.impl("encode", TORCH_BOX(&encode));
    m.impl("decode", TORCH_BOX(&decode));
    m.impl("pack", TORCH_BOX(&pack));
    m.impl("unpack", TORCH_BOX(&unpack));
    m.impl("global_scale", TORCH_BOX(&global_scale));
    m.impl("block_range", TORCH_BOX(&block_range));
    m.impl("quantize", TORCH_BOX(&quantize));
    m.impl("quantize_static", TORCH_BOX(&quantize_static));
    m.impl("dequantize", TORCH_BOX(&dequantize));
    m.impl("fake_quantize", TORCH_BOX(&fake_quantize));
    m.impl("fake_quantize_backward", TORCH_BOX(&fake_quantize_backward));
    m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
}
