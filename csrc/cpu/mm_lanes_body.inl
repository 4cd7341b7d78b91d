// Rows of a as lanes; see mm_few.h. Included by mm_few_body.inl. An instruction set defines `fused_dword(a, b, c)`,
// a * (the fp32 at b) + c.

constexpr int kTileCols = kWidth == 16 ? 28 : 12;  // with one vector of a; half as many with two
// Dwords from one vector of a row to the next: the rows' vectors stand side by side, so that those of a tile are
// reached by displacements of one byte. With longer ones, what a processor fetches of instructions would bind.
constexpr int64_t kNext = kTileCols * kWidth;
constexpr int kNear = 14;  // rows that one pointer reaches

// fp32((code - zero) * scale) of each row, vector after vector.
template <class D, bool kZeros>
void decode_floats(const Lanes& t) {
    const D unit(t.table);
    for (int64_t n = 0; n < t.count; ++n) {
        const uint8_t* from = t.b[n] + t.at;
        uint32_t* out = t.decoded + n * kWidth;
        int64_t block = t.block;
        for (int64_t left = t.steps; left > 0; block += t.per_step) {
            const int64_t here = left < t.block_steps ? left : t.block_steps;
            left -= here;
            const VecF scale = (VecF)spread(t, t.scales[n] + block);
            const VecF zero = kZeros ? to_float(spread(t, t.zeros[n] + block)) : VecF{};
            auto put = [&](auto value) {
                for (int64_t s = 0; s < here; ++s, from += D::kBytes) {
                    const typename D::Raw raw = unit.fetch(from);
#pragma GCC unroll 8
                    for (int v = 0; v < D::kVectors; ++v, out += kNext) store(out, value(raw, v));
                }
            };
            if constexpr (D::kLooksUp) {  // the scale goes into the table
                if (t.per_step <= 1) {
                    const VecF table = (kZeros ? unit.table - zero : unit.table) * scale;
                    put([&](typename D::Raw raw, int v) { return D::look_up(raw, v, table); });
                    continue;
                }
            }
            put([&](typename D::Raw raw, int v) {
                return (kZeros ? unit.at(raw, v) - zero : unit.at(raw, v)) * scale;
            });
        }
    }
}

// Of every block of a piece the scale, those of a block side by side.
inline void put_levels(const Lanes& t, int64_t blocks) {
    for (int64_t n = 0; n < t.count; ++n) {
        for (int64_t i = 0; i < blocks; ++i) t.levels[i * kLaneCols + n] = t.scales[n][t.block + i];
    }
}

inline int64_t blocks_in(const Lanes& t) {
    return t.per_step > 1 ? t.steps * t.per_step : (t.steps - 1) / t.block_steps + 1;
}

// Codes as the unit has them, whose sums are scaled block by block.
template <class D>
void decode_codes(const Lanes& t) {
    const D unit(t.table);
    put_levels(t, blocks_in(t));
    for (int64_t n = 0; n < t.count; ++n) {
        const uint8_t* from = t.b[n] + t.at;
        uint32_t* out = t.decoded + n * kWidth;
        for (int64_t s = 0; s < t.steps; ++s, from += D::kBytes) {
            const typename D::Raw raw = unit.fetch(from);
#pragma GCC unroll 8
            for (int v = 0; v < D::kVectors; ++v, out += kNext) store(out, unit.at(raw, v));
        }
    }
}

