// Panels of b straight from its codes: they are transposed as they are stored, since they are then a quarter or an
// eighth of what they decode to. Included in an unnamed namespace after gemm_decode_avx512.inl.

constexpr int kTranspose = 16;  // rows, and bytes of a lane

// Byte i of lane l of out[j] is byte 16 l + j of row i, counted from `at`: four perfect shuffles of the rows.
inline void transpose_bytes(const uint8_t* const* rows, int64_t at, __m512i* out) {
    __m512i v[kTranspose], w[kTranspose];
#pragma GCC unroll 16
    for (int i = 0; i < kTranspose; ++i) v[i] = _mm512_loadu_si512(rows[i] + at);
    auto shuffle = [](const __m512i* from, __m512i* to) {
#pragma GCC unroll 8
        for (int i = 0; i < kTranspose / 2; ++i) {
            to[2 * i] = _mm512_unpacklo_epi8(from[i], from[i + kTranspose / 2]);
            to[2 * i + 1] = _mm512_unpackhi_epi8(from[i], from[i + kTranspose / 2]);
        }
    };
    shuffle(v, w);
    shuffle(w, v);
    shuffle(v, w);
    shuffle(w, out);
}

// Where a column's sixteen values go, and what is done to them on the way: `levels` of kTranspose columns, from a
// multiple of it on, are those of one block. Members are values: what is stored might change anything that lies in
// memory.
static_assert(kPanelStep == kTranspose, "a lane of turned bytes is of one block");
template <bool kLevels>
struct Place {
    float* out;
    const float *scales, *zeros;
    int64_t first;
    int shift;
    Place(const Panel& p, int64_t half)  // of the columns
        : out(reinterpret_cast<float*>(p.out) + half * kTranspose),
          scales(p.scales == nullptr ? nullptr : p.scales + half * kTranspose),
          zeros(p.zeros == nullptr ? nullptr : p.zeros + half * kTranspose),
          first(p.first),
          shift(p.shift) {}

    struct Levels {
        __m512 scale, zero;
    };
    Levels levels(int64_t k) const {
        const int64_t at = ((first + k) >> shift) * kNr;
        const bool scaled = kLevels && scales != nullptr, shifted = kLevels && zeros != nullptr;
        return {scaled ? _mm512_loadu_ps(scales + at) : _mm512_set1_ps(1.0f),
                shifted ? _mm512_loadu_ps(zeros + at) : _mm512_setzero_ps()};
    }
    void operator()(int64_t k, __m512 v, const Levels& l) const {
        if (kLevels) v = _mm512_mul_ps(zeros != nullptr ? _mm512_sub_ps(v, l.zero) : v, l.scale);
        _mm512_store_ps(out + k * kNr, v);
    }
};

inline __m512 widen_bf16(__m256i words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

// Floats of 8 or 6 bits by way of fp16, which is the faster one without shuffles of bytes.
struct Halves {
    int lift, shift;  // lift: of codes to the top of a byte
    __m512i mask;
    __m512 unit;
    uint8_t nan;  // lifted
    explicit Halves(const Table& t)
        : lift(8 - t.bits),
          shift(8 - t.half_shift),
          mask(_mm512_set1_epi16(static_cast<short>(0x8000 | 0x7f00 >> t.half_shift))),
          unit(_mm512_set1_ps(t.half_unit)),
          nan(static_cast<uint8_t>(t.half_nan << (8 - t.bits))) {}
    // 64 values; false where codes hold a NaN that is none in fp16.
    bool operator()(__m512i codes, __m512* out) const {
        codes = _mm512_sll_epi16(codes, _mm_cvtsi32_si128(lift));
        const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi8(0x7f));
        if (nan != 0 && _mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(static_cast<char>(nan))) != 0) return false;
        widen(_mm512_castsi512_si256(codes), out);
        widen(_mm512_extracti64x4_epi64(codes, 1), out + 2);
        return true;
    }
    void widen(__m256i codes, __m512* out) const {
        const __m512i words =
            _mm512_and_si512(_mm512_sll_epi16(_mm512_cvtepi8_epi16(codes), _mm_cvtsi32_si128(shift)), mask);
        out[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(words)), unit);
        out[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1)), unit);
    }
};
struct NoHalves {
    explicit NoHalves(const Table&) {}
    bool operator()(__m512i, __m512*) const { return false; }
};

