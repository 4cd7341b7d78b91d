// The CPU kernels of the ops without scales: checks, then cpu/codec/codec.h.
#include "cpu/codec/codec.h"

#include "ops_params.h"
#include "ops_random.h"

namespace lowbit {
namespace {

using entry::Out;
using entry::Outs;
using entry::Text;
using MaybeInt = std::optional<int64_t>;

Outs<1> encode_outputs(const Tensor& x, const Text&, const Text&, bool, const MaybeTensor&, int64_t, int64_t,
                       MaybeInt) {
    if (x.numel() == 0 || x.dim() == 0) return std::nullopt;
    return Outs<1>{{Out{sizes_of(x), ScalarType::Byte}}};
}

bool encode(const Tensor& given, const Text& format, const Text& rounding, bool saturate, const MaybeTensor& rng,
            int64_t stream, int64_t offset, MaybeInt pitch, const Tensor& out) {
    const auto f = named_format(format.view());
    if (!f || f->kind == kKindExponent) return false;
    const Tensor x = in_rows(given);
    const cpu::Shape shape = shape_of(x);
    const auto random = random_of(rounding, shape.cols, rng, stream, offset, pitch);
    if (!random) return false;
    cpu::encode(values_of(x), shape, *f, random->rounding, saturate, random->rng,
                new_bytes_of(out, shape.rows, shape.cols));
    return true;
}

Outs<1> decode_outputs(const Tensor& codes, const Text&, ScalarType dtype) {
    if (codes.numel() == 0 || codes.dim() == 0 || !is_float(dtype)) return std::nullopt;
    return Outs<1>{{Out{sizes_of(codes), dtype}}};
}

bool decode(const Tensor& given, const Text& format, ScalarType, const Tensor& out) {
    const auto f = named_format(format.view());
    if (!f) return false;
    const Tensor codes = dense(given);
    const cpu::Shape shape = shape_of(out);
    cpu::decode(bytes_of(codes, shape.rows, shape.cols), shape, *f, results_of(out, shape));
    return true;
}

bool pack(const Tensor& given, int64_t bits, const Tensor& out) {
    const Tensor codes = dense(given);
    const cpu::Shape shape = shape_of(codes);
    const int width = static_cast<int>(bits);
    cpu::pack(bytes_of(codes, shape.rows, shape.cols), shape, width,
              new_bytes_of(out, shape.rows, cpu::packed_cols(shape.cols, width)));
    return true;
}

bool unpack(const Tensor& given, int64_t bits, int64_t, const Tensor& out) {
    const Tensor packed = dense(given);
    const cpu::Shape shape = shape_of(out);
    const int width = static_cast<int>(bits);
    cpu::unpack(bytes_of(packed, shape.rows, cpu::packed_cols(shape.cols, width)), shape, width,
                new_bytes_of(out, shape.rows, shape.cols));
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_OP(encode, &lowbit::encode, &lowbit::encode_outputs)
LOWBIT_OP(decode, &lowbit::decode, &lowbit::decode_outputs)
LOWBIT_KERNEL(pack, &lowbit::pack, CPU)
LOWBIT_KERNEL(unpack, &lowbit::unpack, CPU)
