// One step of AdamW: docs/numerics.md section 11. Part of lines_body.inl.
//
// Of 16 elements decoding takes about 11 instructions a moment, the step 21, the maxima 4; the root and the division
// keep the divider busy for 22 cycles of Cascade Lake. So both moments of the next elements are decoded while it works.

// The step in three parts: both moments (avg and rms are replaced), the quotient, and the next parameter, as bits that
// Type::put() takes.
template <class Type, class Grad>
struct Step {
    const F decay, mix, keep, mix_square, correction, eps, rate, nan;
    explicit Step(const AdamWFactors& f)
        : decay(splat(f.decay)),
          mix(splat(f.mix)),
          keep(splat(f.keep)),
          mix_square(splat(f.mix_square)),
          correction(splat(f.correction)),
          eps(splat(f.eps)),
          rate(splat(f.rate)),
          nan((F)splat(kNan)) {}

    LOWBIT_INLINE void moments(const typename Grad::Element* grad, F& avg, F& rms) const {
        const F g = (F)Grad::read(grad);
        avg = avg + (g - avg) * mix;
        rms = root((rms * rms) * keep + (g * g) * mix_square);
    }
    LOWBIT_INLINE F quotient(F avg, F rms) const { return avg / (rms * correction + eps); }
    LOWBIT_INLINE U param(const typename Type::Element* param, F quotient) const {
        const F next = (F)Type::read(param) * decay - quotient * rate;
        return Type::round((U)(next == next ? next : nan));
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
    const HalfValues<true> values;
    const uint8_t *const codes, *const ahead;
    float* const numbers;
    const MomentLine& at;
    int64_t block = -1, stop = 0;  // the block at work, and where it ends
    F by{};
    I most{};
    explicit FusedMoment(const MomentLine& m)
        : values(m.decoder), codes(m.codes), ahead(m.ahead), numbers(m.numbers), at(m) {}
    static bool serves(const MomentLine& m, int64_t n) {
        return HalfValues<true>::serves(m.decoder.format) && m.factors.mode == Factors::kBlocks &&
               (m.block % kQuad == 0 || m.block >= n);
    }

    void open(int64_t i) {
        if (i < stop) return;
        stop = i + at.block;
        by = splat(at.factors.each[++block]);
        most = I{};
    }
    void close() const {
        const uint32_t found = static_cast<uint32_t>(largest(most));
        if (found > at.high[block]) at.high[block] = found;
    }
    // A quad, without its factor. A NaN of any sign will do.
    LOWBIT_INLINE void decode(int64_t i) const {
        __builtin_prefetch(ahead + i);
        for (int64_t k = i; k < i + kQuad; k += 2 * kLanes) {
            F first, second;
            values.template pair<true>(codes + k, first, second);
            store(numbers + k, first), store(numbers + k + kLanes, second);
        }
    }
    LOWBIT_INLINE F read(int64_t i) const { return load<F>(numbers + i) * by; }
    LOWBIT_INLINE void write(int64_t i, F v) {
        const I magnitude = (I)((U)v & kMagnitude);
        most = magnitude > most ? magnitude : most;
        store(numbers + i, v);
    }
    // Those from element i on, which one block holds.
    MomentLine rest(int64_t i) const {
        MomentLine m = at;
        const int64_t b = i < stop ? block : block + 1;
        m.codes += i, m.numbers += i, m.high += b, m.factors.each += b;
        return m;
    }
};

// Whole quads; how many elements that were.
template <class Type, class Grad>
int64_t step_fused(const Step<Type, Grad>& step, const typename Type::Element* param,
                   const typename Grad::Element* grad, int64_t n, FusedMoment& m, FusedMoment& r,
                   typename Type::Element* out, const typename Type::Element* ahead) {
    const int64_t last = n / kQuad * kQuad - kQuad;
    m.decode(0), r.decode(0);
    for (int64_t i = 0; i <= last;) {
        m.open(i), r.open(i);
        for (const int64_t end = std::min({m.stop, r.stop, last + kQuad}); i < end; i += kQuad) {
            constexpr int64_t kLine = 64 / sizeof(*ahead);
            const int64_t next = std::min(i + kQuad, last);
            F avg[4], rms[4], quotient[4];
#pragma GCC unroll 4
            for (int64_t k = 0; k < kQuad; k += kLine) __builtin_prefetch(ahead + i + k);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                avg[k] = m.read(i + k * kLanes), rms[k] = r.read(i + k * kLanes);
                step.moments(grad + i + k * kLanes, avg[k], rms[k]);
            }
            m.decode(next);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) quotient[k] = step.quotient(avg[k], rms[k]);
            r.decode(next);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                m.write(i + k * kLanes, avg[k]), r.write(i + k * kLanes, rms[k]);
                Type::put(out + i + k * kLanes, step.param(param + i + k * kLanes, quotient[k]));
            }
        }
        m.close(), r.close();
    }
    return last + kQuad;
}

template <class Type, class Grad>
void step_line(const AdamWFactors& f, const typename Type::Element* param, const typename Grad::Element* grad,
               int64_t n, const MomentLine& avg, const MomentLine& rms, typename Type::Element* out,
               const typename Type::Element* ahead) {
    const Step<Type, Grad> step(f);
    if (n >= kQuad && FusedMoment::serves(avg, n) && FusedMoment::serves(rms, n)) {
        FusedMoment m(avg), r(rms);
        const int64_t i = step_fused(step, param, grad, n, m, r, out, ahead);
        if (i == n) return;
        return step_line<Type, Grad>(f, param + i, grad + i, n - i, m.rest(i), r.rest(i), out + i, ahead);
    }
    for (const MomentLine* m : {&avg, &rms}) decode(m->decoder, m->codes, n, m->factors, m->numbers, Dtype::kFloat32);
    step_numbers(step, param, grad, n, avg.numbers, rms.numbers, out);
    for (const MomentLine* m : {&avg, &rms})
        block_stats(m->numbers, Dtype::kFloat32, n, m->block, false, m->high, nullptr);
}

void adamw(const AdamWFactors& factors, const void* param, Dtype dtype, const void* grad, Dtype grad_dtype, int64_t n,
           const MomentLine& avg, const MomentLine& rms, void* new_param, const void* ahead) {
    dispatch(dtype, [&](auto type) {
        dispatch(grad_dtype, [&](auto grad_type) {
            using Type = decltype(type);
            using Element = typename Type::Element;
            using Grad = decltype(grad_type);
            step_line<Type, Grad>(factors, static_cast<const Element*>(param),
                                  static_cast<const typename Grad::Element*>(grad), n, avg, rms,
                                  static_cast<Element*>(new_param), static_cast<const Element*>(ahead));
        });
    });
}
