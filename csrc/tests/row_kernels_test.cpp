// Holds every instruction set's row kernels against the scalar code, bit for bit; needs neither torch nor Python.
//
// All 65,536 bf16 and fp16 patterns, and fp32 samples crowded around what rounds differently: every format of the table
// and some custom ones, both roundings, saturating or not, every kind of factor, every output type.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "row_inputs.h"

using namespace lowbit;
using namespace lowbit::cpu;
using namespace lowbit::cpu::test;

namespace {

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
    static const float three = 3.0f;  // of blocks without end
    constexpr int64_t kAll = int64_t{1} << 40;
    std::vector<Factors> all(1);
    for (const float& one : ones)
        all.push_back({Factors::kBlocks, &one, f.kind == kKindInteger ? &three : nullptr, kAll, kAll});
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

void test_encode(const char* isa, const RowKernels& kernels, const Input& in, const FormatParams& f) {
    std::vector<float> each(static_cast<size_t>(in.count)), zeros(each.size());
    std::vector<uint16_t> noise(each.size());
    for (uint16_t& r : noise) r = static_cast<uint16_t>(random_bits());
    std::vector<uint8_t> got(each.size()), wanted(each.size());
    int mode = 0;
    for (const Factors& factor : factors(f, each, zeros)) {
        for (int flags = 0; flags < 4; ++flags, ++mode) {
            const Encoder e = make_encoder(f, flags & 2, flags & 1);
            if (f.kind == kKindCodebook) expect(e.vector, isa, "no vector code", f, in.dtype, mode);
            // From an odd start with every small count in turn, then the rest at once.
            int64_t at = 0;
            for (int64_t n = 1; at < in.count; at += n, n = n < 40 ? n + 1 : in.count - at) {
                const Factors part = factors_from(factor, at);
                const void* x = advance(in.words.data(), at, in.dtype);
                kernels.encode(e, x, in.dtype, n, part, noise.data() + at, x, got.data() + at);
                row_kernels_scalar().encode(e, x, in.dtype, n, part, noise.data() + at, x, wanted.data() + at);
            }
            expect(got == wanted, isa, "encode", f, in.dtype, mode);
        }
    }
}

// The same where elements are finite and factors positive, and may be taken for it; by reciprocals, which are those of
// powers of two and multiplied with, or correct the quotient by plain scales. By the latter also any elements.
void test_encode_finite(const char* isa, const RowKernels& kernels, Input in, const FormatParams& f) {
    const std::vector<uint32_t> any = in.words;
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
    std::vector<float> scales(count), reciprocals(count), inverses(count), zeros(count), given(count), of_given(count);
    std::vector<uint16_t> noise(count);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t field = static_cast<uint32_t>(1 + random_bits() % 0xfd) << 23;
        const uint32_t near =
            static_cast<uint32_t>(i % 3 ? 107 + random_bits() % 24 : least + random_bits() % (252 - least));
        scales[i] = i % 9 == 0 ? 0.0f : float_of(near << 23 | static_cast<uint32_t>(random_bits() & 0x7fffff));
        reciprocals[i] = i % 9 == 0 ? 0.0f : 1.0f / scales[i];
        given[i] = scales[i] == 0.0f ? 1.5f : std::min(scales[i], kMostGiven), of_given[i] = 1.0f / given[i];
        inverses[i] = float_of(field);
        zeros[i] = f.kind != kKindInteger ? 0.0f : static_cast<float>(f.qmin + static_cast<int>(random_bits() % 16));
        noise[i] = static_cast<uint16_t>(random_bits());
    }
    std::vector<uint8_t> got(count), wanted(count);
    for (int flags = 0; flags < 8; ++flags) {
        const bool inverse = flags & 1, stochastic = flags & 2, finite = flags < 4;
        if (inverse && !finite) continue;
        const Encoder e = make_encoder(f, true, stochastic);
        if (!inverse && !e.coarse) continue;
        const void* x = (!finite ? any : inverse ? in.words : small).data();
        for (int64_t width : {16, 32, 48, 64, 128, 1 << 20}) {
            if (!finite && (width == 32 || width == 128)) continue;  // what blocks are read by is seen above
            const Factors factor{inverse ? Factors::kInverse : Factors::kReciprocal,
                                 (!finite   ? given
                                  : inverse ? inverses
                                            : scales)
                                     .data(),
                                 inverse ? nullptr : zeros.data(),
                                 width,
                                 width,
                                 finite,
                                 (finite ? reciprocals : of_given).data()};
            kernels.encode(e, x, in.dtype, in.count, factor, noise.data(), x, got.data());
            row_kernels_scalar().encode(e, x, in.dtype, in.count, factor, noise.data(), nullptr, wanted.data());
            expect(got == wanted, isa, finite ? "encode of finite" : "encode", f, in.dtype, static_cast<int>(width));
            if (inverse || stochastic) continue;
            kernels.in_range(e, x, in.dtype, in.count, factor, x, got.data());
            row_kernels_scalar().in_range(e, x, in.dtype, in.count, factor, x, wanted.data());
            expect(got == wanted, isa, finite ? "in_range of finite" : "in_range", f, in.dtype,
                   static_cast<int>(width));
            if (finite) continue;
            std::vector<float> v(count), v_wanted(count);
            kernels.quotients(x, in.dtype, in.count, factor, v.data());
            row_kernels_scalar().quotients(x, in.dtype, in.count, factor, v_wanted.data());
            bool same = true;
            for (size_t i = 0; i < count; ++i)
                same &= bits_of(v[i]) == bits_of(v_wanted[i]) || (v[i] != v[i] && v_wanted[i] != v_wanted[i]);
            expect(same, isa, "quotients", f, in.dtype, static_cast<int>(width));
        }
    }
}

