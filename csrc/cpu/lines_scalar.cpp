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

int64_t entry(const Factors& f, int64_t i) {
    return f.mode == Factors::kEach ? i : i < f.lead ? 0 : 1 + (i - f.lead) / f.width;
}
float factor(const Factors& f, int64_t i) { return f.each[entry(f, i)]; }
float zero(const Factors& f, int64_t i) { return f.zeros ? f.zeros[entry(f, i)] : 0.0f; }

// x / factor, with the quotient's sign on NaN too.
uint32_t divided(uint32_t bits, const Factors& f, int64_t i) {
    if (f.mode == Factors::kNone) return bits;
    if (f.mode != Factors::kInverse) return bits_of(quotient(float_of(bits), factor(f, i)));
    const float q = float_of(bits & kMagnitude) * factor(f, i);
    return (bits_of(q) & kMagnitude) | (bits & kSign);
}

uint32_t encode_one(const Encoder& e, uint32_t bits, float zero_point, uint32_t noise) {
    if (e.format.kind == kKindFloat) return encode_float(bits, e.format, e.saturate, e.stochastic, noise);
    if (e.format.kind == kKindCodebook)
        return encode_codebook(float_of(bits), e.thresholds, e.num_thresholds, e.nan_code);
    return encode_integer(float_of(bits), e.format, zero_point, e.stochastic, noise);
}

void encode(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const uint16_t* noise,
            const void*, uint8_t* codes) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = divided(load(x, dtype, i), f, i);
        codes[i] = static_cast<uint8_t>(encode_one(e, bits, zero(f, i), noise ? noise[i] : 0));
    }
}

void in_range(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const void*, uint8_t* kept) {
    for (int64_t i = 0; i < n; ++i) {
        const float v = float_of(divided(load(x, dtype, i), f, i));
        kept[i] = e.format.kind == kKindInteger ? integer_in_range(v, e.format, zero(f, i))
                                                : (bits_of(v) & kMagnitude) <= e.limit;
    }
}

void quotients(const void* x, Dtype dtype, int64_t n, const Factors& f, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(divided(load(x, dtype, i), f, i));
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

void spread(const BlockScale& s, const ScaleRule& rule, const float* outer, int64_t i, const ScaleLine& line) {
    line.value[i] = s.value;
    line.divisor[i] = has_inverse(rule, outer) ? 1.0f / s.value : divisor_of(s.value);
    if (rule.affine) line.zero[i] = s.zero_point;
}

bool make_scales(const uint32_t* high, const uint32_t* low, int64_t n, const ScaleRule& rule, const float* outer,
                 void* scales, void* zero_points, const ScaleLine& line) {
    bool broken = false;
    for (int64_t i = 0; i < n; ++i) {
        const BlockScale s = make_scale(high[i], rule.affine ? low[i] : 0, rule, outer);
        if (scales) write_scale(scales, zero_points, i, rule, s);
        spread(s, rule, outer, i, line);
        broken |= is_nan(bits_of(s.value));
    }
    return broken;
}

void read_scales(const void* scales, const void* zero_points, int64_t n, const ScaleRule& rule, const float* outer,
                 const ScaleLine& line) {
    for (int64_t i = 0; i < n; ++i) spread(read_scale(scales, zero_points, outer, i, rule), rule, outer, i, line);
}

void noise(uint64_t block, int64_t count, const Rng& rng, uint16_t* out) {
    for (int64_t k = 0; k < count; ++k) {
        const Words words =
            philox((block + static_cast<uint64_t>(k)) & (~uint64_t{0} >> 3), rng.step, rng.stream, rng.seed);
        for (int j = 0; j < 8; ++j) out[8 * k + j] = static_cast<uint16_t>(words.w[j / 2] >> (16 * (j % 2)));
    }
}

void adamw(const AdamWFactors& factors, const void* param, Dtype dtype, const void* grad, Dtype grad_dtype, int64_t n,
           float* avg, float* rms, void* new_param) {
    for (int64_t i = 0; i < n; ++i) {
        const float p = float_of(load(param, dtype, i)), g = float_of(load(grad, grad_dtype, i));
        const uint32_t bits = bits_of(adamw_element(factors, p, g, avg[i], rms[i]));
        store(new_param, dtype, i, is_nan(bits) ? kNan : bits);
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
    static constexpr Lines table{encode,      in_range,    quotients, decode, block_stats, column_stats, finite_amax,
                                 make_scales, read_scales, noise,     adamw,  pack,        unpack};
    return table;
}

}  // namespace lowbit::cpu
