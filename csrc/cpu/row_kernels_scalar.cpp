// Row kernels, one element at a time: the specification (common/numerics.h) without vectors.
#include <cmath>
#include <type_traits>
#include <vector>

#include "common/numerics.h"
#include "cpu/row_kernels.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

// What the rules of optimizers and gates are written on: vectors of one lane.
#define LOWBIT_INLINE
constexpr int kLanes = 1;
using F = float;
using U = uint32_t;
using I = int32_t;
template <class T>
inline T load(const float* p) {
    return *p;
}
inline void store(float* p, F x) { *p = x; }
inline U patterns_of(F x) { return bits_of(x); }
inline F numbers_of(U bits) { return float_of(bits); }
inline F larger(F a, F b) { return a > b ? a : b; }
inline F smaller(F a, F b) { return a < b ? a : b; }
inline F splat(float x) { return x; }
inline F root(F x) { return std::sqrt(x); }
inline F one_nan(F x) { return x == x ? x : float_of(kNan); }
#include "cpu/fused/fused.inl"
#include "cpu/optim/rules.inl"
#include "cpu/optim/sums.inl"

// Calls f(read), where read(i) is the fp32 bits of element i.
template <class F>
void with_reader(const void* x, Dtype dtype, const F& f) {
    const auto* words = static_cast<const uint32_t*>(x);
    const auto* halves = static_cast<const uint16_t*>(x);
    if (dtype == Dtype::kFloat32) return f([=](int64_t i) { return words[i]; });
    if (dtype == Dtype::kBFloat16) return f([=](int64_t i) { return widen_bf16(halves[i]); });
    f([=](int64_t i) { return widen_fp16(halves[i]); });
}

// Calls f(write), where write(i, bits) rounds to the dtype and keeps.
template <class F>
void with_writer(void* out, Dtype dtype, const F& f) {
    auto* words = static_cast<uint32_t*>(out);
    auto* halves = static_cast<uint16_t*>(out);
    if (dtype == Dtype::kFloat32) return f([=](int64_t i, uint32_t bits) { words[i] = bits; });
    if (dtype == Dtype::kBFloat16) return f([=](int64_t i, uint32_t bits) { halves[i] = narrow_bf16(bits); });
    f([=](int64_t i, uint32_t bits) { halves[i] = narrow_fp16(bits); });
}

// Calls f(i, factor, zero point) for each of n elements; a block's are looked up once.
template <class F>
void with_factors(const Factors& f, int64_t n, const F& step) {
    const int64_t width = f.mode == Factors::kEach ? 1 : f.mode == Factors::kNone ? n : f.width;
    int64_t end = f.mode == Factors::kEach ? 1 : f.mode == Factors::kNone ? n : f.lead;
    for (int64_t i = 0, b = 0; i < n; ++b, end += width) {
        const float by = f.each ? f.each[b] : 1.0f, zero = f.zeros ? f.zeros[b] : 0.0f;
        for (const int64_t stop = end < n ? end : n; i < stop; ++i) step(i, by, zero);
    }
}

// Calls f(i, fp32 bits of x / factor, with the quotient's sign on NaN too, zero point) for each of n elements.
template <class F>
void with_quotients(const void* x, Dtype dtype, int64_t n, const Factors& f, const F& step) {
    with_reader(x, dtype, [&](auto read) {
        if (f.mode == Factors::kNone) {
            for (int64_t i = 0; i < n; ++i) step(i, read(i), 0.0f);
        } else if (f.mode == Factors::kInverse) {
            with_factors(f, n, [&](int64_t i, float by, float zero) {
                const uint32_t bits = read(i), q = bits_of(float_of(bits & kMagnitude) * by);
                step(i, (q & kMagnitude) | (bits & kSign), zero);
            });
        } else {
            const bool scales = f.mode == Factors::kReciprocal;
            with_factors(f, n, [&](int64_t i, float by, float zero) {
                step(i, bits_of(quotient(float_of(read(i)), scales ? divisor_of(by) : by)), zero);
            });
        }
    });
}

void encode(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const uint16_t* noise,
            const void*, uint8_t* codes) {
    const FormatParams format = e.format;
    const bool saturate = e.saturate, stochastic = e.stochastic;
    auto random = [=](int64_t i) { return noise ? noise[i] : 0u; };
    if (format.kind == kKindFloat) {
        return with_quotients(x, dtype, n, f, [=](int64_t i, uint32_t q, float) {
            codes[i] = static_cast<uint8_t>(encode_float(q, format, saturate, stochastic, random(i)));
        });
    }
    if (format.kind == kKindCodebook) {
        const FormatRow book = *e.book->row;
        return with_quotients(x, dtype, n, f, [=](int64_t i, uint32_t q, float) {
            codes[i] = static_cast<uint8_t>(encode_codebook(float_of(q), book, stochastic, random(i)));
        });
    }
    with_quotients(x, dtype, n, f, [=](int64_t i, uint32_t q, float zero) {
        codes[i] = static_cast<uint8_t>(encode_integer(float_of(q), format, zero, stochastic, random(i)));
    });
}