// Quotients by way of reciprocals are those of division: every significand (one in `share`) by some scales, among them
// the ends of the binade and those whose reciprocals lie furthest from their rounded ones.
void test_reciprocals(const char* isa, const RowKernels& kernels, int share) {
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
            kernels.quotients(x.data(), Dtype::kFloat32, kCount, factor, got.data());
            for (uint32_t i = 0; i < kCount; ++i) same &= got[i] == float_of(x[i]) / scale;
        }
        expect(same, isa, "quotients by reciprocals", {}, {}, static_cast<int>(s));
    }
}

void test_in_range(const char* isa, const RowKernels& kernels, const Input& in, const FormatParams& f) {
    std::vector<float> each(static_cast<size_t>(in.count)), zeros(each.size()), v(each.size()), v_wanted(each.size());
    std::vector<uint8_t> got(each.size()), wanted(each.size());
    const Encoder e = make_encoder(f, true, false);
    int mode = 0;
    for (const Factors& factor : factors(f, each, zeros)) {
        const void* x = in.words.data();
        kernels.in_range(e, x, in.dtype, in.count, factor, x, got.data());
        row_kernels_scalar().in_range(e, x, in.dtype, in.count, factor, x, wanted.data());
        expect(got == wanted, isa, "in_range", f, in.dtype, mode);
        kernels.quotients(in.words.data(), in.dtype, in.count, factor, v.data());
        row_kernels_scalar().quotients(in.words.data(), in.dtype, in.count, factor, v_wanted.data());
        bool same = true;
        for (size_t i = 0; i < v.size(); ++i) {
            same &= bits_of(v[i]) == bits_of(v_wanted[i]) || (is_nan(bits_of(v[i])) && is_nan(bits_of(v_wanted[i])));
        }
        expect(same, isa, "quotients", f, in.dtype, mode++);
    }
}

void test_decode(const char* isa, const RowKernels& kernels, Dtype dtype, const FormatParams& f) {
    std::vector<uint8_t> codes(1001);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i & ((1u << f.bits) - 1));
    std::vector<float> each(codes.size()), zeros(codes.size());
    const Decoder decoder(f);
    std::vector<Factors> all = factors(f, each, zeros);
    // Several blocks none of whose factors is special.
    std::vector<float> moderate(codes.size());
    for (float& by : moderate) by = 0.001f * static_cast<float>(1 + random_bits() % 5000);
    for (int64_t width : {16, 32, 64, 128})
        all.push_back({Factors::kBlocks, moderate.data(), f.kind == kKindInteger ? zeros.data() : nullptr, 16, width});
    int mode = 0;
    for (const Factors& factor : all) {
        if (factor.mode == Factors::kInverse) continue;
        std::vector<uint32_t> got(codes.size()), wanted(codes.size());
        for (int64_t n : {1, 3, 17, 1001}) {
            kernels.decode(decoder, codes.data(), n, factor, got.data(), dtype);
            row_kernels_scalar().decode(decoder, codes.data(), n, factor, wanted.data(), dtype);
            expect(got == wanted, isa, "decode", f, dtype, mode);
        }
        ++mode;
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
        const RowKernels& kernels = cpu::row_kernels();
        const long failed = failures, compared = comparisons;
        for (const FormatParams& f : formats()) {
            for (const Input& in : inputs) {
                if (f.kind != kKindExponent) test_encode(name.c_str(), kernels, in, f);
                if (f.kind != kKindExponent) test_encode_finite(name.c_str(), kernels, in, f);
                if (f.kind != kKindExponent) test_in_range(name.c_str(), kernels, in, f);
                test_decode(name.c_str(), kernels, in.dtype, f);
            }
        }
        for (const Input& in : inputs) test_stats(name.c_str(), kernels, in);
        for (const Input& in : inputs) test_weights(name.c_str(), kernels, in);
        for (const Input& in : inputs) test_fused(name.c_str(), kernels, in);
        for (const Input& params : inputs) {
            for (const Input& grads : inputs) test_step(name.c_str(), kernels, params, grads);
        }
        test_reciprocals(name.c_str(), kernels, share);
        test_scales(name.c_str(), kernels);
        test_noise_and_packing(name.c_str(), kernels);
        std::printf("%s: %ld comparisons with the scalar code, %ld differ\n", name.c_str(), comparisons - compared,
                    failures - failed);
    }
    return failures == 0 ? 0 : 1;
}
