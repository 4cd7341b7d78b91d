// What BF16 dot products add (Armv8.6, Neoverse V1 and N2, Apple M2). bfdot flushes subnormals and rounds a pair's sum
// to odd before it is added; the error bound of scaled_mm holds for both (docs/numerics.md section 9).
#include <arm_neon.h>

#include "cpu/matmul/gemm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_neon.inl"

struct DotBf16 {
    using Acc = VecF;
    static constexpr Kind kind = Kind::bf16;
    static constexpr bool kFromMemory = false;
    static VecF dot(VecF acc, VecI a, VecI b) {
        return (VecF)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
    }
};

void scale_bf16_blocks(uint16_t* values, int64_t count, int64_t first, int64_t block, const float* scales) {
    for (int64_t begin = 0, end = first; begin < count; begin = end, end += block, ++scales) {
        if (end > count) end = count;
        for (int64_t i = begin; i < end; ++i) {
            const uint32_t bits = static_cast<uint32_t>(values[i]) << 16;
            const float product = load<float>(&bits) * *scales;
            values[i] = static_cast<uint16_t>(load<uint32_t>(&product) >> 16);
        }
    }
}

void decode_bf16(const Table& t, const uint8_t* codes, uint16_t* out, int64_t n, int zero) {
    const bool computed = t.integer && (t.bits == 8 || zero != 0);
    const int half = t.is_signed ? 1 << (t.bits - 1) : 0;
    for (int64_t i = 0; i < n; ++i) {
        const float value = computed ? static_cast<float>(((codes[i] ^ half) - half) - zero) : t.f32[codes[i]];
        out[i] = static_cast<uint16_t>(load<uint32_t>(&value) >> 16);
    }
}

}  // namespace

void add_neonbf16(Kernels& kernels) {
    kernels.scale_bf16_blocks = scale_bf16_blocks;
    kernels.decode_bf16 = decode_bf16;
    add_kind<DotBf16>(kernels);
}

}  // namespace lowbit::cpu::mm