void in_range(const Encoder& e, const void* x, Dtype dtype, int64_t n, const Factors& f, const void*, uint8_t* kept) {
    with_quotients(x, dtype, n, f, [&e, kept](int64_t i, uint32_t q, float zero) {
        kept[i] =
            e.format.kind == kKindInteger ? integer_in_range(float_of(q), e.format, zero) : (q & kMagnitude) <= e.limit;
    });
}

void quotients(const void* x, Dtype dtype, int64_t n, const Factors& f, float* out) {
    with_quotients(x, dtype, n, f, [out](int64_t i, uint32_t q, float) { out[i] = float_of(q); });
}

void slopes(const Encoder& e, const Decoder& d, const void* x, Dtype dtype, const float* grad, const uint8_t* kept,
            int64_t n, const Factors& f, float* slopes, float* outside) {
    const uint32_t mask = (1u << d.format.bits) - 1;
    std::vector<uint8_t> codes(static_cast<size_t>(n));
    encode(e, x, dtype, n, f, nullptr, x, codes.data());
    with_quotients(x, dtype, n, f, [&](int64_t i, uint32_t q, float zero) {
        const float level = float_of(d.table[codes[static_cast<size_t>(i)] & mask]) - zero;
        slopes[i] = (kept[i] ? level - float_of(q) : level) * grad[i];
        if (outside) outside[i] = kept[i] ? 0.0f : grad[i];
    });
}

void decode(const Decoder& d, const uint8_t* codes, int64_t n, const Factors& f, void* out, Dtype dtype) {
    const uint32_t mask = (1u << d.format.bits) - 1;
    const uint32_t* table = d.table;
    with_writer(out, dtype, [&](auto write) {
        if (f.mode == Factors::kNone) {
            for (int64_t i = 0; i < n; ++i) write(i, table[codes[i] & mask]);
            return;
        }
        with_factors(f, n, [&](int64_t i, float by, float zero) {
            const uint32_t bits = bits_of((float_of(table[codes[i] & mask]) - zero) * by);
            write(i, is_nan(bits) ? kNan : bits);
        });
    });
}

void block_stats(const void* x, Dtype dtype, int64_t n, int64_t block, bool affine, uint32_t* high, uint32_t* low) {
    with_reader(x, dtype, [&](auto read) {
        for (int64_t b = 0, i = 0; i < n; ++b) {
            uint32_t most = high[b], least = affine ? low[b] : 0;
            for (const int64_t end = n - i < block ? n : i + block; i < end; ++i) {
                const uint32_t bits = read(i), magnitude = bits & kMagnitude;
                uint32_t& side = affine && (bits & kSign) ? least : most;
                side = magnitude > side ? magnitude : side;
            }
            high[b] = most;
            if (affine) low[b] = least;
        }
    });
}

void column_stats(const void* x, Dtype dtype, int64_t n, bool affine, uint32_t* high, uint32_t* low) {
    block_stats(x, dtype, n, 1, affine, high, low);
}

uint32_t finite_amax(const void* x, Dtype dtype, int64_t n) {
    uint32_t amax = 0;
    with_reader(x, dtype, [&](auto read) {
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t magnitude = read(i) & kMagnitude;
            if (magnitude < kInf && magnitude > amax) amax = magnitude;
        }
    });
    return amax;
}

void spread(const BlockScale& s, const ScaleRule& rule, float inverse, int64_t i, const ScaleRow& row) {
    row.value[i] = s.value;
    row.divisor[i] = divisor_of(s.value);
    if (row.inverse) row.inverse[i] = inverse;
    if (rule.affine) row.zero[i] = s.zero_point;
}

bool is_plain(float scale, float inverse, uint32_t amax) {
    if (bits_of(scale) == 0) return true;  // not -0, which turns signs
    return scale >= kLeastPlain && scale <= kMostPlain && float_of(amax) * inverse < kMostQuotient;
}

bool make_scales(const uint32_t* high, const uint32_t* low, int64_t n, const ScaleRule& rule, const float* global_scale,
                 void* scales, void* zero_points, const ScaleRow& row) {
    const bool exact = has_inverse(rule, global_scale);
    bool plain = true;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t up = high[i], down = rule.both_ends ? low[i] : 0;
        const BlockScale s = make_scale(up, down, rule, global_scale);
        if (scales) write_scale(scales, zero_points, i, rule, s);
        const float inverse = s.value == 0.0f ? 0.0f : 1.0f / s.value;
        spread(s, rule, inverse, i, row);
        plain &= exact ? s.value == s.value : is_plain(s.value, inverse, up > down ? up : down);
    }
    return plain;
}

