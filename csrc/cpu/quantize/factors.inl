// What elements are divided by or multiplied with, and the quotients: docs/numerics.md section 5. Part of
// row_kernels_body.inl.

// One factor, its reciprocal (kReciprocal) and zero point, or those of each lane.
struct Factor {
    F by, inverse, zero;
};

// make(array) of each array of factors, from entry b on; zeros of those that are not there.
template <Factors::Mode mode, class Make>
LOWBIT_INLINE inline Factor factor_at(const Factors& f, int64_t b, const Make& make) {
    return {make(f.each + b), mode == Factors::kReciprocal ? make(f.inverse + b) : F{},
            f.zeros ? make(f.zeros + b) : F{}};
}
// Those of one block.
template <Factors::Mode mode>
LOWBIT_INLINE inline Factor block_factor(const Factors& f, int64_t b) {
    return factor_at<mode>(f, b, [](const float* p) LOWBIT_INLINE { return splat(*p); });
}
// Leaves the first b out.
template <Factors::Mode mode>
LOWBIT_INLINE inline void skip(Factors& f, int64_t b) {
    if (mode == Factors::kNone) return;
    f.each += b;
    if (mode == Factors::kReciprocal) f.inverse += b;
    if (f.zeros) f.zeros += b;
}

// Calls step(i, factor) for every kLanes elements of [0, n), then rest(i, factors) for fewer, whose factors begin
// there.
template <Factors::Mode mode, class Step, class Rest>
LOWBIT_INLINE inline void for_lanes(const Factors& f, int64_t n, const Step& step, const Rest& rest) {
    if (mode == Factors::kNone || mode == Factors::kEach) {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            if (mode == Factors::kNone) {
                step(i, Factor{});
            } else {
                step(i, factor_at<mode>(f, i, load<F>));
            }
        }
        if (i == n) return;
        Factors last = f;
        skip<mode>(last, i);
        return rest(i, last);
    }
    int64_t i = 0, end = f.lead < n ? f.lead : n;
    for (int64_t b = 0; i < n; ++b, end = end + f.width < n ? end + f.width : n) {
        const Factor factor = block_factor<mode>(f, b);
        for (; i + kLanes <= end; i += kLanes) step(i, factor);
        if (i == end) continue;
        Factors last = f;
        skip<mode>(last, b);
        last.lead = last.width = kLanes;
        return rest(i, last);
    }
}

// For vector k of a quad, of blocks of less than a quad. A zipped vector has elements of two vectors' worth: of two
// blocks where one fills but half of it.
template <bool zipped, int width>
LOWBIT_INLINE inline F factor_of(const float* each, int k) {
    const int first = zipped ? k / 2 * 2 : k;
    const F by = splat(each[first * kLanes / width]);
    if (!zipped || width >= 2 * kLanes) return by;
    const F other = splat(each[(first + 1) * kLanes / width]);
    I upper;
    for (int j = 0; j < kLanes; ++j) upper[j] = j < kLanes / 2 ? 0 : -1;
    return upper ? other : by;
}

// Calls quad(i, four factors) for whole quads of whole blocks of `width`, of which a quad has several; advances `left`
// to the rest.
template <Factors::Mode mode, bool zipped, int width, class Quad>
LOWBIT_INLINE inline int64_t quads_of_blocks(Factors& left, int64_t n, const Quad& quad) {
    constexpr int kBlocks = kQuad / width;
    int64_t i = 0;
    if constexpr (kBlocks > 1) {
        for (; i + kQuad <= n; i += kQuad) {
            Factor four[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                four[k] = factor_at<mode>(left, 0,
                                          [k](const float* p) LOWBIT_INLINE { return factor_of<zipped, width>(p, k); });
            }
            skip<mode>(left, kBlocks);
            quad(i, four);
        }
    }
    return i;
}

// The same, with quad(i, four factors) for every kQuad elements of one block or of whole ones.
template <Factors::Mode mode, bool zipped, class Quad, class Step, class Rest>
LOWBIT_INLINE inline void for_quads(const Factors& f, int64_t n, const Quad& quad, const Step& step, const Rest& rest) {
    if (mode == Factors::kEach) return for_lanes<mode>(f, n, step, rest);
    int64_t i = 0;
    Factors left = f;
    if (mode != Factors::kNone && f.lead == f.width && f.width == 16) {
        i = quads_of_blocks<mode, zipped, 16>(left, n, quad);
    } else if (mode != Factors::kNone && f.lead == f.width && f.width == 32) {
        i = quads_of_blocks<mode, zipped, 32>(left, n, quad);
    }
    // A whole number of quads a block, or one block.
    while (i + kQuad <= n && (mode == Factors::kNone || left.lead % kQuad == 0 || left.lead >= n - i)) {
        const Factor by = mode == Factors::kNone ? Factor{} : block_factor<mode>(left, 0);
        const Factor four[4] = {by, by, by, by};
        const int64_t end = mode == Factors::kNone || left.lead >= n - i ? n : i + left.lead;
        for (; i + kQuad <= end; i += kQuad) quad(i, four);
        if (end == n) {
            left.lead = n - i;
            break;
        }
        skip<mode>(left, 1);
        left.lead = left.width;
    }
    if (i == n) return;
    for_lanes<mode>(
        left, n - i, [&](int64_t j, const Factor& factor) LOWBIT_INLINE { step(i + j, factor); },
        [&](int64_t j, const Factors& factors) { rest(i + j, factors); });
}

