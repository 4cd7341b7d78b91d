// Register tiles, written once on vectors of LOWBIT_MM_WIDTH dwords.
//
// Included by one file per instruction set, in an unnamed namespace, after that file has defined LOWBIT_MM_WIDTH,
// LOWBIT_MM_ROWS and LOWBIT_MM_PACKED4_ROWS (rows of a tile, at most) and `fused(a, b, c)` (a * b + c, fused where the
// instruction set can). Nothing here may be seen by another file.

constexpr int kWidth = LOWBIT_MM_WIDTH;
constexpr int kVectors = 2;  // vectors of a tile's row
constexpr int kNr = kVectors * kWidth;

// A vector of dwords from anywhere in memory.
template <class V>
inline V load(const void* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
inline void store(void* to, V v) {
    __builtin_memcpy(to, &v, sizeof v);
}

inline VecI broadcast(uint32_t dword) { return VecI{} + static_cast<int32_t>(dword); }
inline VecF broadcast(float value) {
    int32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return (VecF)(VecI{} + bits);
}

struct DotF32 {
    using Acc = VecF;
    static constexpr Kind kind = Kind::f32;
    static constexpr bool kFromMemory = false;
    static VecF dot(VecF acc, VecI a, VecI b) { return fused((VecF)a, (VecF)b, acc); }
};

// Whether sums are corrected for what operands are too large by; see Tile.
template <class Dot>
constexpr bool kCorrected = Dot::kind == Kind::s8u8;

template <class Acc>
inline VecF to_float(Acc acc) {
    if constexpr (sizeof(Acc) == sizeof(VecF) && __is_same(Acc, VecF)) {
        return acc;
    } else {
        return __builtin_convertvector(acc, VecF);
    }
}

// Adds the sums of rows [row, row + kRows) of a tile to c; see Tile. Scaled: the product of the scales comes first,
// nothing is fused, and c starts from 0, as docs/numerics.md section 9 has it for integers.
template <class Dot, bool kScaled, bool kFresh, int kRows>
inline void put_sums(const Tile& t, int row, const typename Dot::Acc (&acc)[kRows][kVectors]) {
    using Acc = typename Dot::Acc;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            char* at = static_cast<char*>(t.c) + ((row + r) * t.c_stride + v * kWidth) * 4;
            if constexpr (kScaled) {
                const VecF scale = broadcast(t.a_scale[row + r]) * load<VecF>(t.b_scale + v * kWidth);
                const VecF term = to_float(acc[r][v]) * scale;
                store(at, (kFresh ? VecF{} : load<VecF>(at)) + term);
            } else if constexpr (kFresh || __is_same(Acc, VecF)) {
                store(at, acc[r][v]);  // fp32 sums started from c
            } else {
                store(at, load<VecI>(at) + acc[r][v]);
            }
        }
    }
}

// The same after the corrections. By value: stores to c cannot change it.
template <class Dot, bool kScaled, int kRows>
inline void add_sums(const Tile t, int row, typename Dot::Acc (&acc)[kRows][kVectors]) {
    if constexpr (kCorrected<Dot>) {
        auto correct = [&](const int32_t* of_rows, const int32_t* of_columns) {
            if (of_rows == nullptr || of_columns == nullptr) return;
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                    const VecI less = load<VecI>(of_columns + v * kWidth);
                    acc[r][v] -= broadcast(static_cast<uint32_t>(of_rows[row + r])) * less;
                }
            }
        };
        correct(t.a_zero, t.b_sum);
        correct(t.a_sum, t.b_zero);
    }
    t.fresh ? put_sums<Dot, kScaled, true>(t, row, acc) : put_sums<Dot, kScaled, false>(t, row, acc);
}

template <class Dot, bool kScaled, int kRows>
inline void start_sums(const Tile& t, typename Dot::Acc (&acc)[kRows][kVectors]) {
    using Acc = typename Dot::Acc;
    // fp32 sums go on from c, which makes one chain over all of K whatever the tiles.
    constexpr bool kResume = __is_same(Acc, VecF) && !kScaled;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            acc[r][v] = Acc{};
            if constexpr (kCorrected<Dot>) {
                if (t.start != nullptr) acc[r][v] = broadcast(static_cast<uint32_t>(t.start[r]));
            } else if constexpr (kResume) {
                if (!t.fresh) acc[r][v] = load<VecF>(static_cast<float*>(t.c) + r * t.c_stride + v * kWidth);
            }
        }
    }
}

