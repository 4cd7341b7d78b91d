// quantize, quantize_static, dequantize, fake_quantize and its gradient: scales and elements of a matrix.
//
// Where blocks are small, a tile holds whole ones, and one thread reads it twice, the second time from cache: once for
// the scales, once for the codes. Blocks too large for that (or too few to share out) take two passes over memory,
// whose maxima do not depend on their order.
#include <vector>

#include "common/scales.h"
#include "cpu/codec.h"
#include "cpu/lines.h"
#include "cpu/runs.h"
#include "cpu/tiles.h"

namespace lowbit::cpu {
namespace {

constexpr int64_t kSpread = 128;      // blocks of fewer columns: factors spread out to one an element
constexpr int64_t kCached = 1 << 18;  // elements of a block that surely stay in the second-level cache

// -- elements ---------------------------------------------------------------------------------------------------------

// Where codes come from and go to, and how.
struct Job {
    const Lines& line;
    Shape shape;
    const SchemeParams& scheme;
    const Blocks blocks;
    const ScaleRule rule;
    Values x{};
    const Encoder* encoder = nullptr;
    Rng rng{};
    uint8_t* codes = nullptr;         // packed; null: they are decoded at once
    const uint8_t* stored = nullptr;  // packed; null: they are made from x
    const Decoder* decoder = nullptr;
    Results out{};
    Values grad{};            // null: out is not gradients
    float* slopes = nullptr;  // of each tile, the sums of `slots` blocks; null: nobody asks for the scales' gradient
    int64_t slots = 0;
    bool dynamic = false;  // scales come from x itself: a NaN scale makes canonical codes

