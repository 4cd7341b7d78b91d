// Holds every instruction set's line kernels against the scalar code, bit for bit; needs neither torch nor Python.
//
// All 65,536 bf16 and fp16 patterns, and fp32 samples crowded around what rounds differently: every format of the table
// and some custom ones, both roundings, saturating or not, every kind of factor, every output type.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "common/numerics.h"
#include "cpu/isa.h"
#include "cpu/lines.h"
#include "cpu/threads.h"
#include "format_table.h"

using namespace lowbit;
using namespace lowbit::cpu;

namespace {

std::mt19937_64 random_bits(1);
long failures = 0, comparisons = 0;

struct Input {
    Dtype dtype;
    std::vector<uint32_t> words;  // fp32 bits, or two 16-bit numbers each
    int64_t count;
};

Input all_patterns(Dtype dtype) {
    Input in{dtype, std::vector<uint32_t>(32768), 65536};
    for (uint32_t i = 0; i < 32768; ++i) in.words[i] = (2 * i) | (2 * i + 1) << 16;
    return in;
}

// Any bit pattern; numbers with few significant bits (grid points and midpoints) and their neighbours; around 1.
Input samples(int64_t count) {
    Input in{Dtype::kFloat32, {}, count};
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits = static_cast<uint32_t>(random_bits());
        if (i % 4 > 0)
            bits =
                (bits >> (random_bits() % 24) << (random_bits() % 24)) + static_cast<uint32_t>(random_bits() % 3) - 1;
        if (i % 4 > 1) bits = (bits & 0x807fffffu) | static_cast<uint32_t>(100 + random_bits() % 48) << 23;
        in.words.push_back(bits);
    }
    const uint32_t specials[] = {0,    kSign,        1,           kInf,       kInf | kSign,
                                 kNan, kNan | kSign, 0x7f800001u, kMaxFinite, 0x00800000u};
    std::memcpy(in.words.data(), specials, sizeof specials);
    return in;
}

std::vector<FormatParams> formats() {
    std::vector<FormatParams> all;
    for (const FormatRow& row : kFormats) all.push_back(row.params);
    all.push_back({kKindFloat, 4, 2, 1, 3, 1, 7, -1, -1, -8, 7, -1});          // e2m1b3
    all.push_back({kKindFloat, 8, 3, 4, 3, 1, 127, -1, -1, -128, 127, -1});    // e3m4
    all.push_back({kKindFloat, 8, 7, 0, 1, 1, 127, -1, -1, -128, 127, -1});    // e7m0b1: to the end of fp32's range
    all.push_back({kKindFloat, 8, 4, 3, 7, 1, 119, 120, 127, -128, 127, -1});  // e4m3in
    all.push_back({kKindFloat, 2, 1, 0, 0, 1, 1, -1, -1, -2, 1, -1});          // e1m0
    return all;
}

void expect(bool same, const char* isa, const char* what, const FormatParams& f, Dtype dtype, int mode) {
    ++comparisons;
    if (same) return;
    if (++failures < 20) {
        std::printf("%s: %s differs: kind %d bits %d mantissa %d bias %d, dtype %d, mode %d\n", isa, what, f.kind,
                    f.bits, f.mantissa, f.bias, static_cast<int>(dtype), mode);
    }
}

// Divisors (or multipliers) of every kind, zero points for integers; with powers of two (and NaN), their reciprocals.
std::vector<Factors> factors(const FormatParams& f, std::vector<float>& each, std::vector<float>& zeros) {
    for (size_t i = 0; i < each.size(); ++i) {
        each[i] = float_of(static_cast<uint32_t>(random_bits() % 0xff) << 23 |
                           static_cast<uint32_t>(random_bits() & 0x7fffff));
        zeros[i] = f.kind != kKindInteger ? 0.0f : static_cast<float>(f.qmin + static_cast<int>(random_bits() % 16));
    }
    each[3] = float_of(kNan), each[4] = float_of(kInf), each[5] = -2.0f, each[6] = 0.0f;
    static const float ones[] = {1.0f, 0.3f, -7.5e-9f, 3e38f, 1e-39f, float_of(kInf), float_of(kNan)};
    static const float inverses[] = {1.0f, 0.125f, 0x1p127f, 0x1p-127f, float_of(kNan)};
    static const float threes[] = {3.0f, 3.0f, 3.0f, 3.0f, 3.0f, 3.0f, 3.0f};
    constexpr int64_t kAll = int64_t{1} << 40;
    std::vector<Factors> all(1);
    for (const float& one : ones)
        all.push_back({Factors::kBlocks, &one, f.kind == kKindInteger ? threes : nullptr, kAll, kAll});
    for (const float& one : inverses) all.push_back({Factors::kInverse, &one, nullptr, kAll, kAll});
    all.push_back({Factors::kEach, each.data(), zeros.data()});
    all.push_back({Factors::kEach, each.data(), nullptr});
    for (int64_t width : {16, 32, 64}) all.push_back({Factors::kBlocks, each.data(), zeros.data(), width, width});
    all.push_back({Factors::kBlocks, each.data() + 3, nullptr, 16, 48});
    all.push_back({Factors::kBlocks, each.data(), zeros.data(), 100000, 128});
    return all;
}

