// The CPU kernels of torch.ops.lowbit.*: each checks, allocates and computes, or answers nothing (ops_entry.h).
//
// Arguments are those of the op's NamedTuple in lowbit/ops. Formats and schemes are names, known once Python has used
// them (lowbit_native::keep).
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "format_table.h"
#include "ops_codec.h"
#include "ops_entry.h"
#include "ops_params.h"

namespace lowbit::entry {
namespace {

std::atomic<int> open_choices{0};
std::atomic<int64_t> swallowed_errors{0};
thread_local std::string refusal;
thread_local bool refusal_of_value = false;

// Counts the `use_backend` and `explain` contexts that are open.
void choose_elsewhere(int64_t change) { open_choices += static_cast<int>(change); }

int64_t swallowed() { return swallowed_errors; }

void refuse(bool of_value, std::string text) {
    refusal_of_value = of_value;
    refusal = std::move(text);
}

using MaybeInt = std::optional<int64_t>;
using Ints = std::vector<int64_t>;
using torch::headeronly::ScalarType;

// Nothing for a rounding that there is not, or that the format has not.
std::optional<Random> random_of(const Text& rounding, const FormatParams& format, int64_t cols, const MaybeTensor& rng,
                                int64_t stream, int64_t offset, MaybeInt pitch) {
    if (rounding.view() == "nearest") return Random{kNearest, {}};
    if (rounding.view() != "stochastic" || format.kind == kKindCodebook) return std::nullopt;
    return lowbit::random_of(rng, {stream, offset, pitch.value_or(cols)});
}

std::optional<SchemeParams> scheme_for(const Text& name, const Tensor& x) {
    if (x.numel() == 0 || x.dim() == 0) return std::nullopt;
    const int64_t cols = x.size(x.dim() - 1);
    return named_scheme(name.view(), x.numel() / cols, cols);
}

// -- codecs ----------------------------------------------------------------------------------------------------------
bool encode_out(const Tensor& x, const Text& format, const Text& rounding, bool saturate, const MaybeTensor& rng,
                int64_t stream, int64_t offset, MaybeInt pitch, const Tensor& out) {
    const auto f = named_format(format.view());
    if (!f || f->kind == kKindExponent || x.numel() == 0 || x.dim() == 0 || lowbit::overlap(out, {&x})) return false;
    const auto random = random_of(rounding, *f, x.size(x.dim() - 1), rng, stream, offset, pitch);
    if (!random || !same_sizes(out, x) || !out.is_contiguous()) return false;
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
    if (!f || codes.numel() == 0 || codes.dim() == 0 || out.scalar_type() != dtype || !same_sizes(out, codes))
        return false;
    if (lowbit::overlap(out, {&codes}) || !out.is_contiguous()) return false;
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
    const int64_t cols = x.size(x.dim() - 1);
    const cpu::Shape blocks = scale_shape({x.numel() / cols, cols}, *s);
    const auto random = random_of(rounding, s->format, cols, rng, stream, offset, pitch);
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
    if (codes.dim() != out.dim() || lowbit::overlap(out, {&codes, &scale, address(zero_point), address(global_scale)}))
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

}  // namespace

std::vector<std::string>& served_ops() {
    static std::vector<std::string> names;
    return names;
}

bool is_like(const Tensor& given, const Out& out) {
    return given.scalar_type() == out.dtype && given.is_contiguous() && sizes_of(given) == out.sizes;
}

bool overlap(const Tensor& out, const Tensor& other) { return lowbit::overlap(out, {&other}); }

bool chosen_elsewhere() { return open_choices.load(std::memory_order_relaxed) != 0; }

void count_swallowed() { ++swallowed_errors; }

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
    ENTRY(fake_quantize, lowbit::entry::fake_quantize_new)

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m){
#define LOWBIT_REGISTER(op, function) LOWBIT_ENTRY(m, op, &function)
    LOWBIT_ENTRIES(LOWBIT_REGISTER)
#undef LOWBIT_REGISTER
}

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_native, m) {
    m.def("choose_elsewhere(int change) -> ()");
    m.def("refuse(bool of_value, str text) -> ()");
    m.def("entries() -> str[]");
    m.def("swallowed() -> int");
}

namespace lowbit::entry {
namespace {
std::vector<std::string> entries() {
    std::vector<std::string> names = served_ops();
#define LOWBIT_NAME(op, function) names.emplace_back(#op);
    LOWBIT_ENTRIES(LOWBIT_NAME)
#undef LOWBIT_NAME
    return names;
}
}  // namespace
}  // namespace lowbit::entry

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CompositeExplicitAutograd, m) {
    m.impl("choose_elsewhere", TORCH_BOX(&lowbit::entry::choose_elsewhere));
    m.impl("refuse", TORCH_BOX(&lowbit::entry::refuse));
    m.impl("swallowed", TORCH_BOX(&lowbit::entry::swallowed));
    m.impl("entries", TORCH_BOX(&lowbit::entry::entries));
}
