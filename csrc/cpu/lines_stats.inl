// The magnitudes that scales are made from: docs/numerics.md section 5. Part of lines_body.inl.

// Magnitudes as signed integers: numbers of the other sign are negative, and so never raise a maximum that starts at 0.
template <class Type>
void stats_of(const typename Type::Element* x, int64_t n, bool affine, uint32_t& high, uint32_t& low) {
    const I clear = I{} + static_cast<int32_t>(affine ? ~0u : kMagnitude), flip = I{} + static_cast<int32_t>(kSign);
    I most{}, least{};
    auto step = [&](const typename Type::Element* p) {
        const I bits = (I)Type::read(p) & clear, flipped = bits ^ flip;
        most = bits > most ? bits : most;
        least = flipped > least ? flipped : least;
    };
    if (n < kLanes) {
        typename Type::Element padded[kLanes] = {};
        __builtin_memcpy(padded, x, n * sizeof *x);
        step(padded);
    } else {
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) step(x + i);
        if (i < n) step(x + n - kLanes);
    }
    const uint32_t top = static_cast<uint32_t>(largest(most)), bottom = static_cast<uint32_t>(largest(least));
    if (top > high) high = top;
    if (affine && bottom > low) low = bottom;
}

// kLanes blocks of whole vectors at once: a vector of each, folded pairwise until a lane is a block.
template <class Type>
void stats_of_blocks(const typename Type::Element* x, int64_t block, bool affine, uint32_t* high, uint32_t* low) {
    const I clear = I{} + static_cast<int32_t>(affine ? ~0u : kMagnitude), flip = I{} + static_cast<int32_t>(kSign);
    I most[kLanes], least[kLanes];
    auto larger = [](I a, I b) { return a > b ? a : b; };
    auto fold = [&](I(&v)[kLanes], uint32_t* to) {
        for (int half = kLanes / 2; half > 0; half /= 2) {
            for (int k = 0; k < half; ++k) v[k] = larger(evens(v[2 * k], v[2 * k + 1]), odds(v[2 * k], v[2 * k + 1]));
        }
        store(to, larger(v[0], load<I>(to)));
    };
    for (int k = 0; k < kLanes; ++k, x += block) {
        I top{}, bottom{};
        for (int64_t i = 0; i < block; i += kLanes) {
            const I bits = (I)Type::read(x + i) & clear;
            top = larger(top, bits);
            if (affine) bottom = larger(bottom, bits ^ flip);
        }
        most[k] = top;
        least[k] = bottom;
    }
    fold(most, high);
    if (affine) fold(least, low);
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
            const I bits = (I)(Type::read(p + i) & kMagnitude);
            most = (bits > most) & (bits < static_cast<int32_t>(kInf)) ? bits : most;
        }
        const uint32_t rest = lines_scalar().finite_amax(p + i, dtype, n - i);
        found = static_cast<uint32_t>(largest(most));
        if (rest > found) found = rest;
    });
    return found;
}