// Those of the elements from `at` on, if each has its own.
Factors factors_from(Factors f, int64_t at) {
    if (f.mode == Factors::kEach) {
        f.each += at;
        if (f.zeros) f.zeros += at;
    }
    return f;
}

void test_encode(const char* isa, const Lines& lines, const Input& in, const FormatParams& f) {
    std::vector<float> each(static_cast<size_t>(in.count)), zeros(each.size());
    std::vector<uint16_t> noise(each.size());
    for (uint16_t& r : noise) r = static_cast<uint16_t>(random_bits());
    std::vector<uint8_t> got(each.size()), wanted(each.size());
    int mode = 0;
    for (const Factors& factor : factors(f, each, zeros)) {
        for (int flags = 0; flags < 4; ++flags, ++mode) {
            if (f.kind == kKindCodebook && flags & 1) continue;
            const Encoder e = make_encoder(f, flags & 2, flags & 1);
            // From an odd start with every small count in turn, then the rest at once.
            int64_t at = 0;
            for (int64_t n = 1; at < in.count; at += n, n = n < 40 ? n + 1 : in.count - at) {
                const Factors part = factors_from(factor, at);
                const void* x = advance(in.words.data(), at, in.dtype);
                lines.encode(e, x, in.dtype, n, part, noise.data() + at, x, got.data() + at);
                lines_scalar().encode(e, x, in.dtype, n, part, noise.data() + at, x, wanted.data() + at);
            }
            expect(got == wanted, isa, "encode", f, in.dtype, mode);
        }
    }
}

// The same where elements are finite and factors positive, and may be taken for it; by reciprocals, which are those of
// powers of two and multiplied with, or correct the quotient by plain scales.
void test_encode_finite(const char* isa, const Lines& lines, Input in, const FormatParams& f) {
    for (uint32_t& word : in.words) {
        if (in.dtype == Dtype::kFloat32) {
            word &= is_nan(word) || (word & kMagnitude) == kInf ? kSign : ~0u;
        } else {
            const uint32_t inf = in.dtype == Dtype::kBFloat16 ? 0x7f80u : 0x7c00u;
            for (uint32_t half : {0u, 16u}) {
                if ((word >> half & inf) == inf) word &= ~(0x7fffu << half);
            }
        }
    }
    const size_t count = static_cast<size_t>(in.count);
    // Plain: below 2, elements have quotients below 2^64 by any.
    std::vector<uint32_t> small = in.words;
    for (uint32_t& word : small)
        word &= in.dtype == Dtype::kFloat16 ? ~0u : in.dtype == Dtype::kFloat32 ? ~0x40000000u : ~0x40004000u;
    const uint32_t least = in.dtype == Dtype::kFloat16 ? 127 - 47 : 127 - 63;
    std::vector<float> scales(count), reciprocals(count), inverses(count), zeros(count);
    std::vector<uint16_t> noise(count);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t field = static_cast<uint32_t>(1 + random_bits() % 0xfd) << 23;
        const uint32_t near =
            static_cast<uint32_t>(i % 3 ? 107 + random_bits() % 24 : least + random_bits() % (252 - least));
        scales[i] = i % 9 == 0 ? 0.0f : float_of(near << 23 | static_cast<uint32_t>(random_bits() & 0x7fffff));
        reciprocals[i] = i % 9 == 0 ? 0.0f : 1.0f / scales[i];
        inverses[i] = float_of(field);
        zeros[i] = f.kind != kKindInteger ? 0.0f : static_cast<float>(f.qmin + static_cast<int>(random_bits() % 16));
        noise[i] = static_cast<uint16_t>(random_bits());
    }
    std::vector<uint8_t> got(count), wanted(count);
    for (int flags = 0; flags < 4; ++flags) {
        const bool inverse = flags & 1, stochastic = flags & 2;
        if (f.kind == kKindCodebook && stochastic) continue;
        const Encoder e = make_encoder(f, true, stochastic);
        if (!inverse && !e.coarse) continue;
        const void* x = inverse ? in.words.data() : small.data();
        for (int64_t width : {16, 32, 48, 64, 128, 1 << 20}) {
            const Factors factor{inverse ? Factors::kInverse : Factors::kReciprocal,
                                 (inverse ? inverses : scales).data(),
                                 inverse ? nullptr : zeros.data(),
                                 width,
                                 width,
                                 true,
                                 reciprocals.data()};
            lines.encode(e, x, in.dtype, in.count, factor, noise.data(), x, got.data());
            lines_scalar().encode(e, x, in.dtype, in.count, factor, noise.data(), nullptr, wanted.data());
            expect(got == wanted, isa, "encode of finite", f, in.dtype, static_cast<int>(width));
            if (inverse || stochastic) continue;
            lines.in_range(e, x, in.dtype, in.count, factor, x, got.data());
            lines_scalar().in_range(e, x, in.dtype, in.count, factor, x, wanted.data());
            expect(got == wanted, isa, "in_range of finite", f, in.dtype, static_cast<int>(width));
        }
    }
}

