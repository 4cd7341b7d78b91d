// What the AVX-512 files share; included in an unnamed namespace after gemm_kernels.h and immintrin.h.

#define LOWBIT_MM_WIDTH 16
#define LOWBIT_MM_ROWS 14
#define LOWBIT_MM_PACKED4_ROWS 8
typedef float VecF __attribute__((vector_size(64)));
typedef int32_t VecI __attribute__((vector_size(64)));

inline VecF fused(VecF a, VecF b, VecF c) { return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VecI widened(const int8_t* from) { return (VecI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline VecI widened(const uint8_t* from) { return (VecI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
inline void stream(void* to, VecF v) { _mm512_stream_ps(static_cast<float*>(to), (__m512)v); }

#include "cpu/matmul/gemm_body.inl"

struct DotF32AtMemory : DotF32 {
    static constexpr bool kFromMemory = true;
    // As assembly: gcc 12 moves the intrinsic's accumulators about.
    static VecF dot(VecF acc, VecI a, VecI b) {
        asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
        return acc;
    }
    static VecF dot_at(VecF acc, const uint32_t& a, VecI b) {
        asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(a));
        return acc;
    }
};

struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static constexpr bool kFromMemory = false;
    // As assembly: the largest tile takes all registers, and gcc 12 spills a quarter of them.
    static VecI dot(VecI acc, VecI a, VecI b) {
        VecI pairs;
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(acc), "=&v"(pairs) : "v"(a), "v"(b));
        return acc;
    }
};

inline __mmask64 first(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

// Sixteen rows by sixteen dwords: `put(d, v)` for the sixteen rows' dwords d, counted from byte `at`. Loads gather four
// rows into the lanes of a vector, which takes half the shuffles of whole rows; then each lane is transposed. The rows'
// lines are copied first: rows 4 KiB apart share one set of the first-level cache, which would not hold them.
template <class F>
inline void transpose_dwords(const uint8_t* const* rows, int64_t at, const F& put) {
    __m512i lines[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
        lines[r] = _mm512_loadu_si512(rows[r] + at);
        asm("" : "+m"(lines[r]));  // in memory, not in a register
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
        auto row = [&](int r) { return _mm_load_si128(reinterpret_cast<const __m128i*>(lines + r) + j); };
        __m512i v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm512_zextsi128_si512(row(i));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, row(4 + i));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, row(8 + i));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, row(12 + i));
        }
        const __m512i low = _mm512_unpacklo_epi32(v[0], v[1]), low2 = _mm512_unpacklo_epi32(v[2], v[3]);
        const __m512i high = _mm512_unpackhi_epi32(v[0], v[1]), high2 = _mm512_unpackhi_epi32(v[2], v[3]);
        put(4 * j, _mm512_unpacklo_epi64(low, low2));
        put(4 * j + 1, _mm512_unpackhi_epi64(low, low2));
        put(4 * j + 2, _mm512_unpacklo_epi64(high, high2));
        put(4 * j + 3, _mm512_unpackhi_epi64(high, high2));
    }
}
