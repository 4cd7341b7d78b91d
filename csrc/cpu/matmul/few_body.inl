// Sums of few rows by a panel (few.h), written once; included after gemm_body.inl, in an unnamed namespace.
//
// Dot::bytes(acc, a, b) adds the products of four signed bytes of a with four unsigned ones of b in every lane,
// Dot::nibbles(acc, a, b, a2, b2) those of eight, where b and b2 are at most 15.

// Vectors of sums that stay in registers beside their totals.
constexpr int kFewSums = kWidth == 8 ? 4 : 8;

// Of instruction sets with products of signed and unsigned bytes, Dot.
template <class Dot>
struct FewDotOf {
    static VecI bytes(VecI acc, VecI a, VecI b) { return Dot::dot(acc, a, b); }
    static VecI nibbles(VecI acc, VecI a, VecI b, VecI a2, VecI b2) { return bytes(bytes(acc, a, b), a2, b2); }
};

// Of those without.
struct FewDotAny {
    static VecI bytes(VecI acc, VecI a, VecI b) {
#pragma GCC unroll 4
        for (int i = 0; i < 32; i += 8) acc += (a << (24 - i) >> 24) * (b >> i & 0xff);
        return acc;
    }
    static VecI nibbles(VecI acc, VecI a, VecI b, VecI a2, VecI b2) { return bytes(bytes(acc, a, b), a2, b2); }
};

template <class Dot, int kBits, bool kScaled, int kRows>
void few(const Few& f) {
    constexpr int kAll = kPanelRows / kWidth;
    constexpr int kV = kAll * kRows <= kFewSums ? kAll : kFewSums / kRows > 0 ? kFewSums / kRows : 1;
    constexpr int kEach = kBits == 8 ? 1 : 2;  // dwords of a for a stored one
    for (int part = 0; part < kAll; part += kV) {
        VecF total[kRows][kV] = {};
        const uint32_t* b = f.panel + part * kWidth;
        const uint32_t* a = f.a;
        int64_t segment = 0;
        for (int64_t left = f.dwords; left > 0; left -= f.segment, ++segment) {
            VecI acc[kRows][kV];
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const VecI start = broadcast(static_cast<uint32_t>(f.starts[segment * kRows + r]));
#pragma GCC unroll 8
                for (int v = 0; v < kV; ++v) acc[r][v] = start;
            }
            auto step = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int i = 0; i < kV * kWidth * 4; i += 64) {
                    __builtin_prefetch(reinterpret_cast<const char*>(b) + kStreamAhead + i, 0, 3);
                }
                VecI row[kRows][kEach];
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
                    for (int e = 0; e < kEach; ++e) row[r][e] = broadcast(a[e * kRows + r]);
                }
#pragma GCC unroll 8
                for (int v = 0; v < kV; ++v) {
                    const VecI codes = load<VecI>(b + v * kWidth);
                    if constexpr (kBits == 8) {
#pragma GCC unroll 4
                        for (int r = 0; r < kRows; ++r) acc[r][v] = Dot::bytes(acc[r][v], row[r][0], codes);
                    } else {
                        const VecI low = codes & 0x0f0f0f0f, high = codes >> 4 & 0x0f0f0f0f;
#pragma GCC unroll 4
                        for (int r = 0; r < kRows; ++r) {
                            acc[r][v] = Dot::nibbles(acc[r][v], row[r][0], low, row[r][kEach - 1], high);
                        }
                    }
                }
                a += kEach * kRows;
                b += kPanelRows;
            };
            int64_t count = left < f.segment ? left : f.segment;
            for (; count >= 4; count -= 4) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) step();
            }
            for (; count > 0; --count) step();
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
                for (int v = 0; v < kV; ++v) {
                    const int64_t column = segment * kPanelRows + (part + v) * kWidth;
                    VecI sum = acc[r][v];
                    if (f.b_zeros != nullptr) {
                        const auto of_row = static_cast<uint32_t>(f.a_sums[segment * kRows + r]);
                        sum -= broadcast(of_row) * load<VecI>(f.b_zeros + column);
                    }
                    if constexpr (kScaled) {
                        const VecF scale = broadcast(f.a_scales[segment * kRows + r]) * load<VecF>(f.b_scales + column);
                        total[r][v] = total[r][v] + to_float(sum) * scale;
                    } else {
                        store(static_cast<int32_t*>(f.sums) + r * kPanelRows + (part + v) * kWidth, sum);
                    }
                }
            }
        }
        if constexpr (kScaled) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
                for (int v = 0; v < kV; ++v) {
                    store(static_cast<float*>(f.sums) + r * kPanelRows + (part + v) * kWidth, total[r][v]);
                }
            }
        }
    }
}

template <class Dot, int kBits, bool kScaled>
void few_of(int rows, const Few& f) {
    switch (rows) {
        case 1:
            return few<Dot, kBits, kScaled, 1>(f);
        case 2:
            return few<Dot, kBits, kScaled, 2>(f);
        case 3:
            return few<Dot, kBits, kScaled, 3>(f);
        case 4:
            return few<Dot, kBits, kScaled, 4>(f);
        default:
            __builtin_unreachable();
    }
}

template <class Dot, int kBits>
void run_few(bool scaled, int rows, const Few& f) {
    scaled ? few_of<Dot, kBits, true>(rows, f) : few_of<Dot, kBits, false>(rows, f);
}

template <class Dot>
constexpr void add_few(Kernels& kernels) {
    kernels.few8 = run_few<Dot, 8>;
    kernels.few4 = run_few<Dot, 4>;
}
