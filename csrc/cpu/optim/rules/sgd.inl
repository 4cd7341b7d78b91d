// Stochastic gradient descent without momentum.
struct Sgd {
    static constexpr int kMoments = 0;
    static constexpr bool kDivides = false;
    const F decay, l2, rate;
    explicit Sgd(const float* f) : decay(splat(f[0])), l2(splat(f[1])), rate(splat(f[2])) {}

    LOWBIT_INLINE F step(F p, F g, F*) const { return p * decay - (g + p * l2) * rate; }
};