    bool broken(const BlockScale& s) const { return dynamic && is_nan(bits_of(s.value)); }
};

const void* at_run(const Values& x, const Run& run) { return advance(x.data, run.row * x.stride + run.begin, x.dtype); }
void* at_run(const Results& x, const Run& run) { return advance(x.data, run.row * x.stride + run.begin, x.dtype); }

// The bits of `x` where `kept` is 1, +0 where it is 0.
template <class Word>
void select(const void* x, const uint8_t* kept, int64_t n, void* out) {
    const Word* from = static_cast<const Word*>(x);
    Word* to = static_cast<Word*>(out);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Word>(from[i] & static_cast<Word>(-kept[i]));
}

// The sum of what a block's elements add to the gradient of its scale, in one order for all instruction sets.
float sum_slopes(const uint8_t* kept, const float* level, const float* quotient, const float* grad, float zero_point,
                 int64_t n) {
    constexpr int64_t kSums = 8;
    float sums[kSums] = {};
    auto add = [&](int64_t i, int64_t j) {
        const float l = level[i] - zero_point, inside = l - quotient[i];
        sums[j] += (kept[i] ? inside : l) * grad[i];
    };
    int64_t i = 0;
    for (; i + kSums <= n; i += kSums) {
        for (int64_t j = 0; j < kSums; ++j) add(i + j, j);
    }
    for (int64_t j = 0; i + j < n; ++j) add(i + j, j);
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// Encodes and decodes tiles, given their blocks' scales; holds the scratch memory of one thread.
class Worker {
  public:
    Stats stats;
    std::vector<BlockScale> scales;  // of the blocks that the tile touches, from the one at its first column on

    void apply(const Job& job, const Tile& t) {
        spread_ = job.blocks.width < kSpread;
        broken_ = std::any_of(scales.begin(), scales.end(), [&](const BlockScale& s) { return job.broken(s); });
        for (int64_t begin = t.begin; begin < t.end; begin += kRun) {
            const int64_t count = std::min(kRun, t.end - begin);
            if (spread_) spread_factors(job, t, begin, count);
            for (int64_t row = t.row; row < t.row + t.height; ++row) {
                const Run run{row, begin, count};
                if (job.grad.data) {
                    backward(job, t, run);
                    continue;
                }
                const uint8_t* codes = job.stored ? unpacked(job, run) : encoded(job, t, run);
                if (job.decoder) decode(job, t, run, codes);
            }
        }
    }

  private:
    struct Line {
        uint8_t codes[kRun];
        float divisor[kRun], scale[kRun], zero[kRun];
    };
    struct SlopeLine {
        uint8_t codes[kRun];
        float level[kRun], quotient[kRun], grad[kRun];
    };
    std::unique_ptr<Line> line_{new Line};
    std::unique_ptr<SlopeLine> slope_;
    Noise noise_;
    bool spread_ = false;  // factors are spread out to one an element
    bool broken_ = false;  // whether any block of the tile is

    // Calls f(column within the run, count, scale) for each block in columns [begin, begin + count) of the tile.
    template <class F>
    void each_block(const Job& job, const Tile& t, int64_t begin, int64_t count, const F& f) const {
        const int64_t width = job.blocks.width, end = begin + count;
        for (int64_t j = begin / width; j * width < end; ++j) {
            const int64_t from = std::max(begin, j * width), to = std::min(end, (j + 1) * width);
            f(from - begin, to - from, scales[static_cast<size_t>(j - t.begin / width)]);
        }
    }

    void spread_factors(const Job& job, const Tile& t, int64_t begin, int64_t count) {
        each_block(job, t, begin, count, [&](int64_t at, int64_t n, const BlockScale& s) {
            if (job.encoder) std::fill_n(line_->divisor + at, n, divisor_of(s.value));
            if (job.decoder) std::fill_n(line_->scale + at, n, s.value);
            if (job.scheme.affine) std::fill_n(line_->zero + at, n, s.zero_point);
        });
    }

    // Calls f(column within the run, count, divisors or else multipliers) for the run at once, or for each block.
    template <class F>
    void with_factors(const Job& job, const Tile& t, const Run& run, bool divide, const F& f) const {
        if (spread_) {
            Factors all{Factors::kEach};
            all.each = divide ? line_->divisor : line_->scale;
            all.zeros = job.scheme.affine ? line_->zero : nullptr;
            return f(0, run.count, all);
        }
        each_block(job, t, run.begin, run.count, [&](int64_t at, int64_t n, const BlockScale& s) {
            f(at, n, Factors{Factors::kOne, divide ? divisor_of(s.value) : s.value, s.zero_point});
        });
    }

    const uint8_t* unpacked(const Job& job, const Run& run) {
        const int bits = job.scheme.format.bits;
        const uint8_t* from = job.stored + run.row * packed_cols(job.shape.cols, bits) + run.begin * bits / 8;
        if (bits == 8) return from;
        unpack_run(job.line, from, run.count, bits, line_->codes);
        return line_->codes;
    }

    const uint8_t* encoded(const Job& job, const Tile& t, const Run& run) {
        const int bits = job.scheme.format.bits;
        uint8_t* to =
            job.codes ? job.codes + run.row * packed_cols(job.shape.cols, bits) + run.begin * bits / 8 : nullptr;
        uint8_t* codes = to && bits == 8 ? to : line_->codes;
        const Encoder& e = *job.encoder;
        const uint16_t* noise = e.stochastic ? noise_.at(job.line, job.rng, run) : nullptr;
        const void* x = at_run(job.x, run);
        with_factors(job, t, run, true, [&](int64_t at, int64_t n, const Factors& f) {
            job.line.encode(e, advance(x, at, job.x.dtype), job.x.dtype, n, f, noise ? noise + at : nullptr,
                            codes + at);
        });
        if (broken_) {
            each_block(job, t, run.begin, run.count, [&](int64_t at, int64_t n, const BlockScale& s) {
                if (job.broken(s)) std::memset(codes + at, static_cast<int>(e.canonical), static_cast<size_t>(n));
            });
        }
        if (to && to != codes) pack_run(job.line, codes, run.count, bits, to);
        return codes;
    }

    void decode(const Job& job, const Tile& t, const Run& run, const uint8_t* codes) {
        void* out = at_run(job.out, run);
        with_factors(job, t, run, false, [&](int64_t at, int64_t n, const Factors& f) {
            job.line.decode(*job.decoder, codes + at, n, f, advance(out, at, job.out.dtype), job.out.dtype);
        });
    }

    // The gradient of a run's elements: grad where they were in range.
    void backward(const Job& job, const Tile& t, const Run& run) {
        const void *x = at_run(job.x, run), *grad = at_run(job.grad, run);
        uint8_t* kept = line_->codes;
        with_factors(job, t, run, true, [&](int64_t at, int64_t n, const Factors& f) {
            job.line.in_range(*job.encoder, advance(x, at, job.x.dtype), job.x.dtype, n, f, kept + at);
        });
        if (size_of(job.grad.dtype) == 4) {
            select<uint32_t>(grad, kept, run.count, at_run(job.out, run));
        } else {
            select<uint16_t>(grad, kept, run.count, at_run(job.out, run));
        }
        if (job.slopes) add_slopes(job, t, run, x, grad, kept);
    }

    // Adds a run's part of the gradients of the scales to the tile's sums.
    void add_slopes(const Job& job, const Tile& t, const Run& run, const void* x, const void* grad,
                    const uint8_t* kept) {
        if (!slope_) slope_.reset(new SlopeLine);
        SlopeLine& s = *slope_;
        with_factors(job, t, run, true, [&](int64_t at, int64_t n, const Factors& f) {
            const void* from = advance(x, at, job.x.dtype);
            job.line.encode(*job.encoder, from, job.x.dtype, n, f, nullptr, s.codes + at);
            job.line.quotients(from, job.x.dtype, n, f, s.quotient + at);
        });
        job.line.decode(*job.decoder, s.codes, run.count, {}, s.level, Dtype::kFloat32);
        job.line.quotients(grad, job.grad.dtype, run.count, {}, s.grad);
        float* sums = job.slopes + t.index * job.slots;
        each_block(job, t, run.begin, run.count, [&](int64_t at, int64_t n, const BlockScale& block) {
            sums[&block - scales.data()] +=
                sum_slopes(kept + at, s.level + at, s.quotient + at, s.grad + at, block.zero_point, n);
        });
    }
};

// -- scales -----------------------------------------------------------------------------------------------------------

void run_with_scales(const Job& job, const Scales& from) {
    const Blocks& b = job.blocks;
    plain_tiles(b).run<Worker>([&](Worker& worker, const Tile& t) {
        const int64_t first = t.begin / b.width, last = (t.end - 1) / b.width;
        worker.scales.clear();
        for (int64_t j = first; j <= last; ++j) {
            const int64_t index = t.row / b.height * b.across + j;
            worker.scales.push_back(read_scale(from.scale, from.zero_point, from.outer, index, job.rule));
        }
        worker.apply(job, t);
    });
}

// Scale number `index`, kept where `to` has a place for it.
BlockScale new_scale(const Job& job, uint32_t high, uint32_t low, int64_t index, const NewScales& to) {
    const BlockScale s = make_scale(high, low, job.rule, to.outer);
    if (to.scale) write_scale(to.scale, to.zero_point, index, job.rule, s);
    return s;
}

// Blocks that a tile holds whole: scales and codes at once.
void run_in_cache(const Job& job, const Tiles& tiles, const NewScales& to) {
    const Blocks& b = job.blocks;
    tiles.run<Worker>([&](Worker& worker, const Tile& t) {
        worker.stats.of(job.line, job.x, b, t, job.scheme.affine);
        worker.scales.clear();
        const int64_t first = t.row / b.height * b.across + t.begin / b.width,
                      count = (t.end - t.begin + b.width - 1) / b.width;
        for (int64_t j = 0; j < count; ++j) {
            const size_t at = static_cast<size_t>(j);
            worker.scales.push_back(new_scale(job, worker.stats.high[at], worker.stats.low[at], first + j, to));
        }
        worker.apply(job, t);
    });
}

// Large blocks: all statistics, then all scales, then all codes.
void run_in_passes(const Job& job, const NewScales& to) {
    const Blocks& b = job.blocks;
    const size_t count = static_cast<size_t>(b.down * b.across);
    std::vector<std::atomic<uint32_t>> high(count), low(count);
    for (size_t i = 0; i < count; ++i) high[i] = low[i] = 0;
    // Whole blocks across if they are narrow enough, else pieces of one block.
    const bool whole = b.width <= kRun;
    const int64_t pieces = whole ? 1 : (b.width + kRun - 1) / kRun;
    const int64_t width = whole ? kRun / b.width * b.width : kRun;
    const int64_t columns = whole ? (b.cols + width - 1) / width : b.across * pieces;
    const int64_t height = std::min(b.height, std::max<int64_t>(kGrain / width, 1)),
                  down = (b.height + height - 1) / height;
    parallel_for(b.down * down * columns, 1, [&](int64_t first, int64_t last) {
        Stats stats;
        for (int64_t i = first; i < last; ++i) {
            const int64_t strip = i / columns, column = i % columns, top = strip / down * b.height;
            const int64_t row = top + strip % down * height, bottom = std::min({row + height, top + b.height, b.rows});
            const int64_t block_end = whole ? b.cols : std::min((column / pieces + 1) * b.width, b.cols);
            const int64_t begin = whole ? column * width : column / pieces * b.width + column % pieces * kRun;
            const int64_t end = std::min(begin + width, block_end);
            if (row >= bottom || begin >= end) continue;
            stats.of(job.line, job.x, b, {row, bottom - row, begin, end, 0}, job.scheme.affine);
            const size_t at = static_cast<size_t>(row / b.height * b.across + begin / b.width);
            for (size_t j = 0; j < static_cast<size_t>((end - begin + b.width - 1) / b.width); ++j) {
                raise(high[at + j], stats.high[j]);
                raise(low[at + j], stats.low[j]);
            }
        }
    });
    std::vector<BlockScale> scales(count);
    parallel_for(static_cast<int64_t>(count), kGrain, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const size_t at = static_cast<size_t>(i);
            scales[at] = new_scale(job, high[at], low[at], i, to);
        }
    });
    plain_tiles(b).run<Worker>([&](Worker& worker, const Tile& t) {
        const auto from = scales.begin() + t.row / b.height * b.across;
        worker.scales.assign(from + t.begin / b.width, from + (t.end - 1) / b.width + 1);
        worker.apply(job, t);
    });
}

void run_dynamic(Job& job, const NewScales& to) {
    job.dynamic = true;
    const Blocks& b = job.blocks;
    const Tiles tiles(b, b.height, whole_width(b));
    const bool small = b.height * b.width <= kCached || tiles.count() >= 8 * num_threads();
    small ? run_in_cache(job, tiles, to) : run_in_passes(job, to);
}

// With the scales given, or else with those of x.
void run(Job& job, const Scales& scales) {
    scales.scale ? run_with_scales(job, scales) : run_dynamic(job, {nullptr, nullptr, scales.outer});
}

Job job_of(Shape shape, const SchemeParams& scheme) {
    return {lines(), shape, scheme, {shape, scheme}, scale_rule(scheme)};
}

Job encoding(const Values& x, Shape shape, const SchemeParams& scheme, const Encoder& encoder, const Rng& rng) {
    Job job = job_of(shape, scheme);
    job.x = x;
    job.encoder = &encoder;
    job.rng = rng;
    return job;
}

}  // namespace

