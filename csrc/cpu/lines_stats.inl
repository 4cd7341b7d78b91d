// The magnitudes that scales are made from: docs/numerics.md section 5. Part of lines_body.inl.

// Magnitudes as signed integers: numbers of the other sign are negative, and so never raise a maximum that starts at 0.
// 16-bit floats are compared as the 16-bit integers that they are, two in a lane.
template <class Type>
struct Extremes {
    typedef int16_t Halves __attribute__((vector_size(sizeof(U))));
    static constexpr bool kHalf = sizeof(typename Type::Element) == 2;
    static constexpr int kStep = kHalf ? 2 * kLanes : kLanes;  // elements of a vector
    using Words = std::conditional_t<kHalf, Halves, I>;

    Words most{}, least{};
    const Words flip, clear;
    explicit Extremes(bool affine)
        : flip((Words)splat(kHalf ? kSign | kSign >> 16 : kSign)), clear(affine ? ~Words{} : ~flip) {}

    LOWBIT_INLINE static Words larger(Words a, Words b) { return a > b ? a : b; }
    LOWBIT_INLINE void add(const void* p, bool affine) {
        const Words bits = load<Words>(p) & clear;
        most = larger(most, bits);
        if (affine) least = larger(least, bits ^ flip);
    }
    // The larger of the elements in each lane, as fp32 bits.
    LOWBIT_INLINE static I lanes(Words v) {
        if constexpr (!kHalf) {
            return v;
        } else {
            const I high = (I)v >> 16, low = (I)((U)v << 16) >> 16;
            return (I)Type::widened((U)(high > low ? high : low));
        }
    }
};

inline I maximum(I a, I b) { return a > b ? a : b; }

// Both maxima of n elements. Fewer than a vector are padded with zeros, which raise nothing.
template <class Type>
void stats_of(const typename Type::Element* x, int64_t n, bool affine, uint32_t& high, uint32_t& low) {
    constexpr int64_t kStep = Extremes<Type>::kStep;
    Extremes<Type> found(affine);
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        found.add(x + i, affine);
    }
    if (i < n) {
        typename Type::Element padded[kStep] = {};
        __builtin_memcpy(padded, x + i, static_cast<size_t>(n - i) * sizeof *x);
        found.add(padded, affine);
    }
    const uint32_t top = static_cast<uint32_t>(largest(found.lanes(found.most))),
                   bottom = static_cast<uint32_t>(largest(found.lanes(found.least)));
    if (top > high) high = top;
    if (affine && bottom > low) low = bottom;
}

// Vectors whose lanes are folded pairwise, until each is one lane.
LOWBIT_INLINE inline I folded(I (&v)[kLanes]) {
#pragma GCC unroll 8
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
        for (int k = 0; k < half; ++k) v[k] = maximum(evens(v[2 * k], v[2 * k + 1]), odds(v[2 * k], v[2 * k + 1]));
    }
    return v[0];
}

// kLanes blocks of whole vectors at once. Of 16-bit floats that fill no vector, fp32 is made.
template <class Type>
void stats_of_blocks(const typename Type::Element* x, int64_t block, bool affine, uint32_t* high, uint32_t* low) {
    const bool whole = block % Extremes<Type>::kStep == 0;
    I most[kLanes], least[kLanes];
    for (int k = 0; k < kLanes; ++k, x += block) {
        if (whole) {
            Extremes<Type> found(affine);
            for (int64_t i = 0; i < block; i += found.kStep) {
                found.add(x + i, affine);
            }
            most[k] = found.lanes(found.most);
            if (affine) least[k] = found.lanes(found.least);
            continue;
        }
        Extremes<Float32> found(affine);
        for (int64_t i = 0; i < block; i += kLanes) {
            const U bits = Type::read(x + i);
            found.add(&bits, affine);
        }
        most[k] = found.most;
        least[k] = found.least;
    }
    store(high, maximum(folded(most), load<I>(high)));
    if (affine) store(low, maximum(folded(least), load<I>(low)));
}

void block_stats(const void* x, Dtype dtype, int64_t n, int64_t block, bool affine, uint32_t* high, uint32_t* low) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        uint32_t unused = 0;
        int64_t b = 0;
        if (block % kLanes == 0) {
            for (; (b + kLanes) * block <= n; b += kLanes) {
                stats_of_blocks<Type>(p + b * block, block, affine, high + b, affine ? low + b : nullptr);
            }
        }
        for (; b * block < n; ++b) {
            const int64_t rest = n - b * block;
            stats_of<Type>(p + b * block, rest < block ? rest : block, affine, high[b], affine ? low[b] : unused);
        }
    });
}

void column_stats(const void* x, Dtype dtype, int64_t n, bool affine, uint32_t* high, uint32_t* low) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        const U clear = splat(affine ? ~0u : kMagnitude);
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            const U bits = Type::read(p + i) & clear;
            const I top = load<I>(high + i);
            store(high + i, (I)bits > top ? (I)bits : top);
            if (!affine) continue;
            const I flipped = (I)(bits ^ kSign), bottom = load<I>(low + i);
            store(low + i, flipped > bottom ? flipped : bottom);
        }
        if (i < n) lines_scalar().column_stats(p + i, dtype, n - i, affine, high + i, affine ? low + i : nullptr);
    });
}

uint32_t finite_amax(const void* x, Dtype dtype, int64_t n) {
    uint32_t found = 0;
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        I most{};
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            __builtin_prefetch(p + i + 512);
            const I bits = (I)(Type::read(p + i) & kMagnitude);
            most = (bits > most) & (bits < static_cast<int32_t>(kInf)) ? bits : most;
        }
        const uint32_t rest = lines_scalar().finite_amax(p + i, dtype, n - i);
        found = static_cast<uint32_t>(largest(most));
        if (rest > found) found = rest;
    });
    return found;
}