template <class D, bool kBlocks, int kVectors, int kCount>
void lane_dots(const Lanes& t) {
    using Acc = typename D::Acc;
    constexpr int64_t kPiece = kLaneDepth / (D::kVectors * kWidth) * D::kBytes;  // of a row's codes
    Acc acc[kCount][kVectors];
    const uint8_t *a = t.a, *const *ahead = t.ahead, *const *const last = ahead + kCount;
    uint8_t* const sums = t.sums;
    const int64_t pitch = t.pitch, ahead_at = t.ahead_at;
    // Near the rows; unrelated, for all that the compiler knows.
    const uint32_t *low = t.decoded + kNear / 2 * kWidth, *high = low + kNear * kWidth;
    asm("" : "+r"(low), "+r"(high));
    auto two_steps = [&](int64_t place) __attribute__((always_inline)) {
        const uint32_t *const b = low + place, *const far = high + place;
#pragma GCC unroll 2
        for (int d = 0; d < 2; ++d, a += kVectors * kVectorBytes) {
            VecI x[kVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) x[v] = load<VecI>(a + v * kVectorBytes);
#pragma GCC unroll 28
            for (int n = 0; n < kCount; ++n) {
                const uint32_t* code = (n < kNear ? b : far) + (n % kNear - kNear / 2) * kWidth + d;
                if constexpr (kVectors == 1) {
                    acc[n][0] = D::times(acc[n][0], x[0], code);
                } else {
                    const VecI spread = broadcast(*code);
                    for (int v = 0; v < kVectors; ++v) acc[n][v] = D::times(acc[n][v], x[v], spread);
                }
            }
        }
    };
    // A row of a later piece for every four steps.
    auto fetch = [&]() __attribute__((always_inline)) {
        if (ahead == last) return;
        const uint8_t* line = *ahead++ + ahead_at;
        asm("" : "+r"(line));
#pragma GCC unroll 8
        for (int64_t i = 0; i < kPiece; i += 64) __builtin_prefetch(line + i, 0, 2);
    };
    auto each = [&](auto f) __attribute__((always_inline)) {
#pragma GCC unroll 28
        for (int n = 0; n < kCount; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) f(acc[n][v], n, sums + n * pitch + v * kVectorBytes);
        }
    };
    if constexpr (!kBlocks) {
        each([](Acc& x, int, uint8_t* sum) { x = load<Acc>(sum); });
        for (int64_t left = t.dwords; left > 0; left -= kWidth, low += kNext, high += kNext) {
            for (int d = 0; d < kWidth; d += 4) {
                fetch();
                two_steps(d);
                two_steps(d + 2);
            }
        }
        each([](Acc& x, int, uint8_t* sum) { store(sum, x); });
    } else {
        const float* level = t.levels;
        const int32_t *start = t.starts, *place = t.places;
        for (int64_t left = t.dwords; left > 0; level += kLaneCols, start += kLaneCols) {
            each([&](Acc& x, int n, uint8_t*) {
                x = __is_same(Acc, VecI) ? (Acc)broadcast(static_cast<uint32_t>(start[n])) : Acc{};
            });
            const int64_t here = left < t.block_dwords ? left : t.block_dwords;
            left -= here;
            for (int64_t d = 0; d < here; d += 4, place += 4) {
                fetch();
                two_steps(place[0]);
                two_steps(place[2]);
            }
            each([&](Acc& x, int n, uint8_t* sum) {
                store(sum, fused(to_float(x), broadcast(level[n]), load<VecF>(sum)));
            });
        }
    }
}

template <class D, bool kBlocks, int... i>
constexpr void add_lane_dots(LaneUnit& u, std::integer_sequence<int, i...>) {
    ((u.dots[kBlocks][0][i] = lane_dots<D, kBlocks, 1, (kTileCols >> i)>), ...);
    if constexpr (2 * kWidth <= kFewRows)
        ((u.dots[kBlocks][1][i] = lane_dots<D, kBlocks, 2, (kTileCols / 2 >> i)>), ...);
}

template <class D, bool kMore>
constexpr void add_lanes(LaneUnit& u) {
    constexpr std::make_integer_sequence<int, kLaneSizes> sizes;
    if constexpr (D::kInput == FewInput::f32) {
        u.decode[0] = decode_floats<D, false>;
        if constexpr (kMore) u.decode[1] = decode_floats<D, true>;
        add_lane_dots<D, false>(u, sizes);
    } else if constexpr (D::kInput == FewInput::bf16) {
        u.decode[0] = decode_codes<D>;
        add_lane_dots<D, true>(u, sizes);
    }
}

template <class T, int... i>
inline T zip(T a, T b, int half, std::integer_sequence<int, i...>) {
    const T low = {(i / 2 + i % 2 * kWidth)...}, high = {(i / 2 + i % 2 * kWidth + kWidth / 2)...};
    return __builtin_shuffle(a, b, half == 0 ? low : high);
}

// Perfect shuffles of the rows, log2(kWidth) times.
inline void turn(const uint8_t* const* from, int64_t at, uint8_t* to, int64_t pitch, const int32_t* places) {
    constexpr auto kLanes = std::make_integer_sequence<int, kWidth>();
    VecI v[kWidth], w[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) v[i] = load<VecI>(from[i] + at);
#pragma GCC unroll 4
    for (int stage = 1; stage < kWidth; stage *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < kWidth / 2; ++i) {
            w[2 * i] = zip(v[i], v[i + kWidth / 2], 0, kLanes);
            w[2 * i + 1] = zip(v[i], v[i + kWidth / 2], 1, kLanes);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) v[i] = w[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) store(to + (places == nullptr ? i : places[i]) * pitch, v[i]);
}

// Modulo 2^32, as the exact sums fit.
inline void correct(int32_t* sums, int64_t count, int vectors, const int32_t* totals, const int32_t* zeros,
                    const int32_t* a_zeros, const int32_t* a_sums) {
    typedef uint32_t VecU __attribute__((vector_size(kVectorBytes)));
    for (int64_t n = 0; n < count; ++n) {
        const VecU total = VecU{} + static_cast<uint32_t>(totals[n]), zero = VecU{} + static_cast<uint32_t>(zeros[n]);
        for (int v = 0; v < vectors; ++v, sums += kWidth) {
            const VecU less = load<VecU>(a_zeros + v * kWidth) * total + load<VecU>(a_sums + v * kWidth) * zero;
            store(sums, load<VecU>(sums) - less);
        }
    }
}