template <class Decoder, class Half, bool kLevels>
void panel_floats(const Panel& p) {
    const Decoder decode(*p.table);
    const Half half(*p.table);
    for (int64_t k = 0; k < p.length; k += 64) {
        for (int64_t h = 0; h < kNr / kTranspose; ++h) {
            const Place<kLevels> place(p, h);
            typename Place<kLevels>::Levels levels[4];
            for (int i = 0; i < 4; ++i) levels[i] = place.levels(k + i * kTranspose);
            __m512i codes[kTranspose];
            transpose_bytes(p.rows + h * kTranspose, k, codes);
            for (int j = 0; j < kTranspose; ++j) {
                __m512 v[4];
                if (!half(codes[j], v)) {
                    __m512i words[2];
                    decode(codes[j], words);
                    for (int i = 0; i < 2; ++i) {
                        v[2 * i] = widen_bf16(_mm512_castsi512_si256(words[i]));
                        v[2 * i + 1] = widen_bf16(_mm512_extracti64x4_epi64(words[i], 1));
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) place(k + i * kTranspose + j, v[i], levels[i]);
            }
        }
    }
}

// Floats have no zero points.
template <class Decoder, class Half>
void panel_f32_floats(const Panel& p) {
    p.scales == nullptr ? panel_floats<Decoder, Half, false>(p) : panel_floats<Decoder, Half, true>(p);
}

// `convert(bytes, k, put)` for every sixteen bytes along the columns; byte k of the rows, kCodes codes each.
template <int kCodes, bool kLevels, class F>
inline void each_column_of(const Panel& p, int64_t bytes, const F& convert) {
    constexpr int kBytes = kTranspose / kCodes;
    for (int64_t k = 0; k < bytes; k += 64) {
        for (int64_t h = 0; h < kNr / kTranspose; ++h) {
            const Place<kLevels> place(p, h);
            alignas(64) __m512i codes[kTranspose];
            transpose_bytes(p.rows + h * kTranspose, k, codes);
            const auto* lanes = reinterpret_cast<const __m128i*>(codes);
            for (int64_t i = 0; i < 64; i += kBytes) {
                const auto levels = place.levels((k + i) * kCodes);
                auto put = [&](int64_t at, __m512 v) { place(at, v, levels); };
                const __m128i* lane = lanes + i % kTranspose * 4 + i / kTranspose;
#pragma GCC unroll 16
                for (int j = 0; j < kBytes; ++j) convert(_mm_load_si128(lane + j * 4), k + i + j, put);
            }
        }
    }
}

template <int kCodes, class F>
inline void each_column(const Panel& p, const F& convert) {
    const bool levels = p.scales != nullptr || p.zeros != nullptr;
    levels ? each_column_of<kCodes, true>(p, p.length / kCodes, convert)
           : each_column_of<kCodes, false>(p, p.length / kCodes, convert);
}

template <class Decoder, class Half>
void panel_f32(const Panel& p) {
    const Table& t = *p.table;
    if (t.bits == 4) {
        const __m512 values = _mm512_load_ps(t.f32);
        return each_column<2>(p, [&](__m128i bytes, int64_t k, const auto& put) {
            const __m512i pair = _mm512_cvtepu8_epi32(bytes);
            put(2 * k, _mm512_permutexvar_ps(pair, values));
            put(2 * k + 1, _mm512_permutexvar_ps(_mm512_srli_epi32(pair, 4), values));
        });
    }
    if (t.integer && t.is_signed) {
        return each_column<1>(p, [&](__m128i bytes, int64_t k, const auto& put) {
            put(k, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
        });
    }
    if (t.integer) {
        return each_column<1>(p, [&](__m128i bytes, int64_t k, const auto& put) {
            put(k, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
        });
    }
    t.half_shift >= 0 ? panel_f32_floats<Decoder, Half>(p) : panel_f32_floats<Decoder, NoHalves>(p);
}
