// The instructions of the tensor-core kernels that C++ cannot name: asynchronous copies, ldmatrix and mma.sync.
// Each function is a whole warp's or a thread's single instruction, so that tests can put host code in its place.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lowbit {
namespace cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies `Bytes` to shared memory, of which only the first `valid` are read and the rest become zero.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* to, const uint8_t* from, int valid) {
    const uint32_t at = shared_address(to);
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(at), "l"(from), "r"(valid));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(at), "l"(from), "n"(Bytes), "r"(valid));
    }
}

__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_int8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a * b, starting from zero. sm_89 and later only.
template <bool A52, bool B52>
__device__ __forceinline__ void mma_fp8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define LOWBIT_MMA_FP8(A, B)                                                        \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." A "." B                   \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n" \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f))
    if constexpr (A52 && B52) {
        LOWBIT_MMA_FP8("e5m2", "e5m2");
    } else if constexpr (A52) {
        LOWBIT_MMA_FP8("e5m2", "e4m3");
    } else if constexpr (B52) {
        LOWBIT_MMA_FP8("e4m3", "e5m2");
    } else {
        LOWBIT_MMA_FP8("e4m3", "e4m3");
    }
#undef LOWBIT_MMA_FP8
#endif
}

}  // namespace cuda
}  // namespace lowbit
