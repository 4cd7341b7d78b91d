// The matrix product for AVX2 with FMA and F16C.
#include <immintrin.h>

#include "cpu/matmul/few.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx2.inl"

#include "cpu/matmul/few_body.inl"
#include "cpu/matmul/gemm_convert.inl"

void unpack(const uint8_t* packed, uint8_t* codes, int64_t count, int bits) {
    int64_t i = 0;
    if (bits == 4) {
        for (; i + 32 <= count; i += 32) {
            const __m256i words =
                _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2)));
            const __m256i both = _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_and_si256(both, _mm256_set1_epi8(15)));
        }
    }
    unpack_any(packed + i * bits / 8, codes + i, count - i, bits);
}

void decode_f32(const Table& t, const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
    if (t.integer && t.bits == 8) return decode_f32_any(t, codes, out, n, zero, scale);
    const __m256 z = _mm256_set1_ps(zero), s = _mm256_set1_ps(scale);
    int64_t i = 0;
    if (t.bits <= 4) {
        const __m256 low = _mm256_mul_ps(_mm256_sub_ps(_mm256_load_ps(t.f32), z), s);
        const __m256 high = _mm256_mul_ps(_mm256_sub_ps(_mm256_load_ps(t.f32 + 8), z), s);
        for (; i + 8 <= n; i += 8) {
            const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
            const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
            _mm256_storeu_ps(out + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                                                       _mm256_permutevar8x32_ps(high, index), upper));
        }
    }
    for (; i + 8 <= n; i += 8) {
        const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_sub_ps(_mm256_i32gather_ps(t.f32, index, 4), z), s));
    }
    decode_f32_any(t, codes + i, out + i, n - i, zero, scale);
}

void widen(const void* values, Element dtype, float* out, int64_t n) {
    if (dtype != Element::f16) return widen_any(values, dtype, out, n);
    const auto* halves = static_cast<const uint16_t*>(values);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
    }
    widen_any(halves + i, dtype, out + i, n - i);
}

// Eight rows by eight dwords.
inline void transpose8(const uint32_t* from, int64_t stride, uint32_t* to) {
    __m256 r[8], s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * stride));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_shuffle_ps(s[4 * i], s[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(s[4 * i], s[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(s[4 * i + 1], s[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(s[4 * i + 1], s[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(to + i * kNr), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * kNr), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

void transpose(const uint32_t* rows, int64_t stride, uint32_t* panel, int64_t depth) {
    for (int64_t d = 0; d < depth; d += 8) {
        for (int n = 0; n < kNr; n += 8) transpose8(rows + n * stride + d, stride, panel + d * kNr + n);
    }
}

// Products of signed bytes with 4-bit codes: words hold four of them.
struct DotCodes4 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s8u8;
    static constexpr bool kPairs = true;
    static VecI dot(VecI acc, VecI a, VecI b, VecI a2, VecI b2) {
        const __m256i words = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)b, (__m256i)a),
                                               _mm256_maddubs_epi16((__m256i)b2, (__m256i)a2));
        return acc + (VecI)_mm256_madd_epi16(words, _mm256_set1_epi16(1));
    }
};

// Products of words with 8-bit codes, as unsigned numbers.
struct DotBytes : DotS16 {
    static VecI words(VecI bytes, int half) {
        constexpr auto kLow = static_cast<int64_t>(0x8005800480018000);
        constexpr int64_t kNext = 0x0808080808080808;
        const __m256i first = _mm256_setr_epi64x(kLow, kLow + kNext, kLow, kLow + kNext);
        const __m256i second = _mm256_add_epi8(first, _mm256_set1_epi16(2));
        return (VecI)_mm256_shuffle_epi8((__m256i)bytes, half == 0 ? first : second);
    }
};
template <>
constexpr bool kCorrected<DotBytes> = true;

template <bool kScaled>
void byte_tile_of(int rows, const Tile& t) {
    switch (rows) {
        case 1:
            return byte_tile<DotBytes, kScaled, 1>(t);
        case 2:
            return byte_tile<DotBytes, kScaled, 2>(t);
        case 4:
            return byte_tile<DotBytes, kScaled, 4>(t);
        default:
            return byte_tile<DotBytes, kScaled, 6>(t);
    }
}
void run_byte_tile(bool scaled, int rows, const Tile& t) {
    scaled ? byte_tile_of<true>(rows, t) : byte_tile_of<false>(rows, t);
}

struct FewDot {
    static VecI bytes(VecI acc, VecI a, VecI b) {
        const __m256i x = (__m256i)a, y = (__m256i)b;
        const __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8),
                                               _mm256_and_si256(y, _mm256_set1_epi16(0xff)));
        return acc + (VecI)even + (VecI)_mm256_madd_epi16(_mm256_srai_epi16(x, 8), _mm256_srli_epi16(y, 8));
    }
    static VecI nibbles(VecI acc, VecI a, VecI b, VecI a2, VecI b2) { return DotCodes4::dot(acc, a, b, a2, b2); }
};

constexpr Kernels make() {
    Kernels k = plain_kernels<DotF32, DotS16>();
    k.unpack = unpack;
    k.decode_f32 = decode_f32;
    k.widen = widen;
    k.transpose = transpose;
    add_few<FewDot>(k);
    k.packed4 = {run_packed4_tile<DotCodes4>, Kind::s8u8, LOWBIT_MM_PACKED4_ROWS, INT64_MAX};
    k.packed8 = {run_byte_tile, Kind::s16, LOWBIT_MM_ROWS, INT64_MAX};
    return k;
}
constexpr Kernels kTable = make();

}  // namespace

const Kernels& kernels_avx2() { return kTable; }

}  // namespace lowbit::cpu::mm
