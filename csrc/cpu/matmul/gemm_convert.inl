// Decoding and the epilogue for any instruction set, in loops that compilers vectorise; included after gemm_body.inl.
// Inline, because not every file needs all of them.

inline uint32_t bits_of(float value) { return load<uint32_t>(&value); }

// fp32 to fp16, nearest even with subnormals; NaN becomes the quiet NaN.
inline uint16_t f16_bits(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // at least the midpoint above 65504
    if (magnitude < 0x38800000) {  // below 2^-14: adding 2^-1 leaves units of 2^-24, rounded by the addition
        float small;
        __builtin_memcpy(&small, &magnitude, sizeof small);
        return static_cast<uint16_t>(sign | (bits_of(small + 0.5f) - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

inline float f16_value(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    uint32_t bits;
    if (magnitude >= 0x7c00) {
        bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + 0x38000000;
    } else {
        bits = bits_of(static_cast<float>(magnitude) * 0x1p-24f);
    }
    bits |= sign;
    return load<float>(&bits);
}

inline void unpack_any(const uint8_t* packed, uint8_t* codes, int64_t count, int bits) {
    const uint32_t mask = (1u << bits) - 1;
    int64_t i = 0;
    if (bits == 4) {
        for (; i + 2 <= count; i += 2) {
            const uint8_t byte = packed[i / 2];
            codes[i] = byte & 15;
            codes[i + 1] = byte >> 4;
        }
    }
    for (; i < count; ++i) {
        const int64_t bit = i * bits;
        uint32_t word = packed[bit / 8];
        if (bit % 8 + bits > 8) word |= static_cast<uint32_t>(packed[bit / 8 + 1]) << 8;
        codes[i] = static_cast<uint8_t>((word >> (bit % 8)) & mask);
    }
}

inline void decode_f32_any(const Table& t, const uint8_t* codes, float* out, int64_t n, float zero, float scale) {
    if (t.integer && t.bits == 8) {
        const int half = t.is_signed ? 128 : 0;
        for (int64_t i = 0; i < n; ++i) out[i] = (static_cast<float>((codes[i] ^ half) - half) - zero) * scale;
        return;
    }
    for (int64_t i = 0; i < n; ++i) out[i] = (t.f32[codes[i]] - zero) * scale;
}

inline void scale_blocks_any(float* values, int64_t count, int64_t first, int64_t block, const float* scales) {
    for (int64_t begin = 0, end = first; begin < count; begin = end, end += block, ++scales) {
        if (end > count) end = count;
        for (int64_t i = begin; i < end; ++i) values[i] *= *scales;
    }
}

inline void decode_bytes_any(const uint8_t* codes, uint8_t* out, int64_t n, uint8_t flip, uint8_t shift) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>((codes[i] ^ flip) + shift);
}

inline void decode_s16_any(const uint8_t* codes, int16_t* out, int64_t n, int half, int zero) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int16_t>(((codes[i] ^ half) - half) - zero);
}

inline void widen_any(const void* values, Element dtype, float* out, int64_t n) {
    const auto* halves = static_cast<const uint16_t*>(values);
    if (dtype == Element::f32) {
        __builtin_memcpy(out, values, static_cast<uint64_t>(n) * 4);
    } else if (dtype == Element::bf16) {
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
            __builtin_memcpy(out + i, &bits, 4);
        }
    } else {
        for (int64_t i = 0; i < n; ++i) out[i] = f16_value(halves[i]);
    }
}

inline void transpose_any(const uint32_t* rows, int64_t stride, uint32_t* panel, int64_t depth) {
    for (int64_t d = 0; d < depth; ++d) {
        for (int n = 0; n < kNr; ++n) panel[d * kNr + n] = rows[n * stride + d];
    }
}

inline void pack_any(const uint32_t* rows, int64_t count, int64_t depth, uint32_t* out) {
    for (int64_t r = 0; r < count; ++r) {
        for (int64_t d = 0; d < depth; ++d) out[d * count + r] = rows[r * kTileStride + d];
    }
}

inline int32_t sum_bytes_any(const uint8_t* bytes, int64_t n) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<int8_t>(bytes[i]);
    return sum;
}

template <class Sum>
inline VecF load_sums(const Sum* from) {
    if constexpr (sizeof(Sum) == 8) {
        VecF v{};
        for (int i = 0; i < kWidth; ++i) v[i] = static_cast<float>(from[i]);
        return v;
    } else if constexpr (__is_same(Sum, float)) {
        return load<VecF>(from);
    } else {
        return to_float(load<VecI>(from));
    }
}

// The first `count` lanes, in the output's dtype; NaN is canonical already.
inline void narrow(VecF v, void* out, Element dtype, int64_t count) {
    if (dtype == Element::f32) {
        __builtin_memcpy(out, &v, static_cast<uint64_t>(count) * 4);
        return;
    }
    uint16_t halves[kWidth];
    if (dtype == Element::bf16) {
        typedef uint32_t VecU __attribute__((vector_size(sizeof(VecF))));
        typedef uint16_t Halves __attribute__((vector_size(sizeof(VecF) / 2)));
        const VecU bits = (VecU)v;
        store(halves, __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves));
    } else {
        float lanes[kWidth];
        store(lanes, v);
        for (int i = 0; i < kWidth; ++i) halves[i] = f16_bits(lanes[i]);
    }
    __builtin_memcpy(out, halves, static_cast<uint64_t>(count) * 2);
}

// Lines that are written soon: every row's are in other pages, which the hardware does not foresee.
inline void fetch_lines(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 1);
}

