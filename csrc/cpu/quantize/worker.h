// One thread's work on tiles: their maxima, their elements, given their blocks' scales; and what it works on.
#pragma once

#include <memory>
#include <vector>

#include "common/scales.h"
#include "cpu/quantize/tiles.h"
#include "cpu/row_kernels.h"
#include "cpu/runs.h"

namespace lowbit::cpu {

// Where codes come from and go to, and how.
struct Job {
    const RowKernels& kernels;
    Shape shape;
    const SchemeParams& scheme;
    const int code_bits;  // from code to code where they are stored
    const Blocks blocks;
    const ScaleRule rule;
    const bool inverse;  // has_inverse()
    Values x{};
    const Encoder* encoder = nullptr;
    Rng rng{};
    uint8_t* codes = nullptr;         // packed; null: they are decoded at once
    const uint8_t* stored = nullptr;  // packed; null: they are made from x
    const Decoder* decoder = nullptr;
    Results out{};
    Values grad{};  // null: out is not gradients
    // Of each tile, the sums of `slots` blocks for the gradient of their scales, and where they have zero points for
    // that of these; null: nobody asks.
    float* slopes = nullptr;
    float* zero_slopes = nullptr;
    int64_t slots = 0;
};

// The bits of `x` where `kept` is 1, +0 where it is 0.
template <class Word>
void select(const void* x, const uint8_t* kept, int64_t n, void* out) {
    const Word* from = static_cast<const Word*>(x);
    Word* to = static_cast<Word*>(out);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Word>(from[i] & static_cast<Word>(-kept[i]));
}

// The sum of factor * terms, in one order for all instruction sets.
inline float sum_terms(const float* terms, float factor, int64_t n) {
    typedef float Four __attribute__((vector_size(16)));
    constexpr int64_t kSums = 16;
    Four sums[4] = {};
    const auto add = [&](const float* from) {
        Four term[4];
        std::memcpy(term, from, sizeof term);
        for (int j = 0; j < 4; ++j) sums[j] += factor * term[j];
    };
    int64_t i = 0;
    for (; i + kSums <= n; i += kSums) add(terms + i);
    if (i < n) {
        float rest[kSums] = {};
        std::memcpy(rest, terms + i, static_cast<size_t>(n - i) * sizeof *rest);
        add(rest);
    }
    const Four all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    return (all[0] + all[2]) + (all[1] + all[3]);
}

class Worker {
  public:
    // What make_scales() said of the tile's scales, if they were made from x: `odd` ones may be NaN.
    void made_scales(bool plain) { odd_ = !plain, plain_ = finite_ = plain; }
    // The same of read_scales(), if they were given: elements may be anything.
    void given_scales(bool plain) { odd_ = finite_ = false, plain_ = plain; }

    // Room for the scales of the blocks that a tile touches, from the one at its first column on.
    ScaleRow room(int64_t blocks) {
        const size_t wanted = static_cast<size_t>((blocks + kAlign - 1) & -kAlign);
        for (auto* v : {&value_, &divisor_, &inverse_, &zero_}) {
            if (v->size() < wanted) v->resize(wanted);
        }
        return {value_.data(), divisor_.data(), inverse_.data(), zero_.data()};
    }

    static Worker& mine() {
        static thread_local Worker worker;
        return worker;
    }

    // Before the first of a thread's tiles.
    void start() { ahead_ = false; }

    // The maxima of a tile of whole blocks. One of several rows is copied: they would push each other out of the cache,
    // whose sets they share if they lie a power of two apart. It has been if it was the next of the one before.
    const Stats& measure(const Job& job, const Tile& t) {
        local_ = fits(t);
        Local& now = locals_[current_];
        if (!local_) {
            now.stats.of(job.kernels, job.x, job.blocks, t, job.rule.both_ends);
        } else {
            for (int64_t r = 0; r < t.height && !ahead_; ++r) take_row(job, t, r, now);
            now.stats.finish(job.blocks, t);
        }
        ahead_ = false;
        return now.stats;
    }

