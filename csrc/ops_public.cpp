// The CPU kernels of torch.ops.lowbit.*: each checks, allocates and computes, or declines (ops_entry.h).
//
// Arguments are those of the op's NamedTuple in lowbit/ops. Formats and schemes are names, known once Python has used
// them (lowbit_native::keep).
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu/matmul/gemm_kernels.h"
#include "format_table.h"
#include "ops_codec.h"
#include "ops_conv.h"
#include "ops_entry.h"
#include "ops_matmul.h"
#include "ops_params.h"

namespace lowbit::entry {
namespace {

std::atomic<int> open_choices{0};
thread_local std::string refusal;
thread_local bool refusal_of_value = false;

// Counts the `use_backend` and `explain` contexts that are open.
void choose_elsewhere(int64_t change) { open_choices += static_cast<int>(change); }

void refuse(bool of_value, std::string text) {
    refusal_of_value = of_value;
    refusal = std::move(text);
}

using MaybeInt = std::optional<int64_t>;
using Ints = std::vector<int64_t>;
using torch::headeronly::ScalarType;

bool is_float(ScalarType t) { return t == ScalarType::Float || t == ScalarType::BFloat16 || t == ScalarType::Half; }

// Nothing for a rounding that there is not, or that the format has not.
std::optional<Random> random_of(const Text& rounding, const FormatParams& format, int64_t cols, const MaybeTensor& rng,
                                int64_t stream, int64_t offset, MaybeInt pitch) {
    if (rounding.view() == "nearest") return Random{kNearest, {}};
    if (rounding.view() != "stochastic" || format.kind == kKindCodebook) return std::nullopt;
    return lowbit::random_of(rng, {stream, offset, pitch.value_or(cols)});
}

std::optional<SchemeParams> scheme_for(const Text& name, const Tensor& x) {
    if (x.numel() == 0 || x.dim() == 0) return std::nullopt;
    const cpu::Shape shape = rows_of(x, "x").shape;
    return named_scheme(name.view(), shape.rows, shape.cols);
}

// -- codecs ----------------------------------------------------------------------------------------------------------
bool encode_out(const Tensor& x, const Text& format, const Text& rounding, bool saturate, const MaybeTensor& rng,
                int64_t stream, int64_t offset, MaybeInt pitch, const Tensor& out) {
    const auto f = named_format(format.view());
    if (!f || f->kind == kKindExponent || x.numel() == 0 || x.dim() == 0 || overlap(out, {&x})) return false;
    const auto random = random_of(rounding, *f, x.size(x.dim() - 1), rng, stream, offset, pitch);
    if (!random || !same_sizes(out, x)) return false;
    encode(x, out, *f, saturate, *random);
    return true;
}

std::optional<Tensor> encode_new(const Tensor& x, const Text& format, const Text& rounding, bool saturate,
                                 const MaybeTensor& rng, int64_t stream, int64_t offset, MaybeInt pitch) {
    const Tensor out = new_tensor(sizes_of(x), ScalarType::Byte);
    if (!encode_out(x, format, rounding, saturate, rng, stream, offset, pitch, out)) return std::nullopt;
    return out;
}

bool decode_out(const Tensor& codes, const Text& format, ScalarType dtype, const Tensor& out) {
    const auto f = named_format(format.view());
    if (!f || codes.numel() == 0 || out.scalar_type() != dtype || !same_sizes(out, codes)) return false;
    if (overlap(out, {&codes}) || !out.is_contiguous()) return false;
    decode(codes, out, *f);
    return true;
}

std::optional<Tensor> decode_new(const Tensor& codes, const Text& format, ScalarType dtype) {
    if (!is_float(dtype)) return std::nullopt;
    const Tensor out = new_tensor(sizes_of(codes), dtype);
    if (!decode_out(codes, format, dtype, out)) return std::nullopt;
    return out;
}

// -- quantization ----------------------------------------------------------------------------------------------------
using Parts = std::tuple<Tensor, Tensor, Tensor>;

Tensor codes_for(const Tensor& x, const SchemeParams& s) {
    return new_tensor(sizes_with(x, cpu::packed_cols(x.size(x.dim() - 1), s.format.bits)), ScalarType::Byte);
}

std::optional<Parts> quantize_new(const Tensor& x, const Text& scheme, const MaybeTensor& global_scale,
                                  const Text& rounding, const MaybeTensor& rng, int64_t stream, int64_t offset,
                                  MaybeInt pitch) {
    const auto s = scheme_for(scheme, x);
    if (!s) return std::nullopt;
    const cpu::Shape shape = rows_of(x, "x").shape, blocks = scale_shape(shape, *s);
    const auto random = random_of(rounding, s->format, shape.cols, rng, stream, offset, pitch);
    if (!random) return std::nullopt;
    const Tensor codes = codes_for(x, *s), scale = new_tensor({blocks.rows, blocks.cols}, scale_type(*s));
    const Tensor zero =
        new_tensor(s->affine ? std::vector<int64_t>{blocks.rows, blocks.cols} : std::vector<int64_t>{0}, zero_type(*s));
    quantize(x, global_scale, codes, scale, s->affine ? MaybeTensor(zero) : std::nullopt, *s, *random);
    return Parts{codes, scale, zero};
}

std::optional<Tensor> quantize_static_new(const Tensor& x, const Text& scheme, const Tensor& scale,
                                          const MaybeTensor& zero_point, const MaybeTensor& global_scale,
                                          const Text& rounding, const MaybeTensor& rng, int64_t stream, int64_t offset,
                                          MaybeInt pitch) {
    const auto s = scheme_for(scheme, x);
    if (!s) return std::nullopt;
    const auto random = random_of(rounding, s->format, x.size(x.dim() - 1), rng, stream, offset, pitch);
    if (!random) return std::nullopt;
    const Tensor codes = codes_for(x, *s);
    quantize_static(x, scale, zero_point, global_scale, codes, *s, *random);
    return codes;
}

bool dequantize_out(const Tensor& codes, const Text& scheme, int64_t cols, const Tensor& scale,
                    const MaybeTensor& zero_point, const MaybeTensor& global_scale, ScalarType dtype,
                    const Tensor& out) {
    const auto s = scheme_for(scheme, out);
    if (!s || out.scalar_type() != dtype || !out.is_contiguous() || out.size(out.dim() - 1) != cols) return false;
    if (codes.dim() != out.dim() || overlap(out, {&codes, &scale, address(zero_point), address(global_scale)}))
        return false;
    for (int64_t i = 0; i + 1 < out.dim(); ++i) {
        if (codes.size(i) != out.size(i)) return false;
    }
    dequantize(codes, scale, zero_point, global_scale, out, *s);
    return true;
}

std::optional<Tensor> dequantize_new(const Tensor& codes, const Text& scheme, int64_t cols, const Tensor& scale,
                                     const MaybeTensor& zero_point, const MaybeTensor& global_scale, ScalarType dtype) {
    if (!is_float(dtype) || codes.dim() == 0) return std::nullopt;
    const Tensor out = new_tensor(sizes_with(codes, cols), dtype);
    if (!dequantize_out(codes, scheme, cols, scale, zero_point, global_scale, dtype, out)) return std::nullopt;
    return out;
}

std::optional<Tensor> fake_quantize_new(const Tensor& x, const Text& scheme, const MaybeTensor& scale,
                                        const MaybeTensor& zero_point, const MaybeTensor& global_scale,
                                        const Text& rounding, const MaybeTensor& rng, int64_t stream, int64_t offset,
                                        MaybeInt pitch) {
    const auto s = scheme_for(scheme, x);
    if (!s || (!scale && zero_point)) return std::nullopt;
    const auto random = random_of(rounding, s->format, x.size(x.dim() - 1), rng, stream, offset, pitch);
    if (!random) return std::nullopt;
    const Tensor out = new_tensor(sizes_of(x), x.scalar_type());
    fake_quantize(x, scale, zero_point, global_scale, out, *s, *random);
    return out;
}

// -- products --------------------------------------------------------------------------------------------------------
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

std::optional<Coded> coded(const Tensor& data, const MaybeText& scheme, const MaybeTensor& scale,
                           const MaybeTensor& zero_point, const MaybeTensor& global_scale, int64_t cols) {
    if (data.dim() != 2 || data.numel() == 0) return std::nullopt;
    if (!scheme) {
        if (scale || zero_point || global_scale || precision_decides(data)) return std::nullopt;
        return Coded{data, std::nullopt, {}, {}, {}};
    }
    const auto s = named_scheme(scheme->view(), data.size(0), cols);
    if (!s || data.scalar_type() != ScalarType::Byte) return std::nullopt;
    return Coded{data, s, scale, zero_point, global_scale};
}

bool scaled_mm_out(const Tensor& a, const Tensor& b, int64_t cols, const MaybeText& a_scheme, const MaybeText& b_scheme,
                   const MaybeTensor& a_scale, const MaybeTensor& a_zero_point, const MaybeTensor& a_global_scale,
                   const MaybeTensor& b_scale, const MaybeTensor& b_zero_point, const MaybeTensor& b_global_scale,
                   const MaybeTensor& bias, ScalarType out_dtype, const Tensor& out) {
    const auto left = coded(a, a_scheme, a_scale, a_zero_point, a_global_scale, cols),
               right = coded(b, b_scheme, b_scale, b_zero_point, b_global_scale, cols);
    if (!left || !right || cols == 0 || out.scalar_type() != out_dtype || out.dim() != 2) return false;
    if (overlap(out, {&a, &b, address(a_scale), address(a_zero_point), address(a_global_scale), address(b_scale),
                      address(b_zero_point), address(b_global_scale), address(bias)})) {
        return false;
    }
    scaled_mm(*left, *right, bias, out, cols);
    return true;
}

std::optional<Tensor> scaled_mm_new(const Tensor& a, const Tensor& b, int64_t cols, const MaybeText& a_scheme,
                                    const MaybeText& b_scheme, const MaybeTensor& a_scale,
                                    const MaybeTensor& a_zero_point, const MaybeTensor& a_global_scale,
                                    const MaybeTensor& b_scale, const MaybeTensor& b_zero_point,
                                    const MaybeTensor& b_global_scale, const MaybeTensor& bias, ScalarType out_dtype) {
    if (!is_float(out_dtype) || a.dim() != 2 || b.dim() != 2) return std::nullopt;
    const Tensor out = new_tensor({a.size(0), b.size(0)}, out_dtype);
    if (!scaled_mm_out(a, b, cols, a_scheme, b_scheme, a_scale, a_zero_point, a_global_scale, b_scale, b_zero_point,
                       b_global_scale, bias, out_dtype, out)) {
        return std::nullopt;
    }
    return out;
}

// What `linear` does to the floats that it is given, and to its result.
struct Roundings {
    const MaybeText& input;
    const MaybeTensor &input_scale, &input_zero_point, &input_global_scale;
    const MaybeText& out_scheme;
    const MaybeTensor &out_scale, &out_zero_point;
};

// Into a new output, or one that shares no memory with the arguments.
bool linear_into(const Tensor& x, const Tensor& weight, const Text& scheme, const Tensor& scale,
                 const MaybeTensor& zero_point, const MaybeTensor& global_scale, const MaybeTensor& bias,
                 const Roundings& r, const Tensor& out) {
    if (x.numel() == 0 || !is_float(x.scalar_type())) return false;
    const int64_t cols = x.size(x.dim() - 1), rows = x.numel() / cols;
    const auto codes = coded(weight, scheme, scale, zero_point, global_scale, cols);
    std::optional<Rounded> from, to;
    if (r.input) {
        const auto s = named_scheme(r.input->view(), rows, cols);
        if (!s) return false;
        from = Rounded{*s, r.input_scale, r.input_zero_point, r.input_global_scale};
    } else if (r.input_scale || r.input_zero_point || r.input_global_scale || precision_decides(x)) {
        return false;
    }
    if (r.out_scheme) {
        const auto s = named_scheme(r.out_scheme->view(), rows, weight.size(0));
        if (!s) return false;
        to = Rounded{*s, r.out_scale, r.out_zero_point, {}};
    } else if (r.out_scale || r.out_zero_point) {
        return false;
    }
    if (!codes) return false;
    linear(x, from, *codes, bias, to, out);
    return true;
}

std::optional<Tensor> conv_new(const Tensor& x, const Tensor& weight, const Text& scheme, const Tensor& scale,
                               const MaybeTensor& zero_point, const MaybeTensor& global_scale, const MaybeTensor& bias,
                               const Ints& kernel, const Ints& stride, const Ints& padding, const Ints& dilation,
                               int64_t groups, const MaybeText& input, ScalarType out_dtype,
                               const MaybeTensor& input_scale, const MaybeTensor& input_zero_point,
                               const MaybeTensor& input_global_scale, const MaybeText& out_scheme,
                               const MaybeTensor& out_scale, const MaybeTensor& out_zero_point) {
    if (!is_float(out_dtype) || x.numel() == 0 || !x.is_contiguous() || weight.dim() != 2) return std::nullopt;
    const mm::Window w = window_of(x, {kernel, stride, padding, dilation, groups});
    const auto codes = coded(weight, scheme, scale, zero_point, global_scale, w.depth());
    std::optional<PixelRounding> from;
    if (input) {
        const auto find = [&](int64_t rows, int64_t cols) { return named_scheme(input->view(), rows, cols); };
        from = pixel_rounding(w, find, input_scale, input_zero_point, input_global_scale);
        if (!from || (input_scale && !from->once)) return std::nullopt;
    } else if (input_scale) {
        return std::nullopt;
    }
    if (!input_scale && (input_zero_point || input_global_scale)) return std::nullopt;
    int64_t width = weight.size(0);
    std::optional<Rounded> to;
    if (out_scheme) {
        const auto s = named_scheme(out_scheme->view(), w.rows(), width);
        if (!s) return std::nullopt;
        to = Rounded{*s, out_scale, out_zero_point, {}};
        width = cpu::packed_cols(width, s->format.bits);
    } else if (out_scale || out_zero_point) {
        return std::nullopt;
    }
    if (!codes) return std::nullopt;
    Ints sizes = sizes_with(x, width);
    std::copy_n(w.out + 3 - kernel.size(), kernel.size(), sizes.begin() + 1);
    const Tensor out = new_tensor(sizes, out_scheme ? ScalarType::Byte : out_dtype);
    conv(x, w, from, *codes, bias, to, out);
    return out;
}

bool linear_out(const Tensor& x, const Tensor& weight, const Text& scheme, const Tensor& scale,
                const MaybeTensor& zero_point, const MaybeTensor& global_scale, const MaybeTensor& bias,
                const MaybeText& input, ScalarType out_dtype, const MaybeTensor& input_scale,
                const MaybeTensor& input_zero_point, const MaybeTensor& input_global_scale, const MaybeText& out_scheme,
                const MaybeTensor& out_scale, const MaybeTensor& out_zero_point, const Tensor& out) {
    if (x.dim() == 0 || out.dim() != x.dim() || out.scalar_type() != (out_scheme ? ScalarType::Byte : out_dtype)) {
        return false;
    }
    if (overlap(out, {&x, &weight, &scale, address(zero_point), address(global_scale), address(bias),
                      address(input_scale), address(input_zero_point), address(input_global_scale), address(out_scale),
                      address(out_zero_point)})) {
        return false;
    }
    return linear_into(
        x, weight, scheme, scale, zero_point, global_scale, bias,
        {input, input_scale, input_zero_point, input_global_scale, out_scheme, out_scale, out_zero_point}, out);
}

std::optional<Tensor> linear_new(const Tensor& x, const Tensor& weight, const Text& scheme, const Tensor& scale,
                                 const MaybeTensor& zero_point, const MaybeTensor& global_scale,
                                 const MaybeTensor& bias, const MaybeText& input, ScalarType out_dtype,
                                 const MaybeTensor& input_scale, const MaybeTensor& input_zero_point,
                                 const MaybeTensor& input_global_scale, const MaybeText& out_scheme,
                                 const MaybeTensor& out_scale, const MaybeTensor& out_zero_point) {
    if (!is_float(out_dtype) || x.dim() == 0 || weight.dim() != 2) return std::nullopt;
    int64_t width = weight.size(0);
    if (out_scheme) {
        const auto s = named_scheme(out_scheme->view(), 1, width);
        if (!s) return std::nullopt;
        width = cpu::packed_cols(width, s->format.bits);
    }
    const Tensor out = new_tensor(sizes_with(x, width), out_scheme ? ScalarType::Byte : out_dtype);
    const Roundings r{input, input_scale, input_zero_point, input_global_scale, out_scheme, out_scale, out_zero_point};
    if (!linear_into(x, weight, scheme, scale, zero_point, global_scale, bias, r, out)) return std::nullopt;
    return out;
}

using MaybeType = std::optional<ScalarType>;

bool linear_packed_out(const Tensor& x, const Tensor& packed, int64_t rows, const MaybeTensor& bias,
                       MaybeType out_dtype, const Tensor& out) {
    const Packed weight = packed_of(packed);
    if (weight.rows != rows || x.numel() == 0 || x.dim() == 0 || out.dim() != x.dim()) return false;
    if (out.scalar_type() != out_dtype.value_or(x.scalar_type())) return false;
    if (overlap(out, {&x, &packed, address(bias)})) return false;
    linear_packed(x, weight, bias, out);
    return true;
}

std::optional<Tensor> linear_packed_new(const Tensor& x, const Tensor& packed, int64_t rows, const MaybeTensor& bias,
                                        MaybeType out_dtype) {
    const Packed weight = packed_of(packed);
    const ScalarType dtype = out_dtype.value_or(x.scalar_type());
    if (weight.rows != rows || x.numel() == 0 || x.dim() == 0 || !is_float(dtype)) return std::nullopt;
    const Tensor out = new_tensor(sizes_with(x, rows), dtype);
    linear_packed(x, weight, bias, out);
    return out;
}

}  // namespace

bool chosen_elsewhere() { return open_choices.load(std::memory_order_relaxed) != 0; }

void throw_refusal() {
    if (refusal_of_value) throw std::invalid_argument(refusal);  // becomes Python's ValueError
    throw std::runtime_error(refusal);
}

}  // namespace lowbit::entry

