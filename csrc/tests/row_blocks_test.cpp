// The part of row_kernels_test.cpp that is about blocks and runs rather than single elements.
#include <algorithm>

#include "row_inputs.h"

namespace lowbit::cpu::test {

void test_stats(const char* isa, const RowKernels& kernels, const Input& in) {
    const FormatParams none{};
    const size_t count = static_cast<size_t>(in.count);
    for (bool affine : {false, true}) {
        for (int64_t block : {1, 3, 16, 20, 32, 64, 100, 128, 5000}) {
            std::vector<uint32_t> high(count), low(count), high_wanted(count), low_wanted(count);
            kernels.block_stats(in.words.data(), in.dtype, in.count, block, affine, high.data(), low.data());
            row_kernels_scalar().block_stats(in.words.data(), in.dtype, in.count, block, affine, high_wanted.data(),
                                             low_wanted.data());
            // A NaN's payload is free, so long as it stays above Inf.
            for (auto* v : {&high, &low, &high_wanted, &low_wanted}) {
                for (uint32_t& m : *v) m = m > kInf ? kNan : m;
            }
            expect(high == high_wanted && low == low_wanted, isa, "block_stats", none, in.dtype,
                   static_cast<int>(block));
            if (block != 1) continue;
            std::vector<uint32_t> top(count), bottom(count);
            kernels.column_stats(in.words.data(), in.dtype, in.count, affine, top.data(), bottom.data());
            for (auto* v : {&top, &bottom}) {
                for (uint32_t& m : *v) m = m > kInf ? kNan : m;
            }
            expect(top == high && bottom == low, isa, "column_stats", none, in.dtype, affine);
        }
    }
    for (int64_t n : {int64_t{5}, int64_t{100}, in.count}) {
        expect(kernels.finite_amax(in.words.data(), in.dtype, n) ==
                   row_kernels_scalar().finite_amax(in.words.data(), in.dtype, n),
               isa, "finite_amax", none, in.dtype, static_cast<int>(n));
    }
}

// Scales from maxima of every kind, and the numbers that every stored scale stands for.
void test_scales(const char* isa, const RowKernels& kernels) {
    constexpr size_t kCount = 4099, kRoom = kCount + kAlign;
    const FormatParams none{};
    std::vector<uint32_t> high = samples(kRoom).words, low = samples(kRoom).words;
    for (size_t i = 0; i < kRoom; ++i) {
        high[i] &= kMagnitude, low[i] &= kMagnitude;
        if (i % 3 == 0) high[i] = low[i] = 0;
        if (i % 7 == 0) high[i] >>= random_bits() % 31;
    }
    const float global_scales[] = {1.0f, 2.5e-4f, 1e-38f, 3e38f, 0.0f, -2.5e-4f, float_of(kNan | kSign)};
    constexpr int kGlobalScales = sizeof(global_scales) / sizeof(*global_scales);
    for (int scale_format = kScaleFp32; scale_format <= kScaleE4m3; ++scale_format) {
        for (int flags = 0; flags < 16; ++flags) {
            const bool ceil = flags & 1, affine = (flags & 2) && scale_format != kScaleE4m3, is_signed = flags & 4;
            const bool full = (flags & 8) && !affine && scale_format != kScaleE8m0;
            for (int o = -1; o < kGlobalScales; ++o) {
                if (affine && o >= 0) continue;  // no scheme has both
                const float* global_scale = o < 0 ? nullptr : global_scales + o;
                ScaleRule rule = {};
                rule.divisor = bits_of(affine ? 255.0f : flags & 8 ? 0.25f : 28.0f);
                rule.global_scale_divisor = bits_of(90000.0f);
                rule.zero_scale = affine || is_signed ? kOne : 0u;  // integers have a zero, and so never 0
                rule.raise_above = ceil ? rule.divisor & 0x7fffffu : is_signed ? 0x680000u : 0x7fffffu;
                rule.zero_scale = affine || is_signed ? kOne : 0u;  // formats with zero points have a zero
                rule.qmin = is_signed ? -128.0f : 0.0f;
                rule.qmax = is_signed ? 127.0f : 255.0f;
                rule.scale_format = scale_format;
                rule.ceil = ceil;
                rule.affine = affine;
                rule.full = full;
                rule.both_ends = affine || full;
                rule.is_signed = is_signed;
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
                auto make = [&](const RowKernels& l, Result& r) {
                    r.plain = l.make_scales(high.data(), low.data(), kCount, rule, global_scale, r.stored.data(),
                                            r.zeros.data(),
                                            {r.value.data(), r.divisor.data(), r.inverse.data(), r.zero.data()});
                };
                make(kernels, got);
                make(row_kernels_scalar(), wanted);
                expect(got == wanted, isa, "make_scales", none, {}, scale_format * 100 + flags * 10 + o);
                std::vector<uint8_t> any(kCount * static_cast<size_t>(bytes));
                for (uint8_t& b : any) b = static_cast<uint8_t>(random_bits());
                auto from = [&](const RowKernels& l, Result& r) {
                    r.plain = l.read_scales(any.data(), any.data(), kCount, rule, global_scale,
                                            {r.value.data(), r.divisor.data(), r.inverse.data(), r.zero.data()});
                };
                from(kernels, read);
                from(row_kernels_scalar(), read_wanted);
                expect(read == read_wanted, isa, "read_scales", none, {}, scale_format * 100 + flags * 10 + o);
            }
        }
    }
}

void test_noise_and_packing(const char* isa, const RowKernels& kernels) {
    const FormatParams none{};
    std::vector<uint16_t> got(8 * 300), wanted(8 * 300);
    for (uint64_t block : {uint64_t{0}, uint64_t{0xfffffffe}, (~uint64_t{0} >> 3) - 5}) {
        for (int64_t n : {1, 7, 300}) {
            const Rng rng{random_bits(), static_cast<uint32_t>(random_bits()), static_cast<uint32_t>(random_bits()), 0,
                          0};
            kernels.noise(block, n, rng, got.data());
            row_kernels_scalar().noise(block, n, rng, wanted.data());
            expect(std::memcmp(got.data(), wanted.data(), static_cast<size_t>(n) * 16) == 0, isa, "noise", none, {}, 0);
        }
    }
    std::vector<uint8_t> codes(8 * 50), packed(codes.size()), packed_wanted(codes.size()), back(codes.size());
    for (int bits = 1; bits <= 7; ++bits) {
        for (uint8_t& c : codes) c = static_cast<uint8_t>(random_bits() & ((1u << bits) - 1));
        for (int64_t groups : {1, 2, 3, 50}) {
            kernels.pack(codes.data(), groups, bits, packed.data());
            row_kernels_scalar().pack(codes.data(), groups, bits, packed_wanted.data());
            kernels.unpack(packed.data(), groups, bits, back.data());
            expect(packed == packed_wanted, isa, "pack", none, {}, bits);
            expect(std::memcmp(back.data(), codes.data(), static_cast<size_t>(8 * groups)) == 0, isa, "unpack", none,
                   {}, bits);
        }
    }
}

namespace {

// Moments of a step: any codes of two formats, or numbers.
struct Moments {
    Decoder decoders[2];
    int64_t block[2];
    bool coded;
};

// What a step leaves, of one instruction set.
struct Stepped {
    std::vector<uint32_t> params, high[2];
    std::vector<float> numbers[2];  // of NaN any

