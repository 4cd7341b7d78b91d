// Sums of terms, gates and rotations on fp32 numbers: docs/numerics.md section 15. Part of row_kernels_body.inl and
// row_kernels_scalar.cpp. Compilers make vectors of the plain loops.

// -- sums and norms ---------------------------------------------------------------------------------------------------
void add_terms(const float* __restrict terms, int64_t n, float* __restrict sums) {
    for (int64_t i = 0; i < n; ++i) sums[i] += terms[i];
}

// The second half of the terms is added to the first until one is left. Replaces the terms.
float sum_terms(float* terms, int64_t n) {
    while (n > 1) {
        int64_t half = 1;
        while (2 * half < n) half *= 2;
        add_terms(terms + half, n - half, terms);
        n = half;
    }
    return terms[0];
}

void add_products(const float* __restrict a, const float* __restrict b, int64_t n, float* __restrict sums) {
    for (int64_t i = 0; i < n; ++i) sums[i] += a[i] * b[i];
}

void norm(const float* __restrict x, const float* __restrict weight, float rstd, int64_t n, float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * rstd * weight[i];
}

void norm_gradient(const float* __restrict scaled, const float* __restrict normed, float share, float rstd, int64_t n,
                   float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = (scaled[i] - normed[i] * share) * rstd;
}

// -- gates ------------------------------------------------------------------------------------------------------------
// On F, a float or a vector of them (U and I: of their patterns), kLanes at a time.
LOWBIT_INLINE inline F clamped(F x, float limit) { return smaller(splat(limit), larger(splat(-limit), x)); }

// e^y for |y| <= kExpLimit, or NaN. The sum with kRounder is rounded to an integer, which its lowest bits then are.
LOWBIT_INLINE inline F exp_of(F y) {
    const F sum = y * kLog2E + kRounder, power = sum - kRounder;
    const F f = (y - power * kHighLn2) - power * kLowLn2;
    F tail = splat(kExp[4]);
    for (int k = 3; k >= 0; --k) tail = tail * f + kExp[k];
    const F near = (f + (f * f) * tail) + 1.0f;
    const I whole = (I)(patterns_of(sum) - kRounderBits), first = whole >> 1;
    return near * numbers_of((U)(first + 127) << 23) * numbers_of((U)(whole - first + 127) << 23);
}

template <Activation activation>
LOWBIT_INLINE inline F gate_sigmoid(F gate) {
    const F z = activation == Activation::kSilu ? gate : gate * (gate * gate * kGelu[1] + kGelu[0]);
    return splat(1.0f) / (exp_of(clamped(-z, kExpLimit)) + 1.0f);
}

template <Activation activation>
void gate_loop(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const F g = load<F>(gate + i);
        store(out + i, g * gate_sigmoid<activation>(g) * load<F>(up + i));
    }
    if (i < n) row_kernels_scalar().gated(activation, gate + i, up + i, n - i, out + i);
}

void gated(Activation activation, const float* gate, const float* up, int64_t n, float* out) {
    activation == Activation::kSilu ? gate_loop<Activation::kSilu>(gate, up, n, out)
                                    : gate_loop<Activation::kGeluTanh>(gate, up, n, out);
}

template <Activation activation>
void gate_gradient_loop(const float* grad, const float* gate, const float* up, int64_t n, float* grad_gate,
                        float* grad_up) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const F d = load<F>(grad + i), g = load<F>(gate + i), near = clamped(g, kGateLimit);
        const F s = gate_sigmoid<activation>(near);
        F rest = 1.0f - s;
        if (activation == Activation::kGeluTanh) rest = (near * near * kGelu[2] + kGelu[0]) * rest;
        store(grad_gate + i, d * load<F>(up + i) * ((near * rest + 1.0f) * s));
        store(grad_up + i, d * (g * s));
    }
    if (i < n) {
        row_kernels_scalar().gated_gradient(activation, grad + i, gate + i, up + i, n - i, grad_gate + i, grad_up + i);
    }
}

void gated_gradient(Activation activation, const float* grad, const float* gate, const float* up, int64_t n,
                    float* grad_gate, float* grad_up) {
    activation == Activation::kSilu ? gate_gradient_loop<Activation::kSilu>(grad, gate, up, n, grad_gate, grad_up)
                                    : gate_gradient_loop<Activation::kGeluTanh>(grad, gate, up, n, grad_gate, grad_up);
}

// -- rotations --------------------------------------------------------------------------------------------------------
void rotate(const float* __restrict x, const float* __restrict cos, const float* __restrict sin, int64_t pairs,
            bool interleaved, float* __restrict out) {
    if (interleaved) {
        for (int64_t i = 0; i < pairs; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = a * cos[i] - b * sin[i];
            out[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[i], b = x[i + pairs];
        out[i] = a * cos[i] - b * sin[i];
        out[i + pairs] = b * cos[i] + a * sin[i];
    }
}
