// Row kernels for NEON (any 64-bit Arm).
#include <arm_neon.h>

#include <algorithm>
#include <type_traits>

#include "common/numerics.h"
#include "cpu/row_kernels.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

#define LOWBIT_REGISTER "w"  // the constraint of vectors in inline assembly
constexpr int kLanes = 4, kRegisters = 32;
typedef float F __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint64_t W __attribute__((vector_size(16)));
typedef uint16_t H __attribute__((vector_size(8)));
typedef uint8_t B __attribute__((vector_size(4)));

inline U widen(B b) {
    uint32_t word;
    __builtin_memcpy(&word, &b, 4);
    return (U)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word))));
}
inline U widen(H h) { return (U)vmovl_u16((uint16x4_t)h); }
inline H narrow_words(U v) { return (H)vmovn_u32((uint32x4_t)v); }
inline B narrow_bytes(U v) {
    const uint16x4_t words = vmovn_u32((uint32x4_t)v);
    const uint32_t word = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    B b;
    __builtin_memcpy(&b, &word, 4);
    return b;
}
inline F widen_half(H h) { return (F)vcvt_f32_f16((float16x4_t)h); }
inline H narrow_half(F v) { return (H)vcvt_f16_f32((float32x4_t)v); }
inline F one_nan(F v) { return v == v ? v : (F)(U{} + kNan); }
inline F root(F v) { return (F)vsqrtq_f32((float32x4_t)v); }
inline int32_t largest(I v) { return vmaxvq_s32((int32x4_t)v); }
inline W multiply(W a, W b) { return (W)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b)); }
inline I rounded(F v) { return (I)vcvtnq_s32_f32((float32x4_t)v); }
inline F larger(F a, F b) { return (F)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
inline F smaller(F a, F b) { return (F)vminq_f32((float32x4_t)a, (float32x4_t)b); }
inline F fused(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline U zip_low(U a, U b) { return (U)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b); }
inline U zip_high(U a, U b) { return (U)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b); }
inline U join_words(U a, U b) { return (U)vuzp1q_u16((uint16x8_t)a, (uint16x8_t)b); }
inline U widen_words(const void* p) { return (U)vmovl_u8(vld1_u8(static_cast<const uint8_t*>(p))); }
inline U widen_signed(const void* p) { return (U)vmovl_s8(vld1_s8(static_cast<const int8_t*>(p))); }
inline bool any_byte_above(U a, U b) { return vmaxvq_u8(vqsubq_u8((uint8x16_t)a, (uint8x16_t)b)) != 0; }
inline F first_halves(U words) { return (F)vcvt_f32_f16(vget_low_f16((float16x8_t)words)); }
inline F second_halves(U words) { return (F)vcvt_f32_f16(vget_high_f16((float16x8_t)words)); }
inline void store_threes(void* p, U v) {
    const uint8x16_t first = {0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 255, 255, 255, 255};
    const uint8x16_t dense = vqtbl1q_u8((uint8x16_t)v, first);
    __builtin_memcpy(p, &dense, 12);
}
inline U load_threes(const void* p) {
    const uint8x16_t wide = {0, 1, 2, 255, 3, 4, 5, 255, 6, 7, 8, 255, 9, 10, 11, 255};
    uint8x16_t dense = {};
    __builtin_memcpy(&dense, p, 12);
    return (U)vqtbl1q_u8(dense, wide);
}
inline U join_bytes(U a, U b, U c, U d, bool) {
    const uint16x8_t first = vuzp1q_u16((uint16x8_t)a, (uint16x8_t)b),
                     second = vuzp1q_u16((uint16x8_t)c, (uint16x8_t)d);
    return (U)vuzp1q_u8((uint8x16_t)first, (uint8x16_t)second);
}
inline F lookup(const F (&table)[4], U index) {
    const uint8x16x4_t bytes = {
        {(uint8x16_t)table[0], (uint8x16_t)table[1], (uint8x16_t)table[2], (uint8x16_t)table[3]}};
    return (F)vqtbl4q_u8(bytes, (uint8x16_t)((index & 15u) * 0x04040404u + 0x03020100u));
}
inline U gather(const uint32_t* table, U index) {
    return U{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}
inline void gather_pairs(const uint64_t* table, U index, U (&pairs)[2]) {
    pairs[0] = (U)uint64x2_t{table[index[0]], table[index[1]]};
    pairs[1] = (U)uint64x2_t{table[index[2]], table[index[3]]};
}
inline I evens(I a, I b) { return (I)vuzp1q_s32((int32x4_t)a, (int32x4_t)b); }
inline I odds(I a, I b) { return (I)vuzp2q_s32((int32x4_t)a, (int32x4_t)b); }
inline uint64_t pack_group(uint64_t codes, uint64_t mask) {
    const int bits = __builtin_popcountll(mask) / 8;
    uint64_t word = 0;
    for (int j = 0; j < 8; ++j) word |= ((codes >> (8 * j)) & mask & 0xff) << (bits * j);
    return word;
}
inline uint64_t unpack_group(uint64_t packed, uint64_t mask) {
    const int bits = __builtin_popcountll(mask) / 8;
    uint64_t codes = 0;
    for (int j = 0; j < 8; ++j) codes |= ((packed >> (bits * j)) & mask & 0xff) << (8 * j);
    return codes;
}

#include "cpu/row_kernels_body.inl"

}  // namespace

const RowKernels& row_kernels_neon() { return kTable; }

}  // namespace lowbit::cpu
