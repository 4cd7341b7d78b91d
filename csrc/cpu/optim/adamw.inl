// One step of AdamW: docs/numerics.md section 11. Part of row_kernels_body.inl.
//
// Of 16 elements decoding takes about 5 instructions a moment, the step 19, the maxima 3; the root and the division
// keep the divider busy for 22 cycles of Cascade Lake. So no element waits for it: step_fused.

// The step in three parts: both moments (avg and rms are replaced), the quotient, and the next parameter, as bits that
// Type::put() takes.
template <class Type, class Grad>
struct Step {
    const F decay, mix, keep, mix_square, correction, eps, rate;
    explicit Step(const AdamWFactors& f)
        : decay(splat(f.decay)),
          mix(splat(f.mix)),
          keep(splat(f.keep)),
          mix_square(splat(f.mix_square)),
          correction(splat(f.correction)),
          eps(splat(f.eps)),
          rate(splat(f.rate)) {}

    LOWBIT_INLINE void moments(const typename Grad::Element* grad, F& avg, F& rms) const {
        const F g = (F)Grad::read(grad);
        avg = avg + (g - avg) * mix;
        rms = root((rms * rms) * keep + (g * g) * mix_square);
    }
    LOWBIT_INLINE F quotient(F avg, F rms) const { return avg / (rms * correction + eps); }
    LOWBIT_INLINE U param(const typename Type::Element* param, F quotient) const {
        const F next = (F)Type::read(param) * decay - quotient * rate;
        return Type::round((U)one_nan(next));
    }
};

// Decoded moments, which are replaced.
template <class Type, class Grad>
void step_numbers(const Step<Type, Grad>& step, const typename Type::Element* param, const typename Grad::Element* grad,
                  int64_t n, float* avg, float* rms, typename Type::Element* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        F m = load<F>(avg + i), r = load<F>(rms + i);
        step.moments(grad + i, m, r);
        const U next = step.param(param + i, step.quotient(m, r));
        store(avg + i, m), store(rms + i, r);
        Type::put(out + i, next);
    }
    if (i == n) return;
    const size_t rest = static_cast<size_t>(n - i);
    typename Type::Element p[kLanes] = {};
    typename Grad::Element g[kLanes] = {};
    float m[kLanes] = {}, r[kLanes] = {};
    __builtin_memcpy(p, param + i, rest * sizeof *p);
    __builtin_memcpy(g, grad + i, rest * sizeof *g);
    __builtin_memcpy(m, avg + i, rest * sizeof *m);
    __builtin_memcpy(r, rms + i, rest * sizeof *r);
    step_numbers<Type, Grad>(step, p, g, kLanes, m, r, p);
    __builtin_memcpy(avg + i, m, rest * sizeof *m);
    __builtin_memcpy(rms + i, r, rest * sizeof *r);
    __builtin_memcpy(out + i, p, rest * sizeof *p);
}

// A moment in the fused loop: 8-bit floats, in blocks of whole quads of vectors or one block.
struct FusedMoment {
    const ByteHalves values;
    const uint8_t *const codes, *const ahead;
    float* const numbers;
    const MomentRow& at;
    int64_t block = -1, stop = 0;  // the block at work, and where it ends
    F by{};
    U most{};
    explicit FusedMoment(const MomentRow& m)
        : values(m.decoder), codes(m.codes), ahead(m.ahead), numbers(m.numbers), at(m) {}
    static bool serves(const MomentRow& m, int64_t n) {
        return ByteHalves::serves(m.decoder.format) && m.factors.mode == Factors::kBlocks &&
               (m.block % kQuad == 0 || m.block >= n) && all_clean(m.decoder, n, m.factors);
    }

    void open(int64_t i) {
        if (i < stop) return;
        stop = i + at.block;
        by = values.units(splat(at.factors.each[++block]));
        most = U{};
    }
    void close() const {
        const uint32_t found = static_cast<uint32_t>(largest((I)(most & kMagnitude)));
        if (found > at.high[block]) at.high[block] = found;
    }
    // A quad, in units, which read() multiplies with.
    LOWBIT_INLINE void decode(int64_t i) const {
        __builtin_prefetch(ahead + i);
        F v[4];
        values.template quad<true>(codes + i, v);
        for (int k = 0; k < 4; ++k) store(numbers + i + k * kLanes, v[k]);
    }
    LOWBIT_INLINE F read(int64_t i) const { return load<F>(numbers + i) * by; }
    LOWBIT_INLINE F written(int64_t i) const { return load<F>(numbers + i); }
    // `positive`: all are but NaN, which is largest with a sign or without.
    template <bool positive>
    LOWBIT_INLINE void write(int64_t i, F v) {
        most = larger(most, positive ? (U)v : (U)v & kMagnitude);
        store(numbers + i, v);
    }
    // Those from element i on, which one block holds.
    MomentRow rest(int64_t i) const {
        MomentRow m = at;
        const int64_t b = i < stop ? block : block + 1;
        m.codes += i, m.numbers += i, m.high += b, m.factors.each += b;
        return m;
    }
};

