// How weights are kept: docs/numerics.md section 11. Part of row_kernels_body.inl.

void widen(const void* x, Dtype dtype, int64_t n, float* out) {
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto* p = static_cast<const typename Type::Element*>(x);
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) store(out + i, Type::read(p + i));
        row_kernels_scalar().widen(p + i, dtype, n - i, out + i);
    });
}

// Magnitudes plus noise, cut off.
inline U stochastic_bf16(U bits, U noise) {
    const U magnitude = bits & kMagnitude, sum = smaller(magnitude + noise, splat(kInf));
    return magnitude > splat(kInf) ? splat(kNan) : sum | (bits & kSign);
}

void narrow(const float* x, Dtype dtype, int64_t n, const uint16_t* noise, void* out) {
    int64_t i = 0;
    if (noise) {
        for (; i + kLanes <= n; i += kLanes) {
            const U bits = stochastic_bf16(load<U>(x + i), widen(load<H>(noise + i)));
            BFloat16::put(static_cast<uint16_t*>(out) + i, bits);
        }
        noise += i;
    } else {
        dispatch(dtype, [&](auto type) {
            using Type = decltype(type);
            auto* to = static_cast<typename Type::Element*>(out);
            for (; i + kLanes <= n; i += kLanes) Type::put(to + i, Type::round((U)one_nan(load<F>(x + i))));
        });
    }
    row_kernels_scalar().narrow(x + i, dtype, n - i, noise, advance(out, i, dtype));
}

void join24(const uint16_t* high, const int8_t* low, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const U bits = BFloat16::read(high + i);
        const I more = (I)(widen(load<B>(low + i)) << 24) >> 16, magnitude = (I)(bits & kMagnitude) + more;
        store(out + i, (U)(magnitude > 0 ? magnitude : I{}) | (bits & kSign));
    }
    row_kernels_scalar().join24(high + i, low + i, n - i, out + i);
}

void split24(const float* x, int64_t n, uint16_t* high, int8_t* low) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const U bits = (U)one_nan(load<F>(x + i)), magnitude = bits & kMagnitude;
        const U rounded = (magnitude + 0x7fu + ((magnitude >> 8) & 1u)) >> 8, top = (rounded + 128u) >> 8;
        BFloat16::put(high + i, top << 16 | (bits & kSign));
        store(low + i, narrow_bytes((rounded - (top << 8)) & 0xffu));
    }
    row_kernels_scalar().split24(x + i, n - i, high + i, low + i);
}