// Quotients by way of reciprocals are those of division: every significand (one in `share`) by some scales, among them
// the ends of the binade and those whose reciprocals lie furthest from their rounded ones.
void test_reciprocals(const char* isa, const Lines& lines, int share) {
    constexpr int64_t kCount = 1 << 12;
    std::vector<uint32_t> significands{0, 1, 2, 3, 0x400000u, 0x3fffffu, 0x7fffffu, 0x7ffffeu, 0x7ffffdu, 0x7ffffcu};
    for (int i = 0; i < 8; ++i) significands.push_back(static_cast<uint32_t>(random_bits() & 0x7fffff));
    for (int i = 0; i < 8; ++i) {
        double furthest = -1.0;
        uint32_t found = 0;
        for (int j = 0; j < 1000; ++j) {
            const uint32_t s = static_cast<uint32_t>(random_bits() & 0x7fffff);
            const float scale = float_of(kOne | s);
            const double error = std::abs(1.0 / static_cast<double>(scale) - static_cast<double>(1.0f / scale));
            if (error > furthest) furthest = error, found = s;
        }
        significands.push_back(found);
    }
    std::vector<uint32_t> x(kCount);
    std::vector<float> got(kCount);
    for (uint32_t s : significands) {
        const float scale = float_of(s | static_cast<uint32_t>(64 + random_bits() % 188) << 23), inverse = 1.0f / scale;
        const uint32_t field =
            (bits_of(scale) & ~0x7fffffu) + (static_cast<uint32_t>(random_bits() % 32) << 23) - (16u << 23);
        const Factors factor{Factors::kReciprocal, &scale, nullptr, kCount, kCount, true, &inverse};
        bool same = true;
        for (uint32_t begin = 0; begin < 0x800000u; begin += kCount * static_cast<uint32_t>(share)) {
            for (uint32_t i = 0; i < kCount; ++i) x[i] = (begin + i) | std::min(field, 0x7f000000u);
            lines.quotients(x.data(), Dtype::kFloat32, kCount, factor, got.data());
            for (uint32_t i = 0; i < kCount; ++i) same &= got[i] == float_of(x[i]) / scale;
        }
        expect(same, isa, "quotients by reciprocals", {}, {}, static_cast<int>(s));
    }
}

