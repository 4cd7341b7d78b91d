// In place of csrc/cuda/ptx.cuh: what the instructions do, by the register layouts of the PTX ISA (sections on ldmatrix
// and on mma.m16n8k16 / m16n8k32). Products are summed in fp64 and rounded once.
#pragma once

#include <cuda_runtime.h>

#include "common/numerics.h"
#include "format_table.h"

namespace lowbit {
namespace cuda {

template <int Bytes>
void copy_async(void* to, const uint8_t* from, int valid) {
    if (reinterpret_cast<uintptr_t>(to) % Bytes != 0 || reinterpret_cast<uintptr_t>(from) % Bytes != 0) {
        emulator::fail("misaligned cp.async");
    }
    std::memset(to, 0, Bytes);
    std::memcpy(to, from, static_cast<size_t>(valid));
}

inline void copy_wait() {}

inline void load_matrices(uint32_t (&r)[4], const void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulator::fail("misaligned ldmatrix");
    emulator::exchange({reinterpret_cast<uint64_t>(row)}, [&] {
        const unsigned lane = emulator::my_lane();
        for (unsigned i = 0; i < 4; ++i) {
            const char* from = reinterpret_cast<const char*>(emulator::lane(8 * i + lane / 4).slot[0]);
            std::memcpy(&r[i], from + lane % 4 * 4, 4);
        }
        return 0;
    });
}

// Byte `k` of row `row` of a, and of column `n` of b, among what the lanes offer: a0 a1 a2 a3 b0 b1.
inline uint32_t a_byte(unsigned row, unsigned k) {
    const uint64_t word = emulator::lane(row % 8 * 4 + k % 16 / 4).slot[(row >= 8) + 2 * (k >= 16)];
    return static_cast<uint32_t>(word >> (8 * (k % 4))) & 0xffu;
}
inline uint32_t b_byte(unsigned n, unsigned k) {
    const uint64_t word = emulator::lane(n * 4 + k % 16 / 4).slot[4 + (k >= 16)];
    return static_cast<uint32_t>(word >> (8 * (k % 4))) & 0xffu;
}

// c += a * b over `depth` elements, whose products `product(row, n, index)` gives.
template <class Acc, class Product>
void mma(Acc (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, unsigned depth, Product product) {
    emulator::exchange({a[0], a[1], a[2], a[3], b0, b1}, [&] {
        const unsigned lane = emulator::my_lane();
        for (unsigned e = 0; e < 4; ++e) {
            double sum = static_cast<double>(c[e]);
            for (unsigned k = 0; k < depth; ++k) sum += product(lane / 4 + 8 * (e / 2), lane % 4 * 2 + e % 2, k);
            c[e] = static_cast<Acc>(sum);
        }
        return 0;
    });
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma(c, a, b0, b1, 16, [](unsigned row, unsigned n, unsigned k) {
        const uint32_t x = (a_byte(row, 2 * k) | a_byte(row, 2 * k + 1) << 8) << 16;
        const uint32_t y = (b_byte(n, 2 * k) | b_byte(n, 2 * k + 1) << 8) << 16;
        return static_cast<double>(float_of(x)) * float_of(y);
    });
}

inline void mma_int8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma(c, a, b0, b1, 32, [](unsigned row, unsigned n, unsigned k) {
        return static_cast<double>(static_cast<int8_t>(a_byte(row, k))) * static_cast<int8_t>(b_byte(n, k));
    });
}

template <bool A52, bool B52>
void mma_fp8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma(d, a, b0, b1, 32, [](unsigned row, unsigned n, unsigned k) {
        const FormatParams& fa = kFormats[A52 ? kIndex_fp8_e5m2 : kIndex_fp8_e4m3].params;
        const FormatParams& fb = kFormats[B52 ? kIndex_fp8_e5m2 : kIndex_fp8_e4m3].params;
        return static_cast<double>(float_of(decode_float(a_byte(row, k), fa))) *
               float_of(decode_float(b_byte(n, k), fb));
    });
}

}  // namespace cuda
}  // namespace lowbit
