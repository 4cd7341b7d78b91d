// The matrix product for AVX-512 F, BW, DQ and VL (Skylake-X, Zen 4 on): fp32, and integers as int16 pairs.
#include <immintrin.h>

#include <algorithm>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/matmul/few.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx512.inl"

#include "cpu/matmul/few_body.inl"
#include "cpu/matmul/gemm_convert.inl"
#include "cpu/matmul/gemm_decode_avx512.inl"

void unpack(const uint8_t* packed, uint8_t* codes, int64_t count, int bits) {
    int64_t i = 0;
    if (bits == 6) {
        for (; i + 16 <= count; i += 8) {  // eight bytes are read for six
            const auto fields = _pdep_u64(load<uint64_t>(packed + i * 6 / 8), 0x3f3f3f3f3f3f3f3f);
            store(codes + i, fields);
        }
    } else if (bits == 4) {
        for (; i + 64 <= count; i += 64) unpack_codes4(packed + i / 2, codes + i);
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
    const uint8_t* at[kNr];
    for (int n = 0; n < kNr; ++n) at[n] = reinterpret_cast<const uint8_t*>(rows + n * stride);
    for (int64_t d = 0; d < depth; d += 16) {
        for (int n = 0; n < kNr; n += 16) {
            transpose_dwords(at + n, 4 * d,
                             [&](int64_t i, __m512i v) { _mm512_store_si512(panel + (d + i) * kNr + n, v); });
        }
    }
}

void pack(const uint32_t* rows, int64_t count, int64_t depth, uint32_t* out) {
    const uint8_t* at[16];
    for (int64_t r = 0; r < 16; ++r)
        at[r] = reinterpret_cast<const uint8_t*>(rows + std::min(r, count - 1) * kTileStride);
    for (int64_t d = 0; d < depth; d += 16) {
        // Every store writes over what the one before it wrote too much.
        transpose_dwords(at, 4 * d, [&](int64_t i, __m512i v) { _mm512_storeu_si512(out + (d + i) * count, v); });
    }
}

#include "cpu/matmul/gemm_panel_avx512.inl"

struct FewDot {
    static VecI bytes(VecI acc, VecI a, VecI b) {
        const __m512i x = (__m512i)a, y = (__m512i)b;
        const __m512i even = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8),
                                               _mm512_and_si512(y, _mm512_set1_epi16(0xff)));
        return acc + (VecI)even + (VecI)_mm512_madd_epi16(_mm512_srai_epi16(x, 8), _mm512_srli_epi16(y, 8));
    }
    static VecI nibbles(VecI acc, VecI a, VecI b, VecI a2, VecI b2) {
        const __m512i words = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)b, (__m512i)a),
                                               _mm512_maddubs_epi16((__m512i)b2, (__m512i)a2));
        return acc + (VecI)_mm512_madd_epi16(words, _mm512_set1_epi16(1));
    }
};

Kernels make() {
    Kernels k = plain_kernels<DotF32AtMemory, DotS16>();
    add_few<FewDot>(k);
    k.unpack = unpack;
    k.decode_f32 = decode_f32<Bf16Decoder>;
    k.scale_bf16_blocks = scale_bf16_blocks;
    k.decode_bf16 = decode_bf16<Bf16Decoder>;
    k.widen = widen;
    k.transpose = transpose;
    k.pack = pack;
    k.panel[static_cast<int>(Kind::f32)] = panel_f32<Bf16Decoder, Halves>;
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