// Adds the products of one dword of depth. Dot::kFromMemory: every third row's dwords are operands in memory of the
// multiplications (`dot_at`), which saves the instruction that would broadcast them to a register, at the price of a
// second load.
template <class Dot, int kRows>
__attribute__((always_inline)) inline void add_products(const uint32_t* a, const VecI (&column)[kVectors],
                                                        typename Dot::Acc (&acc)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        if constexpr (Dot::kFromMemory) {
            if (r % 3 == 1) {
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Dot::dot_at(acc[r][v], a[r], column[v]);
                continue;
            }
        }
        const VecI row = broadcast(a[r]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) acc[r][v] = Dot::dot(acc[r][v], row, column[v]);
    }
}

inline void fetch_ahead(const uint32_t* stream) {
#pragma GCC unroll 4
    for (int i = 0; i < kNr * 4; i += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(stream) + kStreamAhead + i, 0, 3);
}

// Of packed codes. Narrow tiles pass over a panel several times, and what comes next must be there after the first.
inline void fetch_packed(const uint32_t* packed) {
    if constexpr (kNr == kPanelRows) return fetch_ahead(packed);
    __builtin_prefetch(reinterpret_cast<const char*>(packed) + kPanelAhead, 0, 2);
}

template <class Dot, bool kScaled, int kRows>
void tile(const Tile& t) {
    typename Dot::Acc acc[kRows][kVectors];
    start_sums<Dot, kScaled>(t, acc);
    const uint32_t* a = t.a;
    const uint32_t* b = t.b;
    auto step = [&]() __attribute__((always_inline)) {
        VecI column[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) column[v] = load<VecI>(b + v * kWidth);
        add_products<Dot>(a, column, acc);
        a += kRows;
        b += kNr;
    };
    const uint8_t* const* ahead = t.ahead;
    int64_t d = t.depth;
    if constexpr (kRows <= kStreamedRows) {
        for (; t.streamed && d >= kAheadSteps; d -= kAheadSteps) {
#pragma GCC unroll 4
            for (int i = 0; i < kAheadSteps; ++i) {
                fetch_ahead(b);
                step();
            }
        }
    }
    for (; d >= kAheadSteps; d -= kAheadSteps) {
        __builtin_prefetch(*ahead++, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < kAheadSteps; ++i) step();
    }
    for (; d > 0; --d) step();
    add_sums<Dot, kScaled>(t, 0, acc);
}

// The same of b's packed dwords of 4-bit codes (packed.h), each of which is two dwords of depth. Dot::kPairs: both
// are multiplied at once.
template <class Dot, bool kScaled, int kRows>
void packed4_tile(const Tile& t) {
    typename Dot::Acc acc[kRows][kVectors];
    start_sums<Dot, kScaled>(t, acc);
    const uint32_t* a = t.a;
    const uint32_t* b = t.b;
    auto step = [&](bool both) __attribute__((always_inline)) {
        VecI low[kVectors], high[kVectors];
        fetch_packed(b);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            const VecI packed = load<VecI>(b + v * kWidth);
            low[v] = packed & 0x0f0f0f0f;
            high[v] = packed >> 4 & 0x0f0f0f0f;
        }
        if constexpr (Dot::kPairs) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const VecI first = broadcast(a[r]), second = both ? broadcast(a[kRows + r]) : VecI{};
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Dot::dot(acc[r][v], first, low[v], second, high[v]);
            }
        } else {
            add_products<Dot>(a, low, acc);
            if (both) add_products<Dot>(a + kRows, high, acc);
        }
        a += 2 * kRows;
        b += kPanelRows;
    };
    for (int64_t d = 0; d + 1 < t.depth; d += 2) step(true);
    if (t.depth % 2 != 0) step(false);
    add_sums<Dot, kScaled>(t, 0, acc);
}

// The same of 8-bit codes, which become two dwords of words: Dot::words(dwords, 0 or 1).
template <class Dot, bool kScaled, int kRows>
void byte_tile(const Tile& t) {
    typename Dot::Acc acc[kRows][kVectors];
    start_sums<Dot, kScaled>(t, acc);
    const uint32_t* a = t.a;
    const uint32_t* b = t.b;
    auto step = [&](int half) __attribute__((always_inline)) {
        VecI column[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) column[v] = Dot::words(load<VecI>(b + v * kWidth), half);
        add_products<Dot>(a, column, acc);
        a += kRows;
    };
    for (int64_t d = 0; d + 1 < t.depth; d += 2, b += kPanelRows) {
        fetch_packed(b);
        step(0);
        step(1);
    }
    if (t.depth % 2 != 0) step(0);
    add_sums<Dot, kScaled>(t, 0, acc);
}

