// What the AVX2 files share; included in an unnamed namespace after gemm_kernels.h and immintrin.h.

#define LOWBIT_MM_WIDTH 8
#define LOWBIT_MM_ROWS 6
#define LOWBIT_MM_PACKED4_ROWS 4
typedef float VecF __attribute__((vector_size(32)));
typedef int32_t VecI __attribute__((vector_size(32)));

inline VecF fused(VecF a, VecF b, VecF c) { return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VecI widened(const int8_t* from) { return (VecI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline VecI widened(const uint8_t* from) { return (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline void stream(void* to, VecF v) { _mm256_stream_ps(static_cast<float*>(to), (__m256)v); }

#include "cpu/matmul/gemm_body.inl"

struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static constexpr bool kFromMemory = false;
    // As assembly: the largest tile takes all registers, and gcc 12 spills some of them.
    static VecI dot(VecI acc, VecI a, VecI b) {
        VecI pairs;
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(pairs) : "x"(a), "x"(b));
        return acc;
    }
};
