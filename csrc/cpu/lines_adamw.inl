// One step of AdamW: docs/numerics.md section 11. Part of lines_body.inl.

template <class Type, class Grad>
void adamw_line(const AdamWFactors& f, const typename Type::Element* param, const typename Grad::Element* grad,
                int64_t n, float* avg, float* rms, typename Type::Element* out) {
    const F decay = splat(f.decay), mix = splat(f.mix), keep = splat(f.keep), mix_square = splat(f.mix_square),
            correction = splat(f.correction), eps = splat(f.eps), rate = splat(f.rate);
    const auto step = [&](const auto* p, const auto* g, float* m, float* r, auto* to) LOWBIT_INLINE {
        const F x = (F)Grad::read(g), before = load<F>(m), root_before = load<F>(r);
        const F mean = before + (x - before) * mix;
        const F scale = root((root_before * root_before) * keep + (x * x) * mix_square);
        const F next = (F)Type::read(p) * decay - mean / (scale * correction + eps) * rate;
        store(m, mean);
        store(r, scale);
        Type::put(to, Type::round((U)(next == next ? next : (F)splat(kNan))));
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) step(param + i, grad + i, avg + i, rms + i, out + i);
    if (i == n) return;
    const size_t rest = static_cast<size_t>(n - i);
    typename Type::Element p[kLanes] = {};
    typename Grad::Element g[kLanes] = {};
    float m[kLanes] = {}, r[kLanes] = {};
    __builtin_memcpy(p, param + i, rest * sizeof *p);
    __builtin_memcpy(g, grad + i, rest * sizeof *g);
    __builtin_memcpy(m, avg + i, rest * sizeof *m);
    __builtin_memcpy(r, rms + i, rest * sizeof *r);
    step(p, g, m, r, p);
    __builtin_memcpy(avg + i, m, rest * sizeof *m);
    __builtin_memcpy(rms + i, r, rest * sizeof *r);
    __builtin_memcpy(out + i, p, rest * sizeof *p);
}

void adamw(const AdamWFactors& factors, const void* param, Dtype dtype, const void* grad, Dtype grad_dtype, int64_t n,
           float* avg, float* rms, void* new_param) {
    dispatch(dtype, [&](auto type) {
        dispatch(grad_dtype, [&](auto grad_type) {
            using Type = decltype(type);
            using Grad = decltype(grad_type);
            adamw_line<Type, Grad>(factors, static_cast<const typename Type::Element*>(param),
                                   static_cast<const typename Grad::Element*>(grad), n, avg, rms,
                                   static_cast<typename Type::Element*>(new_param));
        });
    });
}
