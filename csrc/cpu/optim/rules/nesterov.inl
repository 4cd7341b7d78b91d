// Nesterov's mean of gradients: what it returns is no parameter but a direction.
struct Nesterov {
    static constexpr int kMoments = 1;
    static constexpr bool kPositive[] = {false}, kDivides = false;
    const F mix, share;
    explicit Nesterov(const float* f) : mix(splat(f[0])), share(splat(f[1])) {}

    LOWBIT_INLINE F step(F, F g, F* m) const {
        m[0] = m[0] + (g - m[0]) * mix;
        return g + (m[0] - g) * share;
    }
};