bool read_scales(const void* scales, const void* zero_points, int64_t n, const ScaleRule& rule,
                 const float* global_scale, const ScaleRow& row) {
    bool plain = true;
    for (int64_t i = 0; i < n; ++i) {
        const BlockScale s = read_scale(scales, zero_points, global_scale, i, rule);
        spread(s, rule, s.value == 0.0f ? 0.0f : 1.0f / s.value, i, row);
        plain &= s.value >= kLeastPlain && s.value <= kMostGiven;
    }
    return plain;
}

void noise(uint64_t block, int64_t count, const Rng& rng, uint16_t* out) {
    for (int64_t k = 0; k < count; ++k) {
        const Words words =
            philox((block + static_cast<uint64_t>(k)) & (~uint64_t{0} >> 3), rng.step, rng.stream, rng.seed);
        for (int j = 0; j < 8; ++j) out[8 * k + j] = static_cast<uint16_t>(words.w[j / 2] >> (16 * (j % 2)));
    }
}

void step(const StepRule& rule, const StepRow& row) {
    with_rule(rule, [&](const auto& rule) {
        constexpr int kMoments = std::decay_t<decltype(rule)>::kMoments;
        const float* from[kMaxMoments] = {};
        for (int k = 0; k < kMoments; ++k) {
            const MomentRow& m = row.moments[k];
            if (m.decoder) decode(*m.decoder, m.codes, row.n, m.factors, m.numbers, Dtype::kFloat32);
            from[k] = m.decoder ? m.numbers : m.from;
        }
        with_reader(row.param, row.dtype, [&](auto params) {
            with_reader(row.grad, row.grad_dtype, [&](auto grads) {
                with_writer(row.new_param, row.dtype, [&](auto write) {
                    for (int64_t i = 0; i < row.n; ++i) {
                        float m[kMaxMoments] = {};
                        for (int k = 0; k < kMoments; ++k) m[k] = from[k][i];
                        write(i, bits_of(one_nan(rule.step(float_of(params(i)), float_of(grads(i)), m))));
                        for (int k = 0; k < kMoments; ++k) row.moments[k].numbers[i] = one_nan(m[k]);
                    }
                });
            });
        });
        for (int k = 0; k < kMoments; ++k) {
            const MomentRow& m = row.moments[k];
            if (m.decoder) block_stats(m.numbers, Dtype::kFloat32, row.n, m.block, false, m.high, nullptr);
        }
    });
}

void product(const void* x, Dtype dtype, int64_t n, float factor, const float* each, float* out) {
    with_reader(x, dtype, [&](auto read) {
        for (int64_t i = 0; i < n; ++i) out[i] = float_of(read(i)) * (each ? each[i] : factor);
    });
}

void widen(const void* x, Dtype dtype, int64_t n, float* out) {
    with_reader(x, dtype, [&](auto read) {
        for (int64_t i = 0; i < n; ++i) out[i] = float_of(read(i));
    });
}

void narrow(const float* x, Dtype dtype, int64_t n, const uint16_t* noise, void* out) {
    if (noise) {
        for (int64_t i = 0; i < n; ++i) {
            static_cast<uint16_t*>(out)[i] = narrow_bf16_stochastic(bits_of(x[i]), noise[i]);
        }
        return;
    }
    with_writer(out, dtype, [&](auto write) {
        for (int64_t i = 0; i < n; ++i) write(i, bits_of(one_nan(x[i])));
    });
}

void join24(const uint16_t* high, const int8_t* low, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of(lowbit::join24(high[i], low[i]));
}

void split24(const float* x, int64_t n, uint16_t* high, int8_t* low) {
    for (int64_t i = 0; i < n; ++i) {
        const Split s = lowbit::split24(bits_of(x[i]));
        high[i] = s.high, low[i] = s.low;
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

const RowKernels& row_kernels_scalar() {
    static constexpr RowKernels table{encode,       in_range,       quotients,   slopes,       decode,  block_stats,
                                      column_stats, finite_amax,    make_scales, read_scales,  product, noise,
                                      step,         widen,          narrow,      join24,       split24, square_sum,
                                      add_squares,  sum_terms,      add_terms,   add_products, norm,    norm_gradient,
                                      gated,        gated_gradient, rotate,      pack,         unpack};
    return table;
}

}  // namespace lowbit::cpu
