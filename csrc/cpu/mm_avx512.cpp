// The matrix product for AVX-512 F, BW, DQ, VL and VBMI (Ice Lake, Zen 4 on): fp32, and integers as int16 pairs.
#include <immintrin.h>

// gcc 12 warns of its own headers' _mm512_undefined_epi32.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/mm_avx512.inl"
#include "cpu/mm_convert.inl"

struct DotS16 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s16;
    static VecI dot(VecI acc, VecI a, VecI b) { return acc + (VecI)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
};

// Codes to fp32 by a table of at most 16 entries, the zero point and scale already in it.
inline void decode_f32_nibbles(const Table& t, const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
    const __m512 values = _mm512_load_ps(t.f32);
    const __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
    for (int64_t i = 0; i < n; i += 16) {
        const auto mask = static_cast<__mmask16>(first(n - i));
        const __m512i index = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes + i));
        _mm512_mask_storeu_ps(out + i, mask, _mm512_permutexvar_ps(index, scaled));
    }
}

inline void decode_f32_bytes(const uint8_t* codes, float* out, int64_t n, bool is_signed, float zero, float scale) {
    const __m512 z = _mm512_set1_ps(zero), s = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < n; i += 16) {
        const auto mask = static_cast<__mmask16>(first(n - i));
        const __m128i bytes = _mm_maskz_loadu_epi8(mask, codes + i);
        const __m512i wide = is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
        _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(wide), z), s));
    }
}

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
        // 48 bytes: six to each qword, then eight 6-bit fields of each.
        alignas(64) static const uint8_t kSpread[64] = {0,  1,  2,  3,  4,  5,  0, 0, 6,  7,  8,  9,  10, 11, 0, 0,
                                                        12, 13, 14, 15, 16, 17, 0, 0, 18, 19, 20, 21, 22, 23, 0, 0,
                                                        24, 25, 26, 27, 28, 29, 0, 0, 30, 31, 32, 33, 34, 35, 0, 0,
                                                        36, 37, 38, 39, 40, 41, 0, 0, 42, 43, 44, 45, 46, 47, 0, 0};
        const __m512i spread = _mm512_load_si512(kSpread);
        const __m512i fields = _mm512_set1_epi64(0x2a241e18120c0600);
        for (; i + 64 <= count; i += 64) {
            const __m512i bytes = _mm512_maskz_loadu_epi8(first(48), packed + i * 6 / 8);
            const __m512i codes6 = _mm512_multishift_epi64_epi8(fields, _mm512_permutexvar_epi8(spread, bytes));
            _mm512_storeu_si512(codes + i, _mm512_and_si512(codes6, _mm512_set1_epi8(63)));
        }
    } else if (bits == 4) {
        for (; i + 64 <= count; i += 64) {
            const __m512i words =
                _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + i / 2)));
            const __m512i both = _mm512_or_si512(words, _mm512_slli_epi16(words, 4));
            _mm512_storeu_si512(codes + i, _mm512_and_si512(both, _mm512_set1_epi8(15)));
        }
    }
    unpack_any(packed + i * bits / 8, codes + i, count - i, bits);
}

// The bf16 values of 64 codes as two vectors of words, in order.
struct Bf16Decoder {
    __m512i low[2], high[2], sign;
    explicit Bf16Decoder(const Table& t)
        : low{_mm512_load_si512(t.low), _mm512_load_si512(t.low + 64)},
          high{_mm512_load_si512(t.high), _mm512_load_si512(t.high + 64)},
          sign(_mm512_set1_epi8(static_cast<char>(t.bits == 8 && t.is_signed ? 0x80 : 0))) {}
    void operator()(__m512i codes, __m512i* words) const {
        // The unpacking below interleaves within 128-bit lanes: order the qwords for it.
        const __m512i v = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
        const __m512i lows = _mm512_permutex2var_epi8(low[0], v, low[1]);
        const __m512i magnitude = _mm512_permutex2var_epi8(high[0], v, high[1]);
        const __m512i highs = _mm512_ternarylogic_epi64(magnitude, v, sign, 0xf8);  // magnitude | (v & sign)
        words[0] = _mm512_unpacklo_epi8(lows, highs);
        words[1] = _mm512_unpackhi_epi8(lows, highs);
    }
};

void decode_bf16(const Table& t, const uint8_t* codes, uint16_t* out, int64_t n, int zero) {
    if (t.integer && (t.bits == 8 || zero != 0)) {
        const int half = t.is_signed ? 1 << (t.bits - 1) : 0;
        const __m512i flip = _mm512_set1_epi32(half), less = _mm512_set1_epi32(half + zero);
        for (int64_t i = 0; i < n; i += 16) {
            const auto mask = static_cast<__mmask16>(first(n - i));
            const __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes + i));
            const __m512i value = _mm512_sub_epi32(_mm512_xor_si512(wide, flip), less);
            const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(value));
            _mm256_mask_storeu_epi16(out + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
        }
        return;
    }
    const Bf16Decoder decode(t);
    for (int64_t i = 0; i < n; i += 64) {
        __m512i words[2];
        decode(_mm512_maskz_loadu_epi8(first(n - i), codes + i), words);
        _mm512_mask_storeu_epi16(out + i, static_cast<__mmask32>(first(n - i)), words[0]);
        if (n - i > 32) _mm512_mask_storeu_epi16(out + i + 32, static_cast<__mmask32>(first(n - i - 32)), words[1]);
    }
}