void test_in_range(const char* isa, const Lines& lines, const Input& in, const FormatParams& f) {
    std::vector<float> each(static_cast<size_t>(in.count)), zeros(each.size()), v(each.size()), v_wanted(each.size());
    std::vector<uint8_t> got(each.size()), wanted(each.size());
    const Encoder e = make_encoder(f, true, false);
    int mode = 0;
    for (const Factors& factor : factors(f, each, zeros)) {
        const void* x = in.words.data();
        lines.in_range(e, x, in.dtype, in.count, factor, x, got.data());
        lines_scalar().in_range(e, x, in.dtype, in.count, factor, x, wanted.data());
        expect(got == wanted, isa, "in_range", f, in.dtype, mode);
        lines.quotients(in.words.data(), in.dtype, in.count, factor, v.data());
        lines_scalar().quotients(in.words.data(), in.dtype, in.count, factor, v_wanted.data());
        bool same = true;
        for (size_t i = 0; i < v.size(); ++i) {
            same &= bits_of(v[i]) == bits_of(v_wanted[i]) || (is_nan(bits_of(v[i])) && is_nan(bits_of(v_wanted[i])));
        }
        expect(same, isa, "quotients", f, in.dtype, mode++);
    }
}

void test_decode(const char* isa, const Lines& lines, Dtype dtype, const FormatParams& f) {
    std::vector<uint8_t> codes(1001);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i & ((1u << f.bits) - 1));
    std::vector<float> each(codes.size()), zeros(codes.size());
    const Decoder decoder(f);
    int mode = 0;
    for (const Factors& factor : factors(f, each, zeros)) {
        if (factor.mode == Factors::kInverse) continue;
        std::vector<uint32_t> got(codes.size()), wanted(codes.size());
        for (int64_t n : {1, 3, 17, 1001}) {
            lines.decode(decoder, codes.data(), n, factor, got.data(), dtype);
            lines_scalar().decode(decoder, codes.data(), n, factor, wanted.data(), dtype);
            expect(got == wanted, isa, "decode", f, dtype, mode);
        }
        ++mode;
    }
}

void test_stats(const char* isa, const Lines& lines, const Input& in) {
    const FormatParams none{};
    const size_t count = static_cast<size_t>(in.count);
    for (bool affine : {false, true}) {
        for (int64_t block : {1, 3, 16, 20, 32, 64, 100, 128, 5000}) {
            std::vector<uint32_t> high(count), low(count), high_wanted(count), low_wanted(count);
            lines.block_stats(in.words.data(), in.dtype, in.count, block, affine, high.data(), low.data());
            lines_scalar().block_stats(in.words.data(), in.dtype, in.count, block, affine, high_wanted.data(),
                                       low_wanted.data());
            // A NaN's payload is free, so long as it stays above Inf.
            for (auto* v : {&high, &low, &high_wanted, &low_wanted}) {
                for (uint32_t& m : *v) m = m > kInf ? kNan : m;
            }
            expect(high == high_wanted && low == low_wanted, isa, "block_stats", none, in.dtype,
                   static_cast<int>(block));
            if (block != 1) continue;
            std::vector<uint32_t> top(count), bottom(count);
            lines.column_stats(in.words.data(), in.dtype, in.count, affine, top.data(), bottom.data());
            for (auto* v : {&top, &bottom}) {
                for (uint32_t& m : *v) m = m > kInf ? kNan : m;
            }
            expect(top == high && bottom == low, isa, "column_stats", none, in.dtype, affine);
        }
    }
    for (int64_t n : {int64_t{5}, int64_t{100}, in.count}) {
        expect(
            lines.finite_amax(in.words.data(), in.dtype, n) == lines_scalar().finite_amax(in.words.data(), in.dtype, n),
            isa, "finite_amax", none, in.dtype, static_cast<int>(n));
    }
}

