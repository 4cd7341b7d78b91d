// AdamW, whose second moment is kept as its root.
struct AdamW {
    static constexpr int kMoments = 2;
    static constexpr bool kPositive[] = {false, true}, kDivides = true;
    const F decay, mix, keep, mix_square, correction, eps, rate;
    explicit AdamW(const float* f)
        : decay(splat(f[0])),
          mix(splat(f[1])),
          keep(splat(f[2])),
          mix_square(splat(f[3])),
          correction(splat(f[4])),
          eps(splat(f[5])),
          rate(splat(f[6])) {}

    // What keeps a divider busy is the root of `moments` and the division of `quotient`.
    LOWBIT_INLINE void moments(F g, F* m) const {
        m[0] = m[0] + (g - m[0]) * mix;
        m[1] = root((m[1] * m[1]) * keep + (g * g) * mix_square);
    }
    LOWBIT_INLINE F quotient(const F* m) const { return m[0] / (m[1] * correction + eps); }
    LOWBIT_INLINE F next(F p, F quotient) const { return p * decay - quotient * rate; }
    LOWBIT_INLINE F step(F p, F g, F* m) const {
        moments(g, m);
        return next(p, quotient(m));
    }
};
