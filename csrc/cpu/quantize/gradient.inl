// What elements add to the gradients of their scale and zero point: docs/numerics.md section 10. Part of
// row_kernels_body.inl.

// The numbers of codes of a codebook of few entries.
struct FewValues {
    Table table;
    explicit FewValues(const Decoder& d) { __builtin_memcpy(table, d.table, sizeof table); }
    LOWBIT_INLINE F operator()(U code) const { return lookup(table, code); }
};

struct Slopes {
    F scale, outside;
};

template <class Type, Factors::Mode mode, class Codes, class Values>
void slope_row(const Encoder& e, const Decoder& d, const typename Type::Element* x, const float* grad,
               const uint8_t* kept, int64_t n, const Factors& f, float* slopes, float* outside) {
    const Codes make(e);
    const Values value(d);
    const Divide divide;
    const auto at = [&](U bits, F from_above, U inside, const Factor& factor) LOWBIT_INLINE {
        const Quotient q = divide.by<mode, false>(bits, factor);
        const F level = value(make.template codes<false>(q, factor.zero, U{})) - factor.zero;
        const auto within = inside != 0u;
        return Slopes{(within ? level - (F)q.bits() : level) * from_above, within ? F{} : from_above};
    };
    for_lanes<mode>(
        f, n,
        [&](int64_t i, const Factor& factor) LOWBIT_INLINE {
            const Slopes s = at(Type::read(x + i), load<F>(grad + i), widen(load<B>(kept + i)), factor);
            store(slopes + i, s.scale);
            if (outside) store(outside + i, s.outside);
        },
        [&](int64_t i, const Factors& rest) {
            const Padded<typename Type::Element> last(x + i, n - i, rest, nullptr);
            const size_t floats = static_cast<size_t>(n - i) * sizeof(float);
            float grads[kLanes] = {}, scale[kLanes], zero[kLanes];
            uint8_t inside[kLanes] = {};
            __builtin_memcpy(grads, grad + i, floats);
            __builtin_memcpy(inside, kept + i, static_cast<size_t>(n - i));
            slope_row<Type, mode, Codes, Values>(e, d, last.x, grads, inside, kLanes, last.factors, scale, zero);
            __builtin_memcpy(slopes + i, scale, floats);
            if (outside) __builtin_memcpy(outside + i, zero, floats);
        });
}

template <class Type, class Codes, class Values>
void slope_factors(const Encoder& e, const Decoder& d, const void* x, const float* grad, const uint8_t* kept, int64_t n,
                   const Factors& f, float* slopes, float* outside) {
    const auto* p = static_cast<const typename Type::Element*>(x);
    const auto run = f.mode == Factors::kEach      ? slope_row<Type, Factors::kEach, Codes, Values>
                     : f.mode == Factors::kInverse ? slope_row<Type, Factors::kInverse, Codes, Values>
                                                   : slope_row<Type, Factors::kBlocks, Codes, Values>;
    run(e, d, p, grad, kept, n, f, slopes, outside);
}

void slopes(const Encoder& e, const Decoder& d, const void* x, Dtype dtype, const float* grad, const uint8_t* kept,
            int64_t n, const Factors& f, float* slopes, float* outside) {
    if (!e.vector) return row_kernels_scalar().slopes(e, d, x, dtype, grad, kept, n, f, slopes, outside);
    dispatch(dtype, [&](auto type) {
        using Type = decltype(type);
        const auto run = e.format.kind == kKindInteger ? slope_factors<Type, IntegerNearest, IntegerValues>
                         : e.format.kind == kKindFloat ? slope_factors<Type, FloatNearest, FloatValues>
                         : e.book->few()               ? slope_factors<Type, BookNearest<FewEntries>, FewValues>
                                                       : slope_factors<Type, BookNearest<ManyEntries>, BookValues>;
        run(e, d, x, grad, kept, n, f, slopes, outside);
    });
}