// Scales from maxima of every kind, and the numbers that every stored scale stands for.
void test_scales(const char* isa, const Lines& lines) {
    constexpr size_t kCount = 4099, kRoom = kCount + kAlign;
    const FormatParams none{};
    std::vector<uint32_t> high = samples(kRoom).words, low = samples(kRoom).words;
    for (size_t i = 0; i < kRoom; ++i) {
        high[i] &= kMagnitude, low[i] &= kMagnitude;
        if (i % 3 == 0) high[i] = low[i] = 0;
        if (i % 7 == 0) high[i] >>= random_bits() % 31;
    }
    const float outers[] = {1.0f, 2.5e-4f, 1e-38f, 3e38f};
    for (int scale_format = kScaleFp32; scale_format <= kScaleE4m3; ++scale_format) {
        for (int flags = 0; flags < 8; ++flags) {
            const bool ceil = flags & 1, affine = (flags & 2) && scale_format != kScaleE4m3, is_signed = flags & 4;
            for (int o = -1; o < 4; ++o) {
                if (affine && o >= 0) continue;  // no scheme has both
                const float* outer = o < 0 ? nullptr : outers + o;
                const ScaleRule rule{bits_of(affine ? 255.0f : 28.0f),
                                     bits_of(90000.0f),
                                     is_signed ? -128.0f : 0.0f,
                                     is_signed ? 127.0f : 255.0f,
                                     scale_format,
                                     ceil,
                                     affine,
                                     is_signed};
                const int bytes = scale_bytes(scale_format);
                struct Result {
                    std::vector<uint8_t> stored = std::vector<uint8_t>(4 * kCount),
                                         zeros = std::vector<uint8_t>(kCount);
                    std::vector<float> value = std::vector<float>(kRoom), divisor = value, inverse = value,
                                       zero = value;
                    bool plain = false;
                    bool operator==(const Result& b) const {
                        bool same = stored == b.stored && zeros == b.zeros && plain == b.plain;
                        for (size_t i = 0; i < kCount; ++i) {
                            for (auto part : {&Result::value, &Result::divisor, &Result::inverse}) {
                                const uint32_t x = bits_of((this->*part)[i]), y = bits_of((b.*part)[i]);
                                same &= x == y || (is_nan(x) && is_nan(y));
                            }
                            same &= zero[i] == b.zero[i];
                        }
                        return same;
                    }
                } got, wanted, read, read_wanted;
                auto make = [&](const Lines& l, Result& r) {
                    r.plain =
                        l.make_scales(high.data(), low.data(), kCount, rule, outer, r.stored.data(), r.zeros.data(),
                                      {r.value.data(), r.divisor.data(), r.inverse.data(), r.zero.data()});
                };
                make(lines, got);
                make(lines_scalar(), wanted);
                expect(got == wanted, isa, "make_scales", none, {}, scale_format * 100 + flags * 10 + o);
                std::vector<uint8_t> any(kCount * static_cast<size_t>(bytes));
                for (uint8_t& b : any) b = static_cast<uint8_t>(random_bits());
                auto from = [&](const Lines& l, Result& r) {
                    l.read_scales(any.data(), any.data(), kCount, rule, outer,
                                  {r.value.data(), r.divisor.data(), r.inverse.data(), r.zero.data()});
                };
                from(lines, read);
                from(lines_scalar(), read_wanted);
                expect(read == read_wanted, isa, "read_scales", none, {}, scale_format * 100 + flags * 10 + o);
            }
        }
    }
}

void test_noise_and_packing(const char* isa, const Lines& lines) {
    const FormatParams none{};
    std::vector<uint16_t> got(8 * 300), wanted(8 * 300);
    for (uint64_t block : {uint64_t{0}, uint64_t{0xfffffffe}, (~uint64_t{0} >> 3) - 5}) {
        for (int64_t n : {1, 7, 300}) {
            const Rng rng{random_bits(), static_cast<uint32_t>(random_bits()), static_cast<uint32_t>(random_bits()), 0,
                          0};
            lines.noise(block, n, rng, got.data());
            lines_scalar().noise(block, n, rng, wanted.data());
            expect(std::memcmp(got.data(), wanted.data(), static_cast<size_t>(n) * 16) == 0, isa, "noise", none, {}, 0);
        }
    }
    std::vector<uint8_t> codes(8 * 50), packed(codes.size()), packed_wanted(codes.size()), back(codes.size());
    for (int bits = 1; bits <= 7; ++bits) {
        for (uint8_t& c : codes) c = static_cast<uint8_t>(random_bits() & ((1u << bits) - 1));
        for (int64_t groups : {1, 2, 3, 50}) {
            lines.pack(codes.data(), groups, bits, packed.data());
            lines_scalar().pack(codes.data(), groups, bits, packed_wanted.data());
            lines.unpack(packed.data(), groups, bits, back.data());
            expect(packed == packed_wanted, isa, "pack", none, {}, bits);
            expect(std::memcmp(back.data(), codes.data(), static_cast<size_t>(8 * groups)) == 0, isa, "unpack", none,
                   {}, bits);
        }
    }
}