    // `next`: the tile that will be measured next, or null where memory is read once and in order.
    void apply(const Job& job, const Tile& t, const Tile* next) {
        local_ &= next != nullptr;
        const bool take = local_ && next->index != t.index && fits(*next);
        Local& later = locals_[1 - current_];
        for (int64_t begin = t.begin; begin < t.end; begin += kRun) {
            const int64_t count = std::min(kRun, t.end - begin);
            first_ = quotient_of(begin, job.blocks.width);
            lead_ = (first_ + 1) * job.blocks.width - begin;
            first_ -= t.block;
            spread_factors(job, count);
            for (int64_t r = 0; r < t.height; ++r) {
                const Run run{t.row + r, begin, count};
                const void* ahead = static_cast<const char*>(at_run(job.x, run)) + kAhead;
                if (next) ahead = at_run(job.x, {next->row + r, next->begin + begin - t.begin, count});
                element_run(job, t, run, ahead);
                if (take && begin == t.begin && r < next->height) take_row(job, *next, r, later);
            }
        }
        if (!take) return;
        for (int64_t r = t.height; r < next->height; ++r) take_row(job, *next, r, later);
        current_ = 1 - current_;
        ahead_ = true;
    }

  private:
    struct Spread {
        float divisor[kRun], value[kRun], zero[kRun];
    };
    struct SlopeRow {
        alignas(64) float grad[kRun], scale[kRun], outside[kRun];
    };
    Scratch& scratch_ = Scratch::mine();
    std::vector<float> value_, divisor_, inverse_, zero_;
    bool odd_ = false, plain_ = false, finite_ = false;
    // A tile's elements, copied, and their maxima; of this tile and of the next, which is copied in turn with encoding.
    struct Local {
        std::vector<char> copy;
        Stats stats;
    } locals_[2];
    int current_ = 0;
    bool ahead_ = false;  // whether the current one is complete
    std::vector<float> products_;
    std::unique_ptr<Spread> spread_;
    std::unique_ptr<SlopeRow> slope_;
    bool local_ = false;     // whether a copy holds the tile
    bool each_own_ = false;  // whether factors are spread out to one an element
    int64_t first_ = 0;      // number among the tile's scales of that of the columns at work
    int64_t lead_ = 0;       // how many of these columns have it

    static bool fits(const Tile& t) { return t.height > 1 && t.height * (t.end - t.begin) <= 2 * kTall; }

    void take_row(const Job& job, const Tile& t, int64_t r, Local& to) {
        const int64_t count = t.end - t.begin, bytes = count * size_of(job.x.element());
        const size_t wanted = static_cast<size_t>(t.height * bytes);
        if (to.copy.size() < wanted) to.copy.resize(wanted);
        if (r == 0) to.stats.start(job.blocks, t);
        char* row = to.copy.data() + r * bytes;
        std::memcpy(row, elements(job.kernels, job.x, {t.row + r, t.begin, count}, products_),
                    static_cast<size_t>(bytes));
        to.stats.row(job.kernels, row, job.x.element(), job.blocks, t, job.rule.both_ends);
    }

    void element_run(const Job& job, const Tile& t, const Run& run, const void* ahead) {
        if (job.grad.data) return backward(job, t, run, ahead);
        const uint8_t* codes = job.stored ? unpacked(job, run) : encoded(job, t, run, ahead);
        if (job.decoder) decode(job, run, codes);
    }

    const void* from(const Job& job, const Tile& t, const Run& run) {
        if (!local_) return elements(job.kernels, job.x, run, products_);
        const int64_t at = (run.row - t.row) * (t.end - t.begin) + run.begin - t.begin;
        return locals_[current_].copy.data() + at * size_of(job.x.element());
    }

    // Calls f(column within the run, count, number of its scale) for each block of the columns at work.
    template <class F>
    void each_block(const Job& job, int64_t count, const F& f) const {
        size_t block = static_cast<size_t>(first_);
        for (int64_t at = 0, end = lead_; at < count; at = end, end += job.blocks.width, ++block) {
            f(at, std::min(end, count) - at, block);
        }
    }

    // Blocks that vectors do not divide: one factor an element, for the same columns of all rows.
    void spread_factors(const Job& job, int64_t count) {
        const int64_t width = job.blocks.width;
        each_own_ = width > 1 && width % kAlign != 0 && lead_ < count;
        if (!each_own_) return;
        if (!spread_) spread_.reset(new Spread);
        each_block(job, count, [&](int64_t at, int64_t n, size_t block) {
            std::fill_n(spread_->divisor + at, n, divisor_[block]);
            std::fill_n(spread_->value + at, n, value_[block]);
            if (job.scheme.affine) std::fill_n(spread_->zero + at, n, zero_[block]);
        });
    }
    // What the columns at work are divided by, whose quotients count and not their codes alone.
    Factors divisors(const Job& job) const {
        Factors f = factors(job, true);
        if (f.mode == Factors::kReciprocal) f.mode = Factors::kBlocks, f.each = divisor_.data() + first_;
        return f;
    }
    // What the columns at work are divided by, or else multiplied with.
    Factors factors(const Job& job, bool divide) const {
        const float* zeros = !job.scheme.affine ? nullptr : each_own_ ? spread_->zero : zero_.data() + first_;
        if (each_own_) return {Factors::kEach, divide ? spread_->divisor : spread_->value, zeros};
        if (job.blocks.width == 1) return {Factors::kEach, (divide ? divisor_ : value_).data() + first_, zeros};
        const float *value = value_.data() + first_, *inverse = inverse_.data() + first_;
        const auto of = [&](Factors::Mode mode, const float* each) {
            return Factors{mode, each, zeros, lead_, job.blocks.width, finite_, inverse};
        };
        if (!divide) return of(Factors::kBlocks, value);
        if (job.inverse) return of(Factors::kInverse, inverse);
        if (plain_ && job.encoder->coarse) return of(Factors::kReciprocal, value);
        return of(Factors::kBlocks, divisor_.data() + first_);
    }