    bool operator==(const Stepped& b) const {
        bool same = params == b.params;
        for (int k = 0; k < 2; ++k) {
            for (size_t i = 0; i < numbers[k].size(); ++i) {
                const uint32_t x = bits_of(numbers[k][i]), y = bits_of(b.numbers[k][i]);
                same &= x == y || (is_nan(x) && is_nan(y));
                same &= high[k][i] == b.high[k][i] || (is_nan(high[k][i]) && is_nan(b.high[k][i]));
            }
        }
        return same;
    }
};

// In parts of every small size, then the rest at once. `codes` and `from`: of both moments, one after the other.
Stepped stepped(const RowKernels& kernels, const StepRule& rule, const Input& params, const Input& grads, int64_t count,
                const Moments& moments, const std::vector<uint8_t>& codes, const std::vector<float>& each,
                const std::vector<float>& from) {
    const size_t size = static_cast<size_t>(count);
    Stepped made{std::vector<uint32_t>(size), {}, {}};
    for (int k = 0; k < 2; ++k) made.high[k].resize(size), made.numbers[k].resize(size);
    for (int64_t at = 0, n = 1; at < count; at += n, n = n < 70 ? n + 1 : count - at) {
        const void* x = advance(params.words.data(), at, params.dtype);
        StepRow row{x,
                    params.dtype,
                    advance(grads.words.data(), at, grads.dtype),
                    grads.dtype,
                    n,
                    advance(made.params.data(), at, params.dtype),
                    x,
                    {}};
        for (int k = 0; k < 2; ++k) {
            const int64_t width = moments.block[k], first = k * count + at;
            MomentRow& m = row.moments[k];
            m = {nullptr, from.data() + first, made.numbers[k].data() + at};
            if (!moments.coded) continue;
            const bool whole = width % kAlign == 0;
            m.decoder = &moments.decoders[k], m.from = nullptr;
            m.codes = m.ahead = codes.data() + first;
            m.factors = {whole ? Factors::kBlocks : Factors::kEach, each.data() + first, nullptr, width, width};
            m.block = width, m.high = made.high[k].data() + at;
        }
        kernels.step(rule, row);
    }
    return made;
}

}  // namespace

// Parameters of one input with gradients of another, by every rule, and moments of every code, or numbers.
void test_step(const char* isa, const RowKernels& kernels, const Input& params, const Input& grads) {
    if (grads.dtype != params.dtype && grads.dtype != Dtype::kFloat32) return;
    const int64_t count = std::min(params.count, grads.count) / 4;
    const size_t size = static_cast<size_t>(count);
    std::vector<uint8_t> codes(2 * size);
    std::vector<float> numbers(2 * size), factors[2];  // any, and those that leave room above up to its limit; some 0
    for (size_t i = 0; i < 2 * size; ++i) {
        codes[i] = static_cast<uint8_t>(random_bits());
        numbers[i] = float_of(static_cast<uint32_t>(random_bits()));
        const uint32_t any = static_cast<uint32_t>(random_bits() % 0x7f900000u);
        factors[0].push_back(float_of(i % 17 == 0 ? 0 : any));
        factors[1].push_back(float_of(i % 19 == 0 ? 0 : i % 5 == 0 ? 0x7b7fffffu : 1u + any % 0x7b7fffffu));
    }
    const FormatParams &e4m3 = kFormats[kIndex_fp8_e4m3].params, &e5m2 = kFormats[kIndex_fp8_e5m2].params,
                       &int8 = kFormats[kIndex_int8].params;
    // Blocks of whole vectors, of others, one; of both moments the same or not. Numbers.
    const Moments all[] = {
        {{Decoder(e4m3), Decoder(e4m3)}, {256, 256}, true}, {{Decoder(e5m2), Decoder(e4m3)}, {64, 32}, true},
        {{Decoder(e4m3), Decoder(e4m3)}, {48, 256}, true},  {{Decoder(e5m2), Decoder(e4m3)}, {1 << 20, 1 << 20}, true},
        {{Decoder(e4m3), Decoder(int8)}, {20, 64}, true},   {{Decoder(e4m3), Decoder(e4m3)}, {1, 1}, false},
    };
    const StepRule rules[] = {{RuleId::adamw, {0.999f, 0.1f, 0.999f, 0.001f, 1.7f, 1e-8f, 3e-3f}},
                              {RuleId::lion, {0.999f, 0.1f, 0.01f, 1e-3f}},
                              {RuleId::sgd, {0.999f, 0.01f, 0.1f}},
                              {RuleId::momentum, {0.01f, 0.9f, 0.7f, 0.3f, 0.9f, 0.1f}}};
    for (const StepRule& rule : rules) {
        for (const Moments& moments : all) {
            for (const std::vector<float>& each : factors) {
                const auto by = [&](const RowKernels& k) {
                    return stepped(k, rule, params, grads, count, moments, codes, each, numbers);
                };
                expect(by(kernels) == by(row_kernels_scalar()), isa, "step", {}, params.dtype,
                       10 * static_cast<int>(rule.id) + static_cast<int>(&moments - all));
            }
        }
    }
}

// Every pattern to 24 bits and back, and to 16 bits, in parts of every small size.
void test_weights(const char* isa, const RowKernels& kernels, const Input& in) {
    const size_t size = static_cast<size_t>(in.count);
    std::vector<uint16_t> noise(size);
    std::vector<int8_t> low(size);
    std::vector<float> factors(size);
    for (size_t i = 0; i < size; ++i)
        factors[i] = float_of(random_bits() & ~(1u << 30)), noise[i] = static_cast<uint16_t>(random_bits()),
        low[i] = static_cast<int8_t>(noise[i]);
    struct Kept {
        std::vector<float> wide, joined, product, products;
        std::vector<uint16_t> nearest, random, high;
        std::vector<int8_t> low;
        explicit Kept(size_t n) : wide(n), joined(n), product(n), products(n), nearest(n), random(n), high(n), low(n) {}
    };
    const auto by = [&](const RowKernels& k) {
        Kept kept(size);
        for (int64_t at = 0, n = 1; at < in.count; at += n, n = n < 40 ? n + 1 : in.count - at) {
            float* wide = kept.wide.data() + at;
            k.widen(advance(in.words.data(), at, in.dtype), in.dtype, n, wide);
            k.product(advance(in.words.data(), at, in.dtype), in.dtype, n, 0.7f, nullptr, kept.product.data() + at);
            k.product(advance(in.words.data(), at, in.dtype), in.dtype, n, 0.0f, factors.data() + at,
                      kept.products.data() + at);
            k.narrow(wide, in.dtype == Dtype::kFloat16 ? Dtype::kFloat16 : Dtype::kBFloat16, n, nullptr,
                     kept.nearest.data() + at);
            k.narrow(wide, Dtype::kBFloat16, n, noise.data() + at, kept.random.data() + at);
            k.split24(wide, n, kept.high.data() + at, kept.low.data() + at);
            k.join24(kept.nearest.data() + at, low.data() + at, n, kept.joined.data() + at);
        }
        return kept;
    };
    const Kept got = by(kernels), wanted = by(row_kernels_scalar());
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
        for (size_t i = 0; i < a.size(); ++i) {
            if (bits_of(a[i]) != bits_of(b[i]) && !(is_nan(bits_of(a[i])) && is_nan(bits_of(b[i])))) return false;
        }
        return true;
    };
    expect(same(got.wide, wanted.wide), isa, "widen", {}, in.dtype, 0);
    expect(same(got.product, wanted.product), isa, "product", {}, in.dtype, 0);
    expect(same(got.products, wanted.products), isa, "product", {}, in.dtype, 1);
    expect(got.nearest == wanted.nearest, isa, "narrow", {}, in.dtype, 0);
    expect(got.random == wanted.random, isa, "narrow", {}, in.dtype, 1);
    expect(got.high == wanted.high && got.low == wanted.low, isa, "split24", {}, in.dtype, 0);
    expect(same(got.joined, wanted.joined), isa, "join24", {}, in.dtype, 0);
}

}  // namespace lowbit::cpu::test
