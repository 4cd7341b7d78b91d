// One step of an optimizer: docs/numerics.md section 11. Part of row_kernels_body.inl.
//
// Moments that are 8-bit floats in blocks are decoded, stepped and searched for maxima in one loop (step_fused); others
// are decoded before and searched after.
#include "cpu/optim/rules.inl"

// Moments that are numbers, of which `moments` come and go.
template <class Rule, class Type, class Grad>
void step_numbers(Rule rule, const typename Type::Element* param, const typename Grad::Element* grad, int64_t n,
                  const float* const* from, float* const* to, typename Type::Element* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        F m[kMaxMoments];
        for (int k = 0; k < Rule::kMoments; ++k) m[k] = load<F>(from[k] + i);
        const F next = rule.step((F)Type::read(param + i), (F)Grad::read(grad + i), m);
        for (int k = 0; k < Rule::kMoments; ++k) store(to[k] + i, one_nan(m[k]));
        Type::put(out + i, Type::round((U)one_nan(next)));
    }
    if (i == n) return;
    const size_t rest = static_cast<size_t>(n - i);
    typename Type::Element p[kLanes] = {};
    typename Grad::Element g[kLanes] = {};
    float m[kMaxMoments][kLanes] = {};
    __builtin_memcpy(p, param + i, rest * sizeof *p);
    __builtin_memcpy(g, grad + i, rest * sizeof *g);
    for (int k = 0; k < Rule::kMoments; ++k) __builtin_memcpy(m[k], from[k] + i, rest * sizeof *m[k]);
    float* const all[kMaxMoments] = {m[0], m[1]};
    step_numbers<Rule, Type, Grad>(rule, p, g, kLanes, all, all, p);
    for (int k = 0; k < Rule::kMoments; ++k) __builtin_memcpy(to[k] + i, m[k], rest * sizeof *m[k]);
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
        : values(*m.decoder), codes(m.codes), ahead(m.ahead), numbers(m.numbers), at(m) {}
    static bool serves(const MomentRow& m, int64_t n) {
        return m.decoder && ByteHalves::serves(m.decoder->format) && m.factors.mode == Factors::kBlocks &&
               (m.block % kQuad == 0 || m.block >= n) && all_clean(*m.decoder, n, m.factors);
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

template <class Element>
LOWBIT_INLINE inline void prefetch_quad(const Element* ahead) {
    constexpr int64_t kLine = 64 / sizeof(*ahead);
#pragma GCC unroll 4
    for (int64_t k = 0; k < kQuad; k += kLine) __builtin_prefetch(ahead + k);
}

// Whole quads; how many elements that were.
template <class Rule, class Type, class Grad>
LOWBIT_INLINE inline int64_t step_fused(Rule rule, const typename Type::Element* param,
                                        const typename Grad::Element* grad, int64_t n, FusedMoment* m,
                                        typename Type::Element* out, const typename Type::Element* ahead) {
    constexpr int kMoments = Rule::kMoments;
    const int64_t whole = n / kQuad * kQuad;
    for (int64_t i = 0; i < whole;) {
        int64_t end = whole;
        for (int k = 0; k < kMoments; ++k) m[k].open(i), end = std::min(end, m[k].stop);
        for (; i < end; i += kQuad) {
            prefetch_quad(ahead + i);
            F moments[kMoments][4];
            for (int k = 0; k < kMoments; ++k) {
                __builtin_prefetch(m[k].ahead + i);
                m[k].values.template quad<true>(m[k].codes + i, moments[k]);
            }
#pragma GCC unroll 4
            for (int q = 0; q < 4; ++q) {
                const int64_t j = i + q * kLanes;
                F both[kMaxMoments];
                for (int k = 0; k < kMoments; ++k) both[k] = moments[k][q] * m[k].by;
                const F next = rule.step((F)Type::read(param + j), (F)Grad::read(grad + j), both);
                m[0].template write<Rule::kPositive[0]>(j, both[0]);
                if constexpr (kMoments > 1) m[1].template write<Rule::kPositive[1]>(j, both[1]);
                Type::put(out + j, Type::round((U)one_nan(next)));
            }
        }
        for (int k = 0; k < kMoments; ++k) m[k].close();
    }
    return whole;
}

// The same for a rule that divides and has two moments. Of 16 elements decoding takes about 5 instructions a moment,
// the step 19, the maxima 3; the root and the division keep the divider busy for 22 cycles of Cascade Lake. So no
// element waits for it: roots are taken of one quad, quotients of that before, and parameters made of the one before
// that, in turns. The divider always has work, and what waits for it is not next in line.
template <class Rule, class Type, class Grad>
LOWBIT_INLINE inline int64_t step_in_turns(Rule rule, const typename Type::Element* param,
                                           const typename Grad::Element* grad, int64_t n, FusedMoment& m,
                                           FusedMoment& r, typename Type::Element* out,
                                           const typename Type::Element* ahead) {
    const int64_t last = n / kQuad * kQuad - kQuad;
    F quotients[4];
    const auto divide = [&](int64_t i, int k) LOWBIT_INLINE {
        const F both[] = {m.written(i + k * kLanes), r.written(i + k * kLanes)};
        quotients[k] = rule.quotient(both);
    };
    const auto finish = [&](int64_t i, int k) LOWBIT_INLINE {
        const int64_t j = i + k * kLanes;
        Type::put(out + j, Type::round((U)one_nan(rule.next((F)Type::read(param + j), quotients[k]))));
    };
    m.decode(0), r.decode(0);
    for (int64_t i = 0; i <= last;) {
        m.open(i), r.open(i);
        for (const int64_t end = std::min({m.stop, r.stop, last + kQuad}); i < end; i += kQuad) {
            prefetch_quad(ahead + i);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                const int64_t j = i + k * kLanes;
                F both[] = {m.read(j), r.read(j)};
                rule.moments((F)Grad::read(grad + j), both);
                m.write<Rule::kPositive[0]>(j, both[0]), r.write<Rule::kPositive[1]>(j, both[1]);
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

// The same where registers are too few for that: what two blocks share is decoded before it steps, in loops that keep
// their constants, and the processor overlaps the elements that wait for the divider.
template <class Rule, class Type, class Grad>
LOWBIT_INLINE inline int64_t step_decoded(Rule rule, const typename Type::Element* param,
                                          const typename Grad::Element* grad, int64_t n, FusedMoment& m, FusedMoment& r,
                                          typename Type::Element* out, const typename Type::Element* ahead) {
    const int64_t whole = n / kQuad * kQuad;
    for (int64_t i = 0; i < whole;) {
        m.open(i), r.open(i);
        const int64_t end = std::min({m.stop, r.stop, whole});
        for (int64_t j = i; j < end; j += kQuad) m.decode(j), prefetch_quad(ahead + j);
        for (int64_t j = i; j < end; j += kQuad) r.decode(j);
        for (; i < end; i += kLanes) {
            F both[] = {m.read(i), r.read(i)};
            const F next = rule.step((F)Type::read(param + i), (F)Grad::read(grad + i), both);
            m.write<Rule::kPositive[0]>(i, both[0]), r.write<Rule::kPositive[1]>(i, both[1]);
            Type::put(out + i, Type::round((U)one_nan(next)));
        }
        m.close(), r.close();
    }
    return whole;
}

template <class Rule, class Type, class Grad>
void step_row(Rule rule, const StepRow& row) {
    constexpr int kMoments = Rule::kMoments;
    const auto* param = static_cast<const typename Type::Element*>(row.param);
    const auto* grad = static_cast<const typename Grad::Element*>(row.grad);
    const auto* ahead = static_cast<const typename Type::Element*>(row.ahead);
    auto* out = static_cast<typename Type::Element*>(row.new_param);
    if constexpr (kMoments > 0) {
        bool fused = row.n >= kQuad;
        for (int k = 0; k < kMoments; ++k) fused = fused && FusedMoment::serves(row.moments[k], row.n);
        if (fused) {
            StepRow rest = row;
            int64_t i;
            FusedMoment m[] = {FusedMoment(row.moments[0]), FusedMoment(row.moments[kMoments - 1])};
            if constexpr (Rule::kDivides && kRegisters < 32) {
                i = step_decoded<Rule, Type, Grad>(rule, param, grad, row.n, m[0], m[1], out, ahead);
            } else if constexpr (Rule::kDivides) {
                i = step_in_turns<Rule, Type, Grad>(rule, param, grad, row.n, m[0], m[1], out, ahead);
            } else {
                i = step_fused<Rule, Type, Grad>(rule, param, grad, row.n, m, out, ahead);
            }
            if (i == row.n) return;
            rest.param = param + i, rest.grad = grad + i, rest.new_param = out + i, rest.n -= i;
            for (int k = 0; k < kMoments; ++k) rest.moments[k] = m[k].rest(i);
            return step_row<Rule, Type, Grad>(rule, rest);
        }
    }
    const float* from[kMaxMoments];
    float* to[kMaxMoments];
    for (int k = 0; k < kMoments; ++k) {
        const MomentRow& m = row.moments[k];
        if (m.decoder) decode(*m.decoder, m.codes, row.n, m.factors, m.numbers, Dtype::kFloat32);
        from[k] = m.decoder ? m.numbers : m.from, to[k] = m.numbers;
    }
    step_numbers<Rule, Type, Grad>(rule, param, grad, row.n, from, to, out);
    for (int k = 0; k < kMoments; ++k) {
        const MomentRow& m = row.moments[k];
        if (m.decoder) block_stats(m.numbers, Dtype::kFloat32, row.n, m.block, false, m.high, nullptr);
    }
}

void step(const StepRule& rule, const StepRow& row) {
    with_rule(rule, [&](const auto& rule) {
        using Rule = std::decay_t<decltype(rule)>;
        dispatch(row.dtype, [&](auto type) {
            using Type = decltype(type);
            row.grad_dtype == row.dtype ? step_row<Rule, Type, Type>(rule, row)
                                        : step_row<Rule, Type, Float32>(rule, row);
        });
    });
}
