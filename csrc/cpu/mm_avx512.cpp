// The matrix product for AVX-512 F, BW, DQ and VL (Skylake-X, Zen 4 on): fp32, and integers as int16 pairs.
#include <immintrin.h>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/mm_avx512.inl"
#include "cpu/mm_convert.inl"
#include "cpu/mm_decode_avx512.inl"

struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static VecI dot(VecI acc, VecI a, VecI b) { return acc + (VecI)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
};

// Sixteen rows by sixteen dwords.
inline void transpose16(const uint32_t* from, int64_t stride, uint32_t* to) {
    __m512i r[16], s[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // now r[4 i + j] holds, in each 128-bit lane l, dword 4 l + j of rows 4 i..4 i + 3
        r[4 * i] = _mm512_unpacklo_epi64(s[4 * i], s[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(s[4 * i], s[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(s[4 * i + 1], s[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(s[4 * i + 1], s[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88),
                      low2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i high = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd),
                      high2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        _mm512_storeu_si512(to + j * kNr, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (4 + j) * kNr, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (8 + j) * kNr, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(to + (12 + j) * kNr, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

void unpack(const uint8_t* packed, uint8_t* codes, int64_t count, int bits) {
    int64_t i = 0;
    if (bits == 6) {
        for (; i + 16 <= count; i += 8) {  // eight bytes are read for six
            const auto fields = _pdep_u64(load<uint64_t>(packed + i * 6 / 8), 0x3f3f3f3f3f3f3f3f);
            store(codes + i, fields);
        }
    } else if (bits == 4) {
        for (; i + 64 <= count; i += 64) unpack_nibbles(packed + i / 2, codes + i);
    }
    unpack_any(packed + i * bits / 8, codes + i, count - i, bits);
}

// The bf16 values of 64 codes as two vectors of words, in order.
struct Bf16Decoder {
    __m512i words[4], sign;
    explicit Bf16Decoder(const Table& t) : sign(_mm512_set1_epi16(has_sign(t) ? 0x80 : 0)) {
        for (int i = 0; i < 4; ++i) {
            const __m512i low = widen_bytes(t.low + 32 * i), high = widen_bytes(t.high + 32 * i);
            words[i] = _mm512_or_si512(low, _mm512_slli_epi16(high, 8));
        }
    }
    __m512i half(__m256i codes) const {
        const __m512i v = _mm512_cvtepu8_epi16(codes);
        const __m512i small = _mm512_permutex2var_epi16(words[0], v, words[1]);
        const __m512i large = _mm512_permutex2var_epi16(words[2], v, words[3]);
        const __m512i magnitude = _mm512_mask_mov_epi16(small, _mm512_test_epi16_mask(v, _mm512_set1_epi16(64)), large);
        return _mm512_or_si512(magnitude, _mm512_slli_epi16(_mm512_and_si512(v, sign), 8));
    }
    void operator()(__m512i codes, __m512i* out) const {
        out[0] = half(_mm512_castsi512_si256(codes));
        out[1] = half(_mm512_extracti64x4_epi64(codes, 1));
    }

  private:
    static __m512i widen_bytes(const uint8_t* bytes) {
        return _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)));
    }
};

void scale_bf16_blocks(uint16_t* values, int64_t count, int64_t begin, int64_t block, const float* scales) {
    for (int64_t k = 0, end = begin; k < count; k = end, end += block, ++scales) {
        if (end > count) end = count;
        const __m512 scale = _mm512_set1_ps(*scales);
        for (int64_t i = k; i < end; i += 16) {
            const auto mask = static_cast<__mmask16>(first(end - i));
            const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values + i));
            const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), scale);
            const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(product), 16);
            _mm256_mask_storeu_epi16(values + i, mask, _mm512_cvtepi32_epi16(bits));
        }
    }
}

void widen(const void* values, Element dtype, float* out, int64_t n) {
    if (dtype != Element::f16) return widen_any(values, dtype, out, n);
    const auto* halves = static_cast<const uint16_t*>(values);
    for (int64_t i = 0; i < n; i += 16) {
        const auto mask = static_cast<__mmask16>(first(n - i));
        _mm512_mask_storeu_ps(out + i, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves + i)));
    }
}

void transpose(const uint32_t* rows, int64_t stride, uint32_t* panel, int64_t depth) {
    for (int64_t d = 0; d < depth; d += 16) {
        for (int n = 0; n < kNr; n += 16) transpose16(rows + n * stride + d, stride, panel + d * kNr + n);
    }
}

Kernels make() {
    Kernels k = plain_kernels<DotF32, DotS16>();
    k.unpack = unpack;
    k.decode_f32 = decode_f32<Bf16Decoder>;
    k.scale_bf16_blocks = scale_bf16_blocks;
    k.decode_bf16 = decode_bf16<Bf16Decoder>;
    k.widen = widen;
    k.transpose = transpose;
    if (has_feature("avx512_vbmi")) add_avx512vbmi(k);
    if (has_feature("avx512_vnni")) add_avx512vnni(k);
    if (has_feature("avx512_vnni") && has_feature("avx512_bf16")) add_avx512bf16(k);
    if (k.has(Kind::bf16) && has_feature("amx_tile") && has_feature("amx_bf16") && has_feature("amx_int8") &&
        allow_amx())
        add_avx512amx(k);
    return k;
}

}  // namespace

const Kernels& kernels_avx512() {
    static const Kernels table = make();
    return table;
}

}  // namespace lowbit::cpu::mm