// Parameters of one input with gradients of another, moments of every code; NaN of moments need not have the same bits.
void test_adamw(const char* isa, const Lines& lines, const Input& params, const Input& grads) {
    const AdamWFactors step{0.999f, 0.1f, 0.999f, 0.001f, 1.7f, 1e-8f, 3e-3f};
    const Decoder decoders[] = {Decoder(kFormats[kIndex_fp8_e4m3].params), Decoder(kFormats[kIndex_fp8_e5m2].params),
                                Decoder(kFormats[kIndex_int8].params)};
    const int64_t count = std::min(params.count, grads.count) / 4;
    const size_t size = static_cast<size_t>(count);
    std::vector<uint8_t> codes(2 * size);
    std::vector<float> each(2 * size);
    for (size_t i = 0; i < 2 * size; ++i) {
        codes[i] = static_cast<uint8_t>(random_bits());
        each[i] = float_of(static_cast<uint32_t>(random_bits() % 0x7f900000u));
    }
    // Blocks of whole vectors, of others, one; of both moments the same or not.
    const int64_t blocks[][2] = {{256, 256}, {64, 32}, {48, 256}, {1 << 20, 1 << 20}, {20, 64}};
    int which = 0;
    for (const auto& block : blocks) {
        std::vector<uint32_t> made[2], high[2];
        std::vector<float> moments[2];
        const Decoder &avg = decoders[which % 2], &rms = decoders[which == 4 ? 2 : 0];
        for (size_t k = 0; k < 2; ++k) {
            made[k].resize(size), high[k].resize(2 * size), moments[k].resize(2 * size);
            const Lines& by = k == 0 ? lines : lines_scalar();
            for (int64_t at = 0, n = 1; at < count; at += n, n = n < 70 ? n + 1 : count - at) {
                const auto line = [&](const Decoder& decoder, int64_t from, int64_t width) {
                    const bool whole = width % kAlign == 0;
                    const Factors by_block{whole ? Factors::kBlocks : Factors::kEach, each.data() + from, nullptr,
                                           width, width};
                    return MomentLine{decoder,
                                      codes.data() + from,
                                      by_block,
                                      width,
                                      moments[k].data() + from,
                                      high[k].data() + from,
                                      codes.data() + from};
                };
                const void* x = advance(params.words.data(), at, params.dtype);
                by.adamw(step, x, params.dtype, advance(grads.words.data(), at, grads.dtype), grads.dtype, n,
                         line(avg, at, block[0]), line(rms, count + at, block[1]),
                         advance(made[k].data(), at, params.dtype), x);
            }
        }
        bool same = made[0] == made[1];
        for (size_t i = 0; i < 2 * size; ++i) {
            const uint32_t a = bits_of(moments[0][i]), b = bits_of(moments[1][i]);
            same &= a == b || (is_nan(a) && is_nan(b));
            same &= high[0][i] == high[1][i] || (is_nan(high[0][i]) && is_nan(high[1][i]));
        }
        expect(same, isa, "adamw", {}, params.dtype, 10 * static_cast<int>(grads.dtype) + which++);
    }
}

}  // namespace

// An argument of N takes one fp32 sample in N, for emulators.
int main(int argc, char** argv) {
    const FloatEnvironment environment;
    const int share = argc > 1 ? std::atoi(argv[1]) : 1;
    std::vector<Input> inputs{all_patterns(Dtype::kBFloat16), all_patterns(Dtype::kFloat16), samples(200000 / share)};
    for (const std::string& name : isas()) {
        if (name == "scalar") continue;
        force_isa(name);
        const Lines& lines = cpu::lines();
        const long failed = failures, compared = comparisons;
        for (const FormatParams& f : formats()) {
            for (const Input& in : inputs) {
                if (f.kind != kKindExponent) test_encode(name.c_str(), lines, in, f);
                if (f.kind != kKindExponent) test_encode_finite(name.c_str(), lines, in, f);
                if (f.kind != kKindExponent) test_in_range(name.c_str(), lines, in, f);
                test_decode(name.c_str(), lines, in.dtype, f);
            }
        }
        for (const Input& in : inputs) test_stats(name.c_str(), lines, in);
        for (const Input& params : inputs) {
            for (const Input& grads : inputs) test_adamw(name.c_str(), lines, params, grads);
        }
        test_reciprocals(name.c_str(), lines, share);
        test_scales(name.c_str(), lines);
        test_noise_and_packing(name.c_str(), lines);
        std::printf("%s: %ld comparisons with the scalar code, %ld differ\n", name.c_str(), comparisons - compared,
                    failures - failed);
    }
    return failures == 0 ? 0 : 1;
}
