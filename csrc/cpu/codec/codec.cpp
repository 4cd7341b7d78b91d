// Codecs without scales: encode, decode, pack, unpack, and the global scale's maximum.
#include "cpu/codec/codec.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "common/scales.h"
#include "cpu/row_kernels.h"
#include "cpu/runs.h"
#include "cpu/threads.h"

namespace lowbit::cpu {

void encode(const Values& x, Shape shape, const FormatParams& format, Rounding rounding, bool saturate, const Rng& rng,
            uint8_t* codes) {
    const RowKernels& kernels = row_kernels();
    const Encoder encoder = make_encoder(format, saturate, rounding == kStochastic);
    const Shape on = joined(shape, {x.stride, pitch_of(rng, shape, rounding)});
    for_runs(on, [&](Scratch& scratch, const Run& run) {
        const void* from = at_run(x, run);
        const uint16_t* noise = encoder.stochastic ? scratch.noise_at(kernels, rng, run) : nullptr;
        kernels.encode(encoder, from, x.dtype, run.count, {}, noise, static_cast<const char*>(from) + kAhead,
                       codes + run.row * on.cols + run.begin);
    });
}

void decode(const uint8_t* codes, Shape shape, const FormatParams& format, const Results& out) {
    const RowKernels& kernels = row_kernels();
    const Decoder decoder(format);
    const Shape on = joined(shape, {out.stride});
    for_runs(on, [&](Scratch&, const Run& run) {
        const uint8_t* from = codes + run.row * on.cols + run.begin;
        kernels.decode(decoder, from, run.count, {}, at_run(out, run), out.dtype);
    });
}

void pack(const uint8_t* codes, Shape matrix, int bits, uint8_t* packed) {
    const Shape shape = joined(matrix, {}, bits);
    const RowKernels& kernels = row_kernels();
    const int64_t row_bytes = packed_cols(shape.cols, bits);
    for_runs(shape, [&](Scratch&, const Run& run) {
        const uint8_t* from = codes + run.row * shape.cols + run.begin;
        pack_run(kernels, from, run.count, bits, packed + run.row * row_bytes + run.begin * bits / 8);
    });
}

void unpack(const uint8_t* packed, Shape matrix, int bits, uint8_t* codes) {
    const Shape shape = joined(matrix, {}, bits);
    const RowKernels& kernels = row_kernels();
    const int64_t row_bytes = packed_cols(shape.cols, bits);
    for_runs(shape, [&](Scratch&, const Run& run) {
        const uint8_t* from = packed + run.row * row_bytes + run.begin * bits / 8;
        unpack_run(kernels, from, run.count, bits, codes + run.row * shape.cols + run.begin);
    });
}

void global_scale(const Values& x, Shape shape, const SchemeParams& scheme, float* out) {
    const RowKernels& kernels = row_kernels();
    const bool by_row = scheme.global_scale == kGlobalScaleRow;
    const size_t count = static_cast<size_t>(global_scale_count(scheme, shape.rows));
    std::vector<std::atomic<uint32_t>> amax(count);
    for (auto& one : amax) one = 0;
    for_runs(by_row ? shape : joined(shape, {x.stride}), [&](Scratch&, const Run& run) {
        raise(amax[by_row ? static_cast<size_t>(run.row) : 0], kernels.finite_amax(at_run(x, run), x.dtype, run.count));
    });
    const ScaleRule rule = scale_rule(scheme);
    for (size_t i = 0; i < count; ++i) out[i] = float_of(make_global_scale(amax[i].load(), rule));
}

}  // namespace lowbit::cpu