// Fewer than kLanes elements, in arrays that hold as many.
template <class Element>
struct Padded {
    Element x[kLanes] = {};
    uint16_t noise[kLanes] = {};
    float each[kLanes] = {}, zeros[kLanes] = {};
    Factors factors;
    Padded(const Element* from, int64_t n, const Factors& f, const uint16_t* random) : factors(f) {
        __builtin_memcpy(x, from, static_cast<size_t>(n) * sizeof *x);
        if (random) __builtin_memcpy(noise, random, static_cast<size_t>(n) * sizeof *noise);
        if (f.mode != Factors::kEach) return;
        __builtin_memcpy(each, f.each, static_cast<size_t>(n) * sizeof *each);
        factors.each = each;
        if (!f.zeros) return;
        __builtin_memcpy(zeros, f.zeros, static_cast<size_t>(n) * sizeof *zeros);
        factors.zeros = zeros;
    }
};

// x / factor: its magnitude (a NaN with any sign bit), its sign in the top bit, the others being anything; or both at
// once (NaN's sign is lost).
struct Quotient {
    U magnitude, sign;
    F value;
    U bits() const { return (magnitude & kMagnitude) | (sign & kSign); }
};

// x / s, correctly rounded, from r = 1 / s, correctly rounded: q = x * r, then r times the remainder x - q * s on top
// (Markstein 1990; Brisebarre, Muller, Raina, Accelerating correctly rounded floating-point division when the divisor
// is known in advance, IEEE Trans. Computers 53(8), 2004). Why, where nothing underflows or overflows: let X and S be
// the significands as 24-bit integers, R = 2^47 / S + d that of r, |d| <= 1/2; and in units of the quotient's last
// place N the quotient, P the product before and n after it is rounded: |n - P| <= 1/2; |P - N| is X |d| / 2^23 < 1, of
// X >= S half of that. The remainder is E = S (N - n), and what is rounded at last n + E R / 2^47 = N + E d / 2^47.
// That is wrong only if not on N's side of the midpoint M nearest to N, from which N is |F| / 2S away, for an integer F
// that is not 0, since no quotient is a midpoint.
//   n next to M: |E| <= (S + |F|) / 2 <= S, hence exact, and |E d| / 2^47 <= (S + |F|) / 2^49 < |F| / 2S.
//   n beyond, |N - n| < 3/2: E is rounded by 1 at most, which adds 2^-23, so |F| < 2S |E d| / 2^47 + 4 < 7; |P - M| is
//   1 at least, so X |d| >= 2^23 - |F| / 2. Then 2^24 - 8 < X < S, and N is within 2^-18 of a whole number, far from M.
// Plain scales (row_kernels.h) have normal r, and q without overflow. Where |x / s| >= 2^-33, q is normal and the
// remainder a multiple of 2^(-34 - 23) * 2^(-64 - 23); below, results are less than 2^-32, and encoded like zero as x /
// s is (Encoder::coarse). A scale of 0, with 0 for its reciprocal, gives 0. Elements that may be anything, Inf among
// them, are clamped to what gives 2^63, which is encoded like Inf (Encoder::coarse); NaN stays.
LOWBIT_INLINE inline F quotient_by(F x, const Factor& factor) {
    const F q = x * factor.inverse;
    return fused(fused(-q, factor.by, x), factor.inverse, q);
}

struct Divide {
    const U magnitude = held(kMagnitude);
    template <Factors::Mode mode, bool finite>
    LOWBIT_INLINE Quotient by(U x, const Factor& factor) const {
        const U a = x & magnitude, d = (U)factor.by;
        if (mode == Factors::kNone) return {a, x, (F)x};
        if (mode == Factors::kInverse) return {(U)((F)a * factor.by), x, (F)x * factor.by};
        if (mode == Factors::kReciprocal && finite) return {(U)quotient_by((F)a, factor), x, quotient_by((F)x, factor)};
        if (mode == Factors::kReciprocal) {
            const F most = factor.by * splat(0x1p63f), v = smaller(most, larger(-most, (F)x));
            return {(U)quotient_by(smaller(most, (F)a), factor), x, quotient_by(v, factor)};
        }
        return {(U)((F)a / (F)(d & magnitude)), x ^ d, (F)x / factor.by};
    }
};
