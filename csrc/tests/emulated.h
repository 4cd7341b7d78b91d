// Instructions that this processor may lack, computed by plain loops: VBMI's byte shuffles, BF16's dot products, AMX's
// tiles. The build option LOWBIT_EMULATE includes it before the files that use them, so that `make emulated` tests
// those files on any processor with AVX-512 and VNNI. Slow, and never part of a library that is installed.
#pragma once

#include <immintrin.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace lowbit::emulated {
namespace {

// A vector of `kBytes` bytes as numbers.
template <class T, size_t kBytes>
struct Lanes {
    T at[kBytes / sizeof(T)];
    Lanes() = default;
    template <class Vector>
    explicit Lanes(const Vector& v) {
        static_assert(sizeof v == kBytes);
        std::memcpy(at, &v, kBytes);
    }
    template <class Vector>
    Vector as() const {
        Vector v;
        static_assert(sizeof v == kBytes);
        std::memcpy(&v, at, kBytes);
        return v;
    }
};
using Bytes = Lanes<uint8_t, 64>;

// -- VBMI ------------------------------------------------------------------------------------------------------------

inline __m512i permute(__m512i index, __m512i low, __m512i high, int size) {
    const Bytes at(index), from[2] = {Bytes(low), Bytes(high)};
    Bytes out;
    for (int i = 0; i < 64; ++i) out.at[i] = from[at.at[i] % size / 64].at[at.at[i] % 64];
    return out.as<__m512i>();
}
inline __m512i permutexvar(__m512i index, __m512i a) { return permute(index, a, a, 64); }
inline __m512i permutex2var(__m512i a, __m512i index, __m512i b) { return permute(index, a, b, 128); }

inline __m512i multishift(__m512i control, __m512i a) {
    const Bytes shifts(control);
    const Lanes<uint64_t, 64> words(a);
    Bytes out;
    for (int i = 0; i < 64; ++i) {
        const uint64_t word = words.at[i / 8];
        const int shift = shifts.at[i] % 64;
        out.at[i] = static_cast<uint8_t>(shift == 0 ? word : word >> shift | word << (64 - shift));
    }
    return out.as<__m512i>();
}

// -- BF16 ------------------------------------------------------------------------------------------------------------

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float widen(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return flush(value);
}

inline float multiply_add(float sum, const uint16_t* a, const uint16_t* b) {
    for (int i = 1; i >= 0; --i) sum = flush(std::fma(widen(a[i]), widen(b[i]), flush(sum)));
    return sum;
}

template <class Acc, class Pairs>
inline Acc dot_bf16(Acc acc, Pairs a, Pairs b) {
    Lanes<float, sizeof(Acc)> sum(acc);
    const Lanes<uint16_t, sizeof(Pairs)> x(a), y(b);
    for (size_t i = 0; i < sizeof(Acc) / 4; ++i) sum.at[i] = multiply_add(sum.at[i], x.at + 2 * i, y.at + 2 * i);
    return sum.template as<Acc>();
}

template <class From>
inline auto narrow(From v) {
    const Lanes<float, sizeof v> x(v);
    Lanes<uint16_t, sizeof v / 2> out;
    for (size_t i = 0; i < sizeof(From) / 4; ++i) {
        const float value = flush(x.at[i]);
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        out.at[i] =
            static_cast<uint16_t>(value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    if constexpr (sizeof v == 64)
        return out.template as<__m256bh>();
    else
        return out.template as<__m128bh>();
}

// -- AMX -------------------------------------------------------------------------------------------------------------

struct Tile {
    uint8_t rows[16][64];
};
thread_local Tile tiles[8];

inline void load_tile(int tile, const void* from, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(tiles[tile].rows[r], static_cast<const char*>(from) + r * stride, 64);
}
inline void store_tile(int tile, void* to, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile].rows[r], 64);
}

// c[16, 16] += a[16, 16 dwords] . b[16 dwords, 16], with `step` for the products of one dword.
template <class Sum, class Step>
inline void multiply_tiles(int c, int a, int b, Step step) {
    for (int m = 0; m < 16; ++m) {
        Sum sums[16];
        std::memcpy(sums, tiles[c].rows[m], sizeof sums);
        for (int k = 0; k < 16; ++k) {
            for (int n = 0; n < 16; ++n) sums[n] = step(sums[n], tiles[a].rows[m] + 4 * k, tiles[b].rows[k] + 4 * n);
        }
        std::memcpy(tiles[c].rows[m], sums, sizeof sums);
    }
}
inline void tile_dpbf16ps(int c, int a, int b) {
    multiply_tiles<float>(c, a, b, [](float sum, const uint8_t* x, const uint8_t* y) {
        uint16_t pairs[2][2];
        std::memcpy(pairs[0], x, 4);
        std::memcpy(pairs[1], y, 4);
        return multiply_add(sum, pairs[0], pairs[1]);
    });
}
inline void tile_dpbsud(int c, int a, int b) {
    multiply_tiles<int32_t>(c, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* y) {
        for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(x[i]) * y[i];
        return sum;
    });
}

}  // namespace
}  // namespace lowbit::emulated

#define _mm512_permutexvar_epi8 lowbit::emulated::permutexvar
#define _mm512_permutex2var_epi8 lowbit::emulated::permutex2var
#define _mm512_multishift_epi64_epi8 lowbit::emulated::multishift
#define _mm512_dpbf16_ps lowbit::emulated::dot_bf16
#define _mm512_cvtneps_pbh lowbit::emulated::narrow

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd lowbit::emulated::load_tile
#define _tile_stored lowbit::emulated::store_tile
#define _tile_zero(tile) (lowbit::emulated::tiles[tile] = {})
#define _tile_dpbf16ps lowbit::emulated::tile_dpbf16ps
#define _tile_dpbsud lowbit::emulated::tile_dpbsud
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define syscall(number, request, what) (static_cast<void>(request), static_cast<void>(what), 0)  // permits tiles
