// Line kernels, one element at a time: the specification (common/numerics.h) without vectors.
#include "common/numerics.h"
#include "cpu/lines.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

uint32_t load(const void* x, Dtype dtype, int64_t i) {
    switch (dtype) {
        case Dtype::kFloat32:
            return static_cast<const uint32_t*>(x)[i];
        case Dtype::kBFloat16:
            return widen_bf16(static_cast<const uint16_t*>(x)[i]);
        default:
            return widen_fp16(static_cast<const uint16_t*>(x)[i]);
    }
}

void store(void* out, Dtype dtype, int64_t i, uint32_t bits) {
    switch (dtype) {
        case Dtype::kFloat32:
            static_cast<uint32_t*>(out)[i] = bits;
            break;
        case Dtype::kBFloat16:
            static_cast<uint16_t*>(out)[i] = narrow_bf16(bits);
            break;
        default:
            static_cast<uint16_t*>(out)[i] = narrow_fp16(bits);
            break;
    }
}

float factor(const Factors& f, int64_t i) { return f.mode == Factors::kEach ? f.each[i] : f.one; }
float zero(const Factors& f, int64_t i) { return f.mode != Factors::kEach ? f.zero : f.zeros ? f.zeros[i] : 0.0f; }

uint32_t encode_one(const Encoder& e, uint32_t bits, float zero_point, uint32_t noise) {
    if (e.format.kind == kKindFloat) return encode_float(bits, e.format, e.saturate, e.stochastic, noise);
    if (e.format.kind == kKindCodebook)
        return encode_codebook(float_of(bits), e.thresholds, e.num_thresholds, e.nan_code);
    return encode_integer(float_of(bits), e.format, zero_point, e.stochastic, noise);
}

void encode(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const uint16_t* noise,
            uint8_t* codes) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = load(x, dtype, i);
        if (f.mode != Factors::kNone) bits = bits_of(quotient(float_of(bits), factor(f, i)));
        codes[i] = static_cast<uint8_t>(encode_one(e, bits, zero(f, i), noise ? noise[i] : 0));
    }
}

void in_range(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, uint8_t* kept) {
    for (int64_t i = 0; i < n; ++i) {
        const float v = quotient(float_of(load(x, dtype, i)), factor(f, i));
        kept[i] = e.format.kind == kKindInteger ? integer_in_range(v, e.format, zero(f, i))
                                                : (bits_of(v) & kMagnitude) <= e.limit;
    }
}

void quotients(const void* x, Dtype dtype, int64_t n, const Factors& f, float* out) {
    for (int64_t i = 0; i < n; ++i) {
        const float v = float_of(load(x, dtype, i));
        out[i] = f.mode == Factors::kNone ? v : quotient(v, factor(f, i));
    }
}

void decode(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out, Dtype dtype) {
    const uint32_t mask = (1u << d.format.bits) - 1;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = d.table[codes[i] & mask];
        if (f.mode != Factors::kNone) {
            bits = bits_of((float_of(bits) - zero(f, i)) * factor(f, i));
            if (is_nan(bits)) bits = kNan;
        }
        store(out, dtype, i, bits);
    }
}

void raise(uint32_t bits, bool affine, uint32_t& high, uint32_t& low) {
    const uint32_t magnitude = bits & kMagnitude;
    uint32_t& side = affine && (bits & kSign) ? low : high;
    if (magnitude > side) side = magnitude;
}

void block_stats(const void* x, Dtype dtype, int64_t n, int64_t block, bool affine, uint32_t* high, uint32_t* low) {
    for (int64_t b = 0; b * block < n; ++b) {
        uint32_t unused = 0;
        for (int64_t i = b * block; i < n && i < (b + 1) * block; ++i) {
            raise(load(x, dtype, i), affine, high[b], affine ? low[b] : unused);
        }
    }
}

void column_stats(const void* x, Dtype dtype, int64_t n, bool affine, uint32_t* high, uint32_t* low) {
    block_stats(x, dtype, n, 1, affine, high, low);
}

uint32_t finite_amax(const void* x, Dtype dtype, int64_t n) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = load(x, dtype, i) & kMagnitude;
        if (magnitude < kInf && magnitude > amax) amax = magnitude;
    }
    return amax;
}

void noise(uint64_t block, int64_t count, const Rng& rng, uint16_t* out) {
    for (int64_t k = 0; k < count; ++k) {
        const Words words =
            philox((block + static_cast<uint64_t>(k)) & (~uint64_t{0} >> 3), rng.step, rng.stream, rng.seed);
        for (int j = 0; j < 8; ++j) out[8 * k + j] = static_cast<uint16_t>(words.w[j / 2] >> (16 * (j % 2)));
    }
}

void pack(const uint8_t* codes, int64_t groups, int bits, uint8_t* out) {
    const uint64_t mask = (1u << bits) - 1;
    for (int64_t g = 0; g < groups; ++g) {
        uint64_t word = 0;
        for (int j = 0; j < 8; ++j) word |= (codes[8 * g + j] & mask) << (bits * j);
        for (int j = 0; j < bits; ++j) out[g * bits + j] = static_cast<uint8_t>(word >> (8 * j));
    }
}

void unpack(const uint8_t* packed, int64_t groups, int bits, uint8_t* codes) {
    const uint64_t mask = (1u << bits) - 1;
    for (int64_t g = 0; g < groups; ++g) {
        uint64_t word = 0;
        for (int j = 0; j < bits; ++j) word |= static_cast<uint64_t>(packed[g * bits + j]) << (8 * j);
        for (int j = 0; j < 8; ++j) codes[8 * g + j] = static_cast<uint8_t>((word >> (bits * j)) & mask);
    }
}

}  // namespace

const Lines& lines_scalar() {
    static constexpr Lines table{encode,       in_range,    quotients, decode, block_stats,
                                 column_stats, finite_amax, noise,     pack,   unpack};
    return table;
}

}  // namespace lowbit::cpu
