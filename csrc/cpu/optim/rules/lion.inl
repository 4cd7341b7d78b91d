// Lion: the sign of a mean of gradients.
struct Lion {
    static constexpr int kMoments = 1;
    static constexpr bool kPositive[] = {false}, kDivides = false;
    const F decay, mix, mix_kept, rate;
    explicit Lion(const float* f) : decay(splat(f[0])), mix(splat(f[1])), mix_kept(splat(f[2])), rate(splat(f[3])) {}

    LOWBIT_INLINE F step(F p, F g, F* m) const {
        const F change = g - m[0], toward = m[0] + change * mix;
        const F sign = toward > 0.0f ? splat(1.0f) : toward < 0.0f ? splat(-1.0f) : toward;  // 0 and NaN stay
        m[0] = m[0] + change * mix_kept;
        return p * decay - sign * rate;
    }
};