    const uint8_t* unpacked(const Job& job, const Run& run) {
        const int bits = job.code_bits;
        const uint8_t* at = job.stored + run.row * packed_cols(job.shape.cols, bits) + run.begin * bits / 8;
        if (bits == 8) return at;
        unpack_run(job.kernels, at, run.count, bits, scratch_.codes);
        return scratch_.codes;
    }

    void encode(const Job& job, const Tile& t, const Run& run, const void* ahead, uint8_t* codes) {
        const Encoder& e = *job.encoder;
        const uint16_t* noise = e.stochastic ? scratch_.noise_at(job.kernels, job.rng, run) : nullptr;
        job.kernels.encode(e, from(job, t, run), job.x.element(), run.count, factors(job, true), noise, ahead, codes);
        if (!odd_) return;
        each_block(job, run.count, [&](int64_t at, int64_t n, size_t block) {
            if (is_nan(bits_of(value_[block]))) {
                std::memset(codes + at, static_cast<int>(e.canonical), static_cast<size_t>(n));
            }
        });
    }

    // The codes of a run, one a byte, unless they are packed and that is all.
    const uint8_t* encoded(const Job& job, const Tile& t, const Run& run, const void* ahead) {
        const int bits = job.code_bits;
        if (!job.codes || bits < 8) encode(job, t, run, ahead, scratch_.codes);
        if (!job.codes) return scratch_.codes;
        uint8_t* to = job.codes + run.row * packed_cols(job.shape.cols, bits) + run.begin * bits / 8;
        bits == 8 ? encode(job, t, run, ahead, to) : pack_run(job.kernels, scratch_.codes, run.count, bits, to);
        return nullptr;
    }

    void decode(const Job& job, const Run& run, const uint8_t* codes) {
        job.kernels.decode(*job.decoder, codes, run.count, factors(job, false), at_run(job.out, run), job.out.dtype);
    }

    // The gradient of a run's elements: grad where they were in range.
    void backward(const Job& job, const Tile& t, const Run& run, const void* ahead) {
        const void *x = from(job, t, run), *grad = at_run(job.grad, run);
        uint8_t* kept = scratch_.codes;
        job.kernels.in_range(*job.encoder, x, job.x.dtype, run.count, factors(job, true), ahead, kept);
        size_of(job.grad.dtype) == 4 ? select<uint32_t>(grad, kept, run.count, at_run(job.out, run))
                                     : select<uint16_t>(grad, kept, run.count, at_run(job.out, run));
        if (job.slopes) add_slopes(job, t, run, x, grad, kept);
    }

    // Adds a run's part of the gradients of the scales to the tile's sums.
    void add_slopes(const Job& job, const Tile& t, const Run& run, const void* x, const void* grad,
                    const uint8_t* kept) {
        if (!slope_) slope_.reset(new SlopeRow);
        SlopeRow& s = *slope_;
        const bool wide = job.grad.dtype == Dtype::kFloat32;
        if (!wide) job.kernels.quotients(grad, job.grad.dtype, run.count, {}, s.grad);
        job.kernels.slopes(*job.encoder, *job.decoder, x, job.x.dtype, wide ? static_cast<const float*>(grad) : s.grad,
                           kept, run.count, divisors(job), s.scale, job.zero_slopes ? s.outside : nullptr);
        const int64_t first = t.index * job.slots;
        each_block(job, run.count, [&](int64_t at, int64_t n, size_t block) {
            const int64_t slot = first + static_cast<int64_t>(block);
            job.slopes[slot] += sum_terms(s.scale + at, 1.0f, n);
            if (job.zero_slopes) job.zero_slopes[slot] += sum_terms(s.outside + at, -value_[block], n);
        });
    }
};

}  // namespace lowbit::cpu