// Whole quads; how many elements that were. Roots are taken of one quad, quotients of that before, and parameters made
// of the one before that, in turns: so the divider always has work, and what waits for it is not next in line.
template <class Type, class Grad>
int64_t step_fused(const Step<Type, Grad>& step, const typename Type::Element* param,
                   const typename Grad::Element* grad, int64_t n, FusedMoment& m, FusedMoment& r,
                   typename Type::Element* out, const typename Type::Element* ahead) {
    const int64_t last = n / kQuad * kQuad - kQuad;
    F quotients[4];
    const auto divide = [&](int64_t i, int k) LOWBIT_INLINE {
        quotients[k] = step.quotient(m.written(i + k * kLanes), r.written(i + k * kLanes));
    };
    const auto finish = [&](int64_t i, int k) LOWBIT_INLINE {
        Type::put(out + i + k * kLanes, step.param(param + i + k * kLanes, quotients[k]));
    };
    m.decode(0), r.decode(0);
    for (int64_t i = 0; i <= last;) {
        m.open(i), r.open(i);
        for (const int64_t end = std::min({m.stop, r.stop, last + kQuad}); i < end; i += kQuad) {
            constexpr int64_t kLine = 64 / sizeof(*ahead);
#pragma GCC unroll 4
            for (int64_t k = 0; k < kQuad; k += kLine) __builtin_prefetch(ahead + i + k);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                F avg = m.read(i + k * kLanes), rms = r.read(i + k * kLanes);
                step.moments(grad + i + k * kLanes, avg, rms);
                m.write<false>(i + k * kLanes, avg), r.write<true>(i + k * kLanes, rms);
                if (i >= 2 * kQuad) finish(i - 2 * kQuad, k);
                if (i >= kQuad) divide(i - kQuad, k);
                if (k == 0 && i < last) m.decode(i + kQuad);
                if (k == 2 && i < last) r.decode(i + kQuad);
            }
        }
        m.close(), r.close();
    }
    for (int k = 0; k < 4; ++k) {
        if (last > 0) finish(last - kQuad, k);
        divide(last, k), finish(last, k);
    }
    return last + kQuad;
}

template <class Type, class Grad>
void step_row(const AdamWFactors& f, const typename Type::Element* param, const typename Grad::Element* grad, int64_t n,
              const MomentRow& avg, const MomentRow& rms, typename Type::Element* out,
              const typename Type::Element* ahead) {
    const Step<Type, Grad> step(f);
    if (n >= kQuad && FusedMoment::serves(avg, n) && FusedMoment::serves(rms, n)) {
        FusedMoment m(avg), r(rms);
        const int64_t i = step_fused(step, param, grad, n, m, r, out, ahead);
        if (i == n) return;
        return step_row<Type, Grad>(f, param + i, grad + i, n - i, m.rest(i), r.rest(i), out + i, ahead);
    }
    for (const MomentRow* m : {&avg, &rms}) decode(m->decoder, m->codes, n, m->factors, m->numbers, Dtype::kFloat32);
    step_numbers(step, param, grad, n, avg.numbers, rms.numbers, out);
    for (const MomentRow* m : {&avg, &rms})
        block_stats(m->numbers, Dtype::kFloat32, n, m->block, false, m->high, nullptr);
}

void adamw(const AdamWFactors& factors, const void* param, Dtype dtype, const void* grad, Dtype grad_dtype, int64_t n,
           const MomentRow& avg, const MomentRow& rms, void* new_param, const void* ahead) {
    dispatch(dtype, [&](auto type) {
        dispatch(grad_dtype, [&](auto grad_type) {
            using Type = decltype(type);
            using Element = typename Type::Element;
            using Grad = decltype(grad_type);
            step_row<Type, Grad>(factors, static_cast<const Element*>(param),
                                 static_cast<const typename Grad::Element*>(grad), n, avg, rms,
                                 static_cast<Element*>(new_param), static_cast<const Element*>(ahead));
        });
    });
}
