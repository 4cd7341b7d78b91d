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

// Parameters of one input with gradients of another, moments of every code; NaN of moments need not have the same bits.
void test_adamw(const char* isa, const RowKernels& kernels, const Input& params, const Input& grads) {
    const AdamWFactors step{0.999f, 0.1f, 0.999f, 0.001f, 1.7f, 1e-8f, 3e-3f};
    const Decoder decoders[] = {Decoder(kFormats[kIndex_fp8_e4m3].params), Decoder(kFormats[kIndex_fp8_e5m2].params),
                                Decoder(kFormats[kIndex_int8].params)};
    const int64_t count = std::min(params.count, grads.count) / 4;
    const size_t size = static_cast<size_t>(count);
    std::vector<uint8_t> codes(2 * size);
    std::vector<float> factors[2];  // any, and those that leave room above up to its limit; some are 0
    for (size_t i = 0; i < 2 * size; ++i) {
        codes[i] = static_cast<uint8_t>(random_bits());
        const uint32_t any = static_cast<uint32_t>(random_bits() % 0x7f900000u);
        factors[0].push_back(float_of(i % 17 == 0 ? 0 : any));
        factors[1].push_back(float_of(i % 19 == 0 ? 0 : i % 5 == 0 ? 0x7b7fffffu : 1u + any % 0x7b7fffffu));
    }
    // Blocks of whole vectors, of others, one; of both moments the same or not.
    const int64_t blocks[][2] = {{256, 256}, {64, 32}, {48, 256}, {1 << 20, 1 << 20}, {20, 64}};
    for (int which = 0; which < 10; ++which) {
        const auto& block = blocks[which / 2];
        const std::vector<float>& each = factors[which % 2];
        std::vector<uint32_t> made[2], high[2];
        std::vector<float> moments[2];
        const Decoder &avg = decoders[which / 2 % 2], &rms = decoders[which / 2 == 4 ? 2 : 0];
        for (size_t k = 0; k < 2; ++k) {
            made[k].resize(size), high[k].resize(2 * size), moments[k].resize(2 * size);
            const RowKernels& by = k == 0 ? kernels : row_kernels_scalar();
            for (int64_t at = 0, n = 1; at < count; at += n, n = n < 70 ? n + 1 : count - at) {
                const auto kernels = [&](const Decoder& decoder, int64_t from, int64_t width) {
                    const bool whole = width % kAlign == 0;
                    const Factors by_block{whole ? Factors::kBlocks : Factors::kEach, each.data() + from, nullptr,
                                           width, width};
                    return MomentRow{decoder,
                                     codes.data() + from,
                                     by_block,
                                     width,
                                     moments[k].data() + from,
                                     high[k].data() + from,
                                     codes.data() + from};
                };
                const void* x = advance(params.words.data(), at, params.dtype);
                by.adamw(step, x, params.dtype, advance(grads.words.data(), at, grads.dtype), grads.dtype, n,
                         kernels(avg, at, block[0]), kernels(rms, count + at, block[1]),
                         advance(made[k].data(), at, params.dtype), x);
            }
        }
        bool same = made[0] == made[1];
        for (size_t i = 0; i < 2 * size; ++i) {
            const uint32_t a = bits_of(moments[0][i]), b = bits_of(moments[1][i]);
            same &= a == b || (is_nan(a) && is_nan(b));
            same &= high[0][i] == high[1][i] || (is_nan(high[0][i]) && is_nan(high[1][i]));
        }
        expect(same, isa, "adamw", {}, params.dtype, 10 * static_cast<int>(grads.dtype) + which);
    }
}

}  // namespace lowbit::cpu::test