void decode_f32(const Table& t, const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
    if (t.bits <= 4) return decode_f32_nibbles(t, codes, out, n, zero, scale);
    if (t.integer) return decode_f32_bytes(codes, out, n, t.is_signed, zero, scale);
    if (!t.exact_bf16) return decode_f32_any(t, codes, out, n, zero, scale);
    const Bf16Decoder decode(t);
    const __m512 s = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < n; i += 64) {
        __m512i words[2];
        decode(_mm512_maskz_loadu_epi8(first(n - i), codes + i), words);
        for (int64_t j = 0; j < 64 && i + j < n; j += 16) {
            const __m512i word = words[j / 32];
            const __m256i half = j % 32 == 0 ? _mm512_castsi512_si256(word) : _mm512_extracti64x4_epi64(word, 1);
            const __m512 values = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
            _mm512_mask_storeu_ps(out + i + j, static_cast<__mmask16>(first(n - i - j)), _mm512_mul_ps(values, s));
        }
    }
}

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

template <int kRows>
void nibble_dots(const Nibbles& t) {
    const __m512 values = _mm512_load_ps(t.table->f32);
    __m512 even[2][kRows], odd[2][kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) even[0][r] = odd[0][r] = even[1][r] = odd[1][r] = _mm512_setzero_ps();
    int64_t index = 0;
    for (int64_t k = 0, end = t.first; k < t.count; end += t.block, ++index) {
        const __m512 zero = _mm512_set1_ps(t.zeros == nullptr ? 0.0f : t.zeros[index]);
        const __m512 scale = _mm512_set1_ps(t.scales == nullptr ? 1.0f : t.scales[index]);
        const __m512 table = _mm512_mul_ps(_mm512_sub_ps(values, zero), scale);
        auto multiply = [&](__m512i codes, __mmask16 lows, __mmask16 highs, int chain) {
            const __m512 low = _mm512_maskz_permutexvar_ps(lows, codes, table);
            const __m512 high = _mm512_maskz_permutexvar_ps(highs, _mm512_srli_epi32(codes, 4), table);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const float* a = t.a + r * kDotStride + k;
                even[chain][r] = _mm512_fmadd_ps(_mm512_loadu_ps(a), low, even[chain][r]);
                odd[chain][r] = _mm512_fmadd_ps(_mm512_loadu_ps(a + 16), high, odd[chain][r]);
            }
            k += 32;
        };
        auto whole = [&](int chain) {
            const auto* bytes = reinterpret_cast<const __m128i*>(t.packed + k / 2);
            multiply(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)), 0xffff, 0xffff, chain);
        };
        const int64_t stop = end < t.count ? end : t.count;
        while (k + 64 <= stop) {
            whole(0);
            whole(1);
        }
        if (k + 32 <= stop) whole(0);
        if (k < stop) {  // no product with what lies past the end: it might be NaN times 0
            const auto lows = static_cast<__mmask16>(first((stop - k + 1) / 2));
            const auto highs = static_cast<__mmask16>(first((stop - k) / 2));
            multiply(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lows, t.packed + k / 2)), lows, highs, 0);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        const __m512 sum = _mm512_add_ps(_mm512_add_ps(even[0][r], odd[0][r]), _mm512_add_ps(even[1][r], odd[1][r]));
        t.c[r * t.c_stride] += _mm512_reduce_add_ps(sum);
    }
}

void nibbles(int rows, const Nibbles& t) {
    switch (rows) {
        case 1:
            return nibble_dots<1>(t);
        case 2:
            return nibble_dots<2>(t);
        case 3:
            return nibble_dots<3>(t);
        default:
            return nibble_dots<4>(t);
    }
}

constexpr Kernels make() {
    Kernels k = plain_kernels<DotF32, DotS16>();
    k.unpack = unpack;
    k.decode_f32 = decode_f32;
    k.scale_bf16_blocks = scale_bf16_blocks;
    k.decode_bf16 = decode_bf16;
    k.widen = widen;
    k.transpose = transpose;
    k.nibbles = nibbles;
    return k;
}
constexpr Kernels kTable = make();

}  // namespace

const Kernels& kernels_avx512base() { return kTable; }

const Kernels& kernels_avx512() {
    if (!has_feature("avx512_vnni")) return kernels_avx512base();
    if (!has_feature("avx512_bf16")) return kernels_avx512vnni();
    if (!has_feature("amx_bf16") || !has_feature("amx_int8") || !allow_amx()) return kernels_avx512bf16();
    return kernels_avx512amx();
}

}  // namespace lowbit::cpu::mm
