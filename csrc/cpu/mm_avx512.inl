// What the AVX-512 files share; included in an unnamed namespace after mm_kernels.h and immintrin.h.

#define LOWBIT_MM_WIDTH 16
#define LOWBIT_MM_ROWS 14
typedef float VecF __attribute__((vector_size(64)));
typedef int32_t VecI __attribute__((vector_size(64)));

inline VecF fused(VecF a, VecF b, VecF c) { return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline void stream(void* to, VecF v) { _mm512_stream_ps(static_cast<float*>(to), (__m512)v); }

#include "cpu/mm_body.inl"

inline __mmask64 first(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
