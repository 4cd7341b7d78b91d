// What the NEON files share; included in an unnamed namespace after gemm_kernels.h.

#define LOWBIT_MM_WIDTH 4
#define LOWBIT_MM_ROWS 8
#define LOWBIT_MM_PACKED4_ROWS 4
typedef float VecF __attribute__((vector_size(16)));
typedef int32_t VecI __attribute__((vector_size(16)));

inline VecF fused(VecF a, VecF b, VecF c) { return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
template <class Code>
inline VecI widened(const Code* from) {
    typedef Code Codes __attribute__((vector_size(4)));
    Codes codes;
    __builtin_memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, VecI);
}
inline void stream(void* to, VecF v) { __builtin_memcpy(to, &v, sizeof v); }

#include "cpu/matmul/gemm_body.inl"
