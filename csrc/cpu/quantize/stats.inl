// The magnitudes that scales are made from: docs/numerics.md section 5. Part of row_kernels_body.inl.

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

constexpr int64_t kAheadOfStats = 512;  // elements that are fetched ahead, where blocks are long (`far`)

// Both maxima of n elements. Fewer than a vector are padded with zeros, which raise nothing.
template <class Type>
void stats_of(const typename Type::Element* x, int64_t n, bool far, bool affine, uint32_t& high, uint32_t& low) {
    constexpr int64_t kStep = Extremes<Type>::kStep;
    Extremes<Type> found(affine);
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        if (far) __builtin_prefetch(x + i + kAheadOfStats);
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

// One vector of the lanes of n vectors, folded pairwise until each is one lane: those of leaf(0), leaf(1), ... in
// order. Depth first, so that few are alive at a time.
template <class Words, int n, class Leaf>
LOWBIT_INLINE inline Words folded(const Leaf& leaf, int first) {
    if constexpr (n == 1) {
        return leaf(first);
    } else {
        const I a = (I)folded<Words, n / 2>(leaf, first), b = (I)folded<Words, n / 2>(leaf, first + n / 2);
        const Words even = (Words)evens(a, b), odd = (Words)odds(a, b);
        return even > odd ? even : odd;
    }
}

inline void raise(uint32_t* to, I found) {
    const I before = load<I>(to);
    store(to, found > before ? found : before);
}

// kLanes blocks of whole vectors at once: of `vectors`, or of any number if that is 0.
template <class Type, bool affine, int vectors>
void stats_of_blocks(const typename Type::Element* x, int64_t any, uint32_t* high, uint32_t* low) {
    const int64_t block = vectors ? vectors * Extremes<Type>::kStep : any;
    I least[kLanes];
    const auto most = [&](int k) LOWBIT_INLINE {
        Extremes<Type> found(affine);
        for (int64_t i = k * block; i < (k + 1) * block; i += found.kStep) found.add(x + i, affine);
        if (affine) least[k] = found.lanes(found.least);
        return found.lanes(found.most);
    };
    raise(high, folded<I, kLanes>(most, 0));
    if (affine) raise(low, folded<I, kLanes>([&](int k) LOWBIT_INLINE { return least[k]; }, 0));
}

// 2 * kLanes blocks of 16-bit floats: a vector each, or half of one. Maxima of two vectors become the halves of lanes.
template <class Type, bool half>
void amax_of_small_blocks(const uint16_t* x, uint32_t* high) {
    using Words = typename Extremes<Type>::Words;
    const U low_half = splat(0xffffu);
    const auto pair = [&](int k) LOWBIT_INLINE {
        const U first = load<U>(x + 4 * kLanes * k) & 0x7fff7fffu;
        const U second = load<U>(x + 4 * kLanes * k + 2 * kLanes) & 0x7fff7fffu;
        const Words a = (Words)((first & low_half) | (second << 16)), b = (Words)((first >> 16) | (second & ~low_half));
        return a > b ? a : b;
    };
    // Lane d has blocks 2d and 2d + 1; with two blocks a vector, 2d - d % 2 and 2d - d % 2 + 2.
    const U words = (U)folded<Words, half ? kLanes / 2 : kLanes>(pair, 0);
    U both[2] = {Type::widened(words & low_half), Type::widened(words >> 16)};
    for (int side = 0; side < 2; ++side) {
        U order;
        for (int j = 0; j < kLanes; ++j) {
            const int b = side * kLanes + j, lane = half ? b / 4 * 2 + b % 2 : b / 2, upper = half ? b / 2 % 2 : b % 2;
            order[j] = static_cast<uint32_t>(lane + upper * kLanes);
        }
        raise(high + side * kLanes, (I)__builtin_shuffle(both[0], both[1], order));
    }
}

void block_stats(const void* x, Dtype dtype, int64_t n, int64_t block, bool affine, uint32_t* high, uint32_t* low) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        uint32_t unused = 0;
        int64_t b = 0;
        constexpr int kStep = Extremes<Type>::kStep;
        if constexpr (Extremes<Type>::kHalf) {
            for (; !affine && block == kStep && (b + 2 * kLanes) * block <= n; b += 2 * kLanes)
                amax_of_small_blocks<Type, false>(p + b * block, high + b);
            for (; !affine && 2 * block == kStep && (b + 2 * kLanes) * block <= n; b += 2 * kLanes)
                amax_of_small_blocks<Type, true>(p + b * block, high + b);
        }
        const auto several = block == kStep       ? stats_of_blocks<Type, false, 1>
                             : block == 2 * kStep ? stats_of_blocks<Type, false, 2>
                                                  : stats_of_blocks<Type, false, 0>;
        for (; block % kStep == 0 && (b + kLanes) * block <= n; b += kLanes) {
            if (affine) {
                stats_of_blocks<Type, true, 0>(p + b * block, block, high + b, low + b);
            } else {
                several(p + b * block, block, high + b, nullptr);
            }
        }
        for (; b * block < n; ++b) {
            const int64_t rest = n - b * block;
            stats_of<Type>(p + b * block, rest < block ? rest : block, block >= 2 * kAheadOfStats, affine, high[b],
                           affine ? low[b] : unused);
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
        if (i < n) row_kernels_scalar().column_stats(p + i, dtype, n - i, affine, high + i, affine ? low + i : nullptr);
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
            __builtin_prefetch(p + i + kAheadOfStats);
            const I bits = (I)(Type::read(p + i) & kMagnitude);
            most = (bits > most) & (bits < static_cast<int32_t>(kInf)) ? bits : most;
        }
        const uint32_t rest = row_kernels_scalar().finite_amax(p + i, dtype, n - i);
        found = static_cast<uint32_t>(largest(most));
        if (rest > found) found = rest;
    });
    return found;
}

void product(const void* x, Dtype dtype, int64_t n, float factor, const float* each, float* out) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        int64_t i = 0;
        for (; each && i + kLanes <= n; i += kLanes) store(out + i, (F)Type::read(p + i) * load<F>(each + i));
        for (; !each && i + kLanes <= n; i += kLanes) store(out + i, (F)Type::read(p + i) * factor);
        row_kernels_scalar().product(p + i, dtype, n - i, factor, each ? each + i : nullptr, out + i);
    });
}
