// SGD with momentum.
struct Momentum {
    static constexpr int kMoments = 1;
    static constexpr bool kPositive[] = {false}, kDivides = false;
    const F l2, keep, mix, grad_share, momentum_share, rate;
    explicit Momentum(const float* f)
        : l2(splat(f[0])),
          keep(splat(f[1])),
          mix(splat(f[2])),
          grad_share(splat(f[3])),
          momentum_share(splat(f[4])),
          rate(splat(f[5])) {}

    LOWBIT_INLINE F step(F p, F g, F* m) const {
        g = g + p * l2;
        m[0] = m[0] * keep + g * mix;
        return p - (g * grad_share + m[0] * momentum_share) * rate;
    }
};