void quantize(const Values& x, Shape shape, const SchemeParams& scheme, const NewScales& scales, Rounding rounding,
              const Rng& rng, uint8_t* codes) {
    const Encoder encoder = make_encoder(scheme.format, true, rounding == kStochastic);
    Job job = encoding(x, shape, scheme, encoder, rng);
    job.codes = codes;
    run_dynamic(job, scales);
}

void quantize_static(const Values& x, Shape shape, const SchemeParams& scheme, const Scales& scales, Rounding rounding,
                     const Rng& rng, uint8_t* codes) {
    const Encoder encoder = make_encoder(scheme.format, true, rounding == kStochastic);
    Job job = encoding(x, shape, scheme, encoder, rng);
    job.codes = codes;
    run_with_scales(job, scales);
}

void dequantize(const uint8_t* codes, Shape shape, const SchemeParams& scheme, const Scales& scales,
                const Results& out) {
    const Decoder decoder(scheme.format);
    Job job = job_of(shape, scheme);
    job.stored = codes;
    job.decoder = &decoder;
    job.out = out;
    run_with_scales(job, scales);
}

void fake_quantize(const Values& x, Shape shape, const SchemeParams& scheme, const Scales& scales, Rounding rounding,
                   const Rng& rng, const Results& out) {
    const Encoder encoder = make_encoder(scheme.format, true, rounding == kStochastic);
    const Decoder decoder(scheme.format);
    Job job = encoding(x, shape, scheme, encoder, rng);
    job.decoder = &decoder;
    job.out = out;
    run(job, scales);
}

void fake_quantize_backward(const Values& grad, const Values& x, Shape shape, const SchemeParams& scheme,
                            const Scales& scales, const Results& grad_x, float* grad_scale) {
    const Encoder encoder = make_encoder(scheme.format, true, false);
    const Decoder decoder(scheme.format);
    Job job = encoding(x, shape, scheme, encoder, {});
    job.grad = grad;
    job.out = grad_x;
    if (!grad_scale) return run(job, scales);
    const Blocks& b = job.blocks;
    const Tiles tiles = plain_tiles(b);
    job.slots = std::min(kRun, b.cols) / b.width + 2;
    std::vector<float> slopes(static_cast<size_t>(tiles.count() * job.slots));
    job.slopes = slopes.data();
    job.decoder = &decoder;
    run_with_scales(job, scales);
    parallel_for(b.down * b.across, kGrain, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t block = i % b.across;
            float sum = 0.0f;
            tiles.touching(i / b.across, block, [&](int64_t tile, int64_t begin) {
                sum += job.slopes[tile * job.slots + block - begin / b.width];
            });
            grad_scale[i] = sum;
        }
    });
}

}  // namespace lowbit::cpu
