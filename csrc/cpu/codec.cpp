// Codecs without scales: encode, decode, pack, unpack, and the outer scale's maximum.
#include "cpu/codec.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "common/scales.h"
#include "cpu/lines.h"
#include "cpu/runs.h"
#include "cpu/threads.h"

namespace lowbit::cpu {

void encode(const Values& x, Shape shape, const FormatParams& format, Rounding rounding, bool saturate, const Rng& rng,
            uint8_t* codes) {
    const Lines& line = lines();
    const Encoder encoder = make_encoder(format, saturate, rounding == kStochastic);
    for_runs(shape, [&](Noise& noise, const Run& run) {
        const void* from = advance(x.data, run.row * x.stride + run.begin, x.dtype);
        line.encode(encoder, from, x.dtype, run.count, {}, encoder.stochastic ? noise.at(line, rng, run) : nullptr,
                    codes + run.row * shape.cols + run.begin);
    });
}

void decode(const uint8_t* codes, Shape shape, const FormatParams& format, const Results& out) {
    const Lines& line = lines();
    const Decoder decoder(format);
    for_runs(shape, [&](Noise&, const Run& run) {
        line.decode(decoder, codes + run.row * shape.cols + run.begin, run.count, {},
                    advance(out.data, run.row * out.stride + run.begin, out.dtype), out.dtype);
    });
}

void pack(const uint8_t* codes, Shape shape, int bits, uint8_t* packed) {
    const Lines& line = lines();
    for_runs(shape, [&](Noise&, const Run& run) {
        pack_run(line, codes + run.row * shape.cols + run.begin, run.count, bits,
                 packed + run.row * packed_cols(shape.cols, bits) + run.begin * bits / 8);
    });
}

void unpack(const uint8_t* packed, Shape shape, int bits, uint8_t* codes) {
    const Lines& line = lines();
    for_runs(shape, [&](Noise&, const Run& run) {
        unpack_run(line, packed + run.row * packed_cols(shape.cols, bits) + run.begin * bits / 8, run.count, bits,
                   codes + run.row * shape.cols + run.begin);
    });
}

float outer_scale(const Values& x, Shape shape, const SchemeParams& scheme) {
    const Lines& line = lines();
    std::atomic<uint32_t> amax{0};
    for_runs(shape, [&](Noise&, const Run& run) {
        raise(amax, line.finite_amax(advance(x.data, run.row * x.stride + run.begin, x.dtype), x.dtype, run.count));
    });
    return float_of(make_outer_scale(amax.load(), scale_rule(scheme)));
}

}  // namespace lowbit::cpu