// What has a kernel here; Python serves all other ops by its own.
#define LOWBIT_ENTRIES(ENTRY)                                  \
    ENTRY(encode, lowbit::entry::encode_new)                   \
    ENTRY(encode_out, lowbit::entry::encode_out)               \
    ENTRY(decode, lowbit::entry::decode_new)                   \
    ENTRY(decode_out, lowbit::entry::decode_out)               \
    ENTRY(quantize, lowbit::entry::quantize_new)               \
    ENTRY(quantize_static, lowbit::entry::quantize_static_new) \
    ENTRY(dequantize, lowbit::entry::dequantize_new)           \
    ENTRY(dequantize_out, lowbit::entry::dequantize_out)       \
    ENTRY(fake_quantize, lowbit::entry::fake_quantize_new)     \
    ENTRY(scaled_mm, lowbit::entry::scaled_mm_new)             \
    ENTRY(scaled_mm_out, lowbit::entry::scaled_mm_out)         \
    ENTRY(linear, lowbit::entry::linear_new)                   \
    ENTRY(linear_out, lowbit::entry::linear_out)               \
    ENTRY(conv, lowbit::entry::conv_new)                       \
    ENTRY(linear_packed, lowbit::entry::linear_packed_new)     \
    ENTRY(linear_packed_out, lowbit::entry::linear_packed_out)

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m){
#define LOWBIT_REGISTER(op, function) LOWBIT_ENTRY(m, op, &function)
    LOWBIT_ENTRIES(LOWBIT_REGISTER)
#undef LOWBIT_REGISTER
}

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_native, m) {
    m.def("choose_elsewhere(int change) -> ()");
    m.def("refuse(bool of_value, str text) -> ()");
    m.def("entries() -> str[]");
}

namespace lowbit::entry {
namespace {
std::vector<std::string> entries() {
#define LOWBIT_NAME(op, function) #op,
    return {LOWBIT_ENTRIES(LOWBIT_NAME)};
#undef LOWBIT_NAME
}
}  // namespace
}  // namespace lowbit::entry

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CompositeExplicitAutograd, m) {
    m.impl("choose_elsewhere", TORCH_BOX(&lowbit::entry::choose_elsewhere));
    m.impl("refuse", TORCH_BOX(&lowbit::entry::refuse));
    m.impl("entries", TORCH_BOX(&lowbit::entry::entries));
}