// Packed codes (packed.h) to bytes of s8u8, or to words of s16.
template <bool kBytes>
void spread_any(const uint32_t* packed, int64_t count, int bits, const int32_t* zeros, uint32_t* panel) {
    typedef int16_t Words __attribute__((vector_size(sizeof(VecI))));
    constexpr int kDwords = kBytes ? 1 : 2;  // of four codes
    Words less[kVectors];
    for (int v = 0; v < kVectors; ++v) {
        const VecI zero = load<VecI>(zeros + v * kWidth);
        less[v] = (Words)((zero & 0xffff) | zero << 16);
    }
    auto put = [&](VecI bytes, int v) __attribute__((always_inline)) {
        uint32_t* to = panel + v * kWidth;
        if constexpr (kBytes) {
            store(to, bytes);
        } else {
            store(to, (Words)((bytes & 0xff) | (bytes & 0xff00) << 8) - less[v]);
            store(to + kNr, (Words)((bytes >> 16 & 0xff) | (bytes >> 8 & 0xff0000)) - less[v]);
        }
    };
    for (int64_t d = 0; d < count; ++d, packed += kPanelRows) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            const VecI x = load<VecI>(packed + v * kWidth);
            put(bits == 8 ? x : x & 0x0f0f0f0f, v);
        }
        panel += kDwords * kNr;
        if (bits == 8) continue;
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) put(load<VecI>(packed + v * kWidth) >> 4 & 0x0f0f0f0f, v);
        panel += kDwords * kNr;
    }
}

// fp32 operands have their scales multiplied in when they are decoded, so their tiles have none.
template <class Dot, bool kScaled>
void tile_of(int rows, const Tile& t) {
    if constexpr (kScaled && Dot::kind == Kind::f32)
        __builtin_unreachable();
    else
        switch (rows) {
            case 1:
                return tile<Dot, kScaled, 1>(t);
            case 2:
                return tile<Dot, kScaled, 2>(t);
            case 4:
                return tile<Dot, kScaled, 4>(t);
            case 6:
                return tile<Dot, kScaled, 6>(t);
#if LOWBIT_MM_ROWS > 6
            case 8:
                return tile<Dot, kScaled, 8>(t);
#endif
#if LOWBIT_MM_ROWS > 8
            case 10:
                return tile<Dot, kScaled, 10>(t);
            case 12:
                return tile<Dot, kScaled, 12>(t);
            case 14:
                return tile<Dot, kScaled, 14>(t);
#endif
            default:
                __builtin_unreachable();
        }
}

template <class Dot, bool kScaled>
void packed4_tile_of(int rows, const Tile& t) {
    switch (rows) {
        case 1:
            return packed4_tile<Dot, kScaled, 1>(t);
        case 2:
            return packed4_tile<Dot, kScaled, 2>(t);
        case 4:
            return packed4_tile<Dot, kScaled, 4>(t);
#if LOWBIT_MM_PACKED4_ROWS > 4
        case 6:
            return packed4_tile<Dot, kScaled, 6>(t);
        case 8:
            return packed4_tile<Dot, kScaled, 8>(t);
#endif
        default:
            __builtin_unreachable();
    }
}

template <class Dot>
void run_packed4_tile(bool scaled, int rows, const Tile& t) {
    scaled ? packed4_tile_of<Dot, true>(rows, t) : packed4_tile_of<Dot, false>(rows, t);
}

template <class Dot>
void run_tile(bool scaled, int rows, const Tile& t) {
    scaled ? tile_of<Dot, true>(rows, t) : tile_of<Dot, false>(rows, t);
}

// `steps` times as many independent products as hide an instruction's latency, of nothing in memory.
template <class Dot>
int64_t spin(int64_t steps) {
    constexpr int kChains = 12;
    static volatile int32_t zero = 0;
    const VecI a = VecI{} + zero, b = a;
    typename Dot::Acc acc[kChains];
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = (typename Dot::Acc)(a + i);
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) acc[i] = Dot::dot(acc[i], a, b);
    }
#pragma GCC unroll 12
    for (int i = 1; i < kChains; ++i) acc[0] += acc[i];
    if (((VecI)acc[0])[0] == 1) zero = 0;  // the sums are used
    return steps * kChains * kWidth * elements_per_dword(Dot::kind) * 2;
}

// Reads whole lines of 256 bytes, for benchmarks.
inline int32_t read_lines(const void* data, int64_t lines) {
    constexpr int kEach = 256 / sizeof(VecI);
    const char* from = static_cast<const char*>(data);
    VecI sums[kEach] = {};
    for (; lines > 0; --lines, from += 256) {
#pragma GCC unroll 16
        for (int i = 0; i < kEach; ++i) sums[i] ^= load<VecI>(from + i * sizeof(VecI));
    }
    for (int i = 1; i < kEach; ++i) sums[0] ^= sums[i];
    return sums[0][0];
}

// The arithmetic that `Dot` stands for, in a table of kernels.
template <class Dot>
constexpr void add_kind(Kernels& kernels) {
    kernels.tile[static_cast<int>(Dot::kind)] = run_tile<Dot>;
    kernels.spin[static_cast<int>(Dot::kind)] = spin<Dot>;
}
