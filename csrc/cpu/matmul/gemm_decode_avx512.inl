// Codes to fp32 and bf16 with AVX-512, given a Decoder: the bf16 values of 64 codes as two vectors of words.
// Included in an unnamed namespace after gemm_convert.inl.

// Whether the top bit of a code is a sign, and the tables of bytes hold magnitudes.
inline bool has_sign(const Table& t) { return t.bits == 8 && t.is_signed; }

inline void unpack_codes4(const uint8_t* packed, uint8_t* codes) {  // 64
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
    const __m512i both = _mm512_or_si512(words, _mm512_slli_epi16(words, 4));
    _mm512_storeu_si512(codes, _mm512_and_si512(both, _mm512_set1_epi8(15)));
}

// Codes to fp32 by a table of at most 16 entries, the zero point and scale already in it.
inline void decode_f32_codes4(const Table& t, const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
    const __m512 values = _mm512_load_ps(t.f32);
    const __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
    for (int64_t i = 0; i < n; i += 16) {
        const auto mask = static_cast<__mmask16>(first(n - i));
        const __m512i index = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes + i));
        _mm512_mask_storeu_ps(out + i, mask, _mm512_permutexvar_ps(index, scaled));
    }
}

// Integers in two's complement, whose top bit is not that of the byte if they have fewer than 8 bits.
inline void decode_f32_integers(const Table& t, const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
    const __m512i half = _mm512_set1_epi32(t.is_signed ? 1 << (t.bits - 1) : 0);
    const __m512 z = _mm512_set1_ps(zero), s = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < n; i += 16) {
        const auto mask = static_cast<__mmask16>(first(n - i));
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes + i));
        const __m512i value = _mm512_sub_epi32(_mm512_xor_si512(wide, half), half);
        _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(value), z), s));
    }
}

template <class Decoder>
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
    const Decoder decode(t);
    for (int64_t i = 0; i < n; i += 64) {
        __m512i words[2];
        decode(_mm512_maskz_loadu_epi8(first(n - i), codes + i), words);
        _mm512_mask_storeu_epi16(out + i, static_cast<__mmask32>(first(n - i)), words[0]);
        if (n - i > 32) _mm512_mask_storeu_epi16(out + i + 32, static_cast<__mmask32>(first(n - i - 32)), words[1]);
    }
}

template <class Decoder>
void decode_f32(const Table& t, const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
    if (t.bits <= 4) return decode_f32_codes4(t, codes, out, n, zero, scale);
    if (t.integer) return decode_f32_integers(t, codes, out, n, zero, scale);
    if (!t.exact_bf16) return decode_f32_any(t, codes, out, n, zero, scale);
    const Decoder decode(t);
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
