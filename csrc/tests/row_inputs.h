// What the native tests of row kernels share: inputs, formats, and the count of what differs.
#pragma once

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "common/numerics.h"
#include "cpu/row_kernels.h"
#include "format_table.h"

namespace lowbit::cpu::test {

inline std::mt19937_64 random_bits(1);
inline long failures = 0, comparisons = 0;

struct Input {
    Dtype dtype;
    std::vector<uint32_t> words;  // fp32 bits, or two 16-bit numbers each
    int64_t count;
};

inline Input all_patterns(Dtype dtype) {
    Input in{dtype, std::vector<uint32_t>(32768), 65536};
    for (uint32_t i = 0; i < 32768; ++i) in.words[i] = (2 * i) | (2 * i + 1) << 16;
    return in;
}

// Any bit pattern; numbers with few significant bits (grid points and midpoints) and their neighbours; around 1.
inline Input samples(int64_t count) {
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

inline std::vector<FormatParams> formats() {
    std::vector<FormatParams> all;
    for (const FormatRow& row : kFormats) all.push_back(row.params);
    all.push_back({kKindFloat, 4, 2, 1, 3, 1, 7, -1, -1, -8, 7, -1});          // e2m1b3
    all.push_back({kKindFloat, 8, 3, 4, 3, 1, 127, -1, -1, -128, 127, -1});    // e3m4
    all.push_back({kKindFloat, 6, 3, 2, 3, 1, 30, -1, 31, -32, 31, -1});       // e3m2n
    all.push_back({kKindFloat, 8, 5, 2, 15, 1, 126, -1, 127, -128, 127, -1});  // e5m2n
    all.push_back({kKindFloat, 8, 4, 3, 17, 1, 126, -1, 127, -128, 127, -1});  // e4m3 below 1
    all.push_back({kKindFloat, 8, 7, 0, 1, 1, 127, -1, -1, -128, 127, -1});    // e7m0b1: to the end of fp32's range
    all.push_back({kKindFloat, 8, 4, 3, 7, 1, 119, 120, 127, -128, 127, -1});  // e4m3in
    all.push_back({kKindFloat, 2, 1, 0, 0, 1, 1, -1, -1, -2, 1, -1});          // e1m0
    return all;
}

inline void expect(bool same, const char* isa, const char* what, const FormatParams& f, Dtype dtype, int mode) {
    ++comparisons;
    if (same) return;
    if (++failures < 20) {
        std::printf("%s: %s differs: kind %d bits %d mantissa %d bias %d, dtype %d, mode %d\n", isa, what, f.kind,
                    f.bits, f.mantissa, f.bias, static_cast<int>(dtype), mode);
    }
}

// Of blocks and whole runs (row_blocks_test.cpp), for one instruction set: maxima; scales; random bits and packing;
// weights; steps of optimizers on parameters of one input with gradients of another.
void test_stats(const char* isa, const RowKernels& kernels, const Input& in);
void test_scales(const char* isa, const RowKernels& kernels);
void test_noise_and_packing(const char* isa, const RowKernels& kernels);
void test_step(const char* isa, const RowKernels& kernels, const Input& params, const Input& grads);
void test_weights(const char* isa, const RowKernels& kernels, const Input& in);
// Of norms, gates and rotations (row_fused_test.cpp).
void test_fused(const char* isa, const RowKernels& kernels, const Input& in);

}  // namespace lowbit::cpu::test