// Each row fetches the lines of its like in the tile below.
template <class Sum, Element kOut>
void finish_as(const Rows& rows) {
    Row row = rows.row;
    constexpr int64_t kSize = kOut == Element::f32 ? 4 : 2;
    const VecF nan = (VecF)(VecI{} + 0x7fc00000);  // NaN is canonical, whatever made it
    const int64_t whole = row.cols / kWidth * kWidth, below = rows.count * rows.out_stride;
    for (int64_t r = 0; r < rows.count; ++r) {
        const VecF a_scale = broadcast(rows.a_scales == nullptr ? 1.0f : rows.a_scales[r]);
        const Sum* sums = static_cast<const Sum*>(row.sum);
        char* out = static_cast<char*>(row.out);
        auto result = [&](int64_t n) {
            VecF v = load_sums(sums + n);
            if (row.scaled) v = v * (a_scale * load<VecF>(row.b_scale + n));
            if (row.bias != nullptr) v = v + load<VecF>(row.bias + n);
            return v == v ? v : nan;
        };
        if (row.stream && kSize == 4 && reinterpret_cast<uintptr_t>(out) % sizeof(VecF) == 0) {
            for (int64_t n = 0; n < whole; n += kWidth) stream(out + n * kSize, result(n));
        } else {
            if (below != 0) fetch_lines(out + below, row.cols * kSize);
            for (int64_t n = 0; n < whole; n += kWidth) narrow(result(n), out + n * kSize, kOut, kWidth);
        }
        if (whole < row.cols) narrow(result(whole), out + whole * kSize, kOut, row.cols - whole);
        row.sum = static_cast<const char*>(row.sum) + rows.sum_stride;
        row.out = static_cast<char*>(row.out) + rows.out_stride;
    }
}

template <class Sum>
void finish_sums(const Rows& rows) {
    if (rows.row.out_dtype == Element::f32) return finish_as<Sum, Element::f32>(rows);
    if (rows.row.out_dtype == Element::bf16) return finish_as<Sum, Element::bf16>(rows);
    return finish_as<Sum, Element::f16>(rows);
}

inline void finish_rows_any(const Rows& rows) {
    if (rows.row.sum_kind == 0) return finish_sums<float>(rows);
    if (rows.row.sum_kind == 1) return finish_sums<int32_t>(rows);
    return finish_sums<int64_t>(rows);
}

inline void finish_any(const Row& row) {
    Rows rows;
    rows.row = row;
    rows.count = 1;
    rows.a_scales = &row.a_scale;
    finish_rows_any(rows);
}

// Vectors of channels of a pixel as dwords.
template <class Code>
struct Integers {
    using Acc = VecI;
    static constexpr int64_t kBytes = 1;
    static VecI pixel(const uint8_t* from) { return widened(reinterpret_cast<const Code*>(from)); }
    static VecI add(VecI acc, VecI a, VecI b) { return acc + a * b; }
};
struct Floats {
    using Acc = VecF;
    static constexpr int64_t kBytes = 4;
    static VecF pixel(const uint8_t* from) { return load<VecF>(from); }
    static VecF add(VecF acc, VecF a, VecF b) { return fused(a, b, acc); }
};

// Some vectors of channels at a time, whose weights stay in the nearest cache for all pixels.
template <class Type, int kBlock>
void depthwise_block(const Depthwise& d, int64_t channel) {
    using Acc = typename Type::Acc;
    const auto* weights = static_cast<const char*>(d.weights) + channel * 4;
    for (int64_t p = 0; p < d.count; ++p) {
        Acc acc[kBlock];
#pragma GCC unroll 4
        for (int v = 0; v < kBlock; ++v) {
            acc[v] = d.start == nullptr ? Acc{} : load<Acc>(d.start + channel + v * kWidth);
        }
        const uint8_t* const* taps = d.pixels + p * d.taps;
        for (int64_t t = 0; t < d.taps; ++t) {
            const uint8_t* pixel = taps[t] + channel * Type::kBytes;
            const char* weight = weights + t * d.stride * 4;
#pragma GCC unroll 4
            for (int v = 0; v < kBlock; ++v) {
                const Acc x = Type::pixel(pixel + v * kWidth * Type::kBytes);
                acc[v] = Type::add(acc[v], x, load<Acc>(weight + v * kWidth * 4));
            }
        }
        char* to = static_cast<char*>(d.sums) + (p * d.stride + channel) * 4;
#pragma GCC unroll 4
        for (int v = 0; v < kBlock; ++v) store(to + v * kWidth * 4, acc[v]);
    }
}

template <class Type>
void depthwise_any(const Depthwise& d) {
    int64_t channel = 0;
    for (; channel + 4 * kWidth <= d.channels; channel += 4 * kWidth) depthwise_block<Type, 4>(d, channel);
    for (; channel < d.channels; channel += kWidth) depthwise_block<Type, 1>(d, channel);
}

// Everything by the loops above, for products of the kinds named; a file replaces what its instructions do better.
template <class... Dots>
constexpr Kernels plain_kernels() {
    Kernels k;
    k.nr = kNr;
    k.max_rows = LOWBIT_MM_ROWS;
    k.read_lines = read_lines;
    k.unpack = unpack_any;
    k.decode_f32 = decode_f32_any;
    k.scale_blocks = scale_blocks_any;
    k.decode_bytes = decode_bytes_any;
    k.decode_s16 = decode_s16_any;
    k.widen = widen_any;
    k.transpose = transpose_any;
    k.pack = pack_any;
    k.spread = spread_any<false>;
    k.sum_bytes = sum_bytes_any;
    (add_kind<Dots>(k), ...);
    k.depthwise_s8 = depthwise_any<Integers<int8_t>>;
    k.depthwise_u8 = depthwise_any<Integers<uint8_t>>;
    k.depthwise_f32 = depthwise_any<Floats>;
    k.finish = finish_any;
    k.finish_rows = finish_rows_any;
    return k;
}
