// quantize, quantize_static, dequantize, fake_quantize: blocks, scales and elements of a matrix.
//
// The matrix is cut into tiles: some columns of the rows of one row of blocks. Where blocks are small, a tile holds
// whole ones, and one thread reads it twice, the second time from cache: once for the scales, once for the codes.
// Blocks too large for that (or too few to share out) take two passes over memory, whose maxima do not depend on their
// order.
#include <numeric>
#include <vector>

#include "common/scales.h"
#include "cpu/codec.h"
#include "cpu/lines.h"
#include "cpu/runs.h"

namespace lowbit::cpu {
namespace {

constexpr int64_t kNarrow = 16;       // blocks of fewer columns: maxima by columns, folded afterwards
constexpr int64_t kSpread = 128;      // blocks of fewer columns: factors spread out to one an element
constexpr int64_t kCached = 1 << 18;  // elements of a block that surely stay in the second-level cache

constexpr int64_t kPlain = 1 << 17;  // elements of a tile that needs no whole blocks

// How a scheme's blocks lie on the matrix.
struct Blocks {
    Blocks(Shape s, const SchemeParams& p)
        : rows(s.rows),
          cols(s.cols),
          height(std::min(p.block_rows, s.rows)),
          width(std::min(p.block_cols, s.cols)),
          down((s.rows + height - 1) / height),
          across((s.cols + width - 1) / width) {}
    int64_t rows, cols, height, width, down, across;
};

// Rows [row, row + height) of one row of blocks, columns [begin, end).
struct Tile {
    int64_t row, height, begin, end;
};

// Numbers of tiles of at most `height` rows and `width` columns; `width` never straddles a block if it is larger than
// one.
class Tiles {
  public:
    Tiles(const Blocks& blocks, int64_t height, int64_t width)
        : b_(blocks),
          height_(std::min(height, blocks.height)),
          width_(width),
          down_((blocks.height + height_ - 1) / height_),
          across_((blocks.cols + width - 1) / width) {}

    int64_t count() const { return b_.down * down_ * across_; }
    int64_t elements() const { return height_ * std::min(width_, b_.cols); }
    Tile at(int64_t i) const {
        const int64_t strip = i / across_, first = strip / down_ * b_.height, row = first + strip % down_ * height_;
        const int64_t end = std::min({row + height_, first + b_.height, b_.rows}), begin = i % across_ * width_;
        return {row, std::max<int64_t>(end - row, 0), begin, std::min(begin + width_, b_.cols)};
    }
    // Calls f(Worker&, tile) on several threads, with one Worker a thread.
    template <class Worker, class F>
    void run(const F& f) const {
        parallel_for(count(), (kGrain + elements() - 1) / elements(), [&](int64_t first, int64_t last) {
            Worker worker;
            for (int64_t i = first; i < last; ++i) f(worker, at(i));
        });
    }

  private:
    const Blocks& b_;
    int64_t height_, width_, down_, across_;
};

// Tiles that need no whole blocks: runs of some rows, over which spread factors serve.
Tiles plain_tiles(const Blocks& b) { return Tiles(b, std::max<int64_t>(kPlain / std::min(b.cols, kRun), 1), kRun); }

// Columns of tiles that hold whole blocks, at whole bytes of packed codes.
int64_t whole_width(const Blocks& b) {
    const int64_t unit = b.width / std::gcd(b.width, int64_t{8}) * 8;
    const int64_t wanted = std::clamp<int64_t>(kGrain / b.height, 256, kRun);
    return unit >= b.cols ? b.cols : std::max(unit, wanted / unit * unit);
}

// -- statistics
// --------------------------------------------------------------------------------------------------------

// The largest positive and negative magnitudes of each block in a tile (`high` alone, of both, without a zero point).
class Stats {
  public:
    void of(const Lines& line, const Values& x, const Blocks& b, const Tile& t, bool affine) {
        const int64_t n = t.end - t.begin;
        const bool narrow = b.width < kNarrow;
        const size_t slots = static_cast<size_t>(narrow ? n : (n + b.width - 1) / b.width);
        high.assign(slots, 0);
        low.assign(slots, 0);
        for (int64_t r = t.row; r < t.row + t.height; ++r) {
            const void* from = advance(x.data, r * x.stride + t.begin, x.dtype);
            if (narrow) {
                line.column_stats(from, x.dtype, n, affine, high.data(), low.data());
            } else {
                line.block_stats(from, x.dtype, n, b.width, affine, high.data(), low.data());
            }
        }
        if (!narrow || b.width == 1) return;
        for (int64_t j = 0; j < n; ++j) {
            const size_t from = static_cast<size_t>(j), to = static_cast<size_t>(j / b.width);
            const bool first = j % b.width == 0;
            high[to] = first ? high[from] : std::max(high[to], high[from]);
            low[to] = first ? low[from] : std::max(low[to], low[from]);
        }
    }
    std::vector<uint32_t> high, low;
};

// -- elements
// ----------------------------------------------------------------------------------------------------------

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
    bool dynamic = false;  // scales come from x itself: a NaN scale makes canonical codes

    bool broken(const BlockScale& s) const { return dynamic && is_nan(bits_of(s.value)); }
};

// Encodes and decodes tiles, given their blocks' scales; holds the scratch memory of one thread.
class Worker {
  public:
    Stats stats;
    std::vector<BlockScale> scales;  // of the blocks that the tile touches, from the one at its first column on

    void apply(const Job& job, const Tile& t) {
        const bool spread = job.blocks.width < kSpread;
        broken_ = std::any_of(scales.begin(), scales.end(), [&](const BlockScale& s) { return job.broken(s); });
        for (int64_t begin = t.begin; begin < t.end; begin += kRun) {
            const int64_t count = std::min(kRun, t.end - begin);
            if (spread) spread_factors(job, t, begin, count);
            for (int64_t row = t.row; row < t.row + t.height; ++row) {
                const Run run{row, begin, count};
                const uint8_t* codes = job.stored ? unpacked(job, run) : encoded(job, t, run, spread);
                if (job.decoder) decode(job, t, run, spread, codes);
            }
        }
    }

  private:
    struct Line {
        uint8_t codes[kRun];
        float divisor[kRun], scale[kRun], zero[kRun];
    };
    std::unique_ptr<Line> line_{new Line};
    Noise noise_;
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

    Factors spread_out(const Job& job, const float* each) const {
        Factors f;
        f.mode = Factors::kEach;
        f.each = each;
        f.zeros = job.scheme.affine ? line_->zero : nullptr;
        return f;
    }

    const uint8_t* unpacked(const Job& job, const Run& run) {
        const int bits = job.scheme.format.bits;
        const uint8_t* from = job.stored + run.row * packed_cols(job.shape.cols, bits) + run.begin * bits / 8;
        if (bits == 8) return from;
        unpack_run(job.line, from, run.count, bits, line_->codes);
        return line_->codes;
    }

    const uint8_t* encoded(const Job& job, const Tile& t, const Run& run, bool spread) {
        const int bits = job.scheme.format.bits;
        uint8_t* to =
            job.codes ? job.codes + run.row * packed_cols(job.shape.cols, bits) + run.begin * bits / 8 : nullptr;
        uint8_t* codes = to && bits == 8 ? to : line_->codes;
        const Encoder& e = *job.encoder;
        const uint16_t* noise = e.stochastic ? noise_.at(job.line, job.rng, run) : nullptr;
        const void* x = advance(job.x.data, run.row * job.x.stride + run.begin, job.x.dtype);
        if (spread) job.line.encode(e, x, job.x.dtype, run.count, spread_out(job, line_->divisor), noise, codes);
        if (spread && !broken_) return finish(job, run, to, codes);
        each_block(job, t, run.begin, run.count, [&](int64_t at, int64_t n, const BlockScale& s) {
            if (job.broken(s)) {
                std::memset(codes + at, static_cast<int>(e.canonical), static_cast<size_t>(n));
            } else if (!spread) {
                job.line.encode(e, advance(x, at, job.x.dtype), job.x.dtype, n,
                                {Factors::kOne, divisor_of(s.value), s.zero_point}, noise ? noise + at : nullptr,
                                codes + at);
            }
        });
        return finish(job, run, to, codes);
    }

    // Packs a run of codes that has been made apart from where it belongs.
    static const uint8_t* finish(const Job& job, const Run& run, uint8_t* to, const uint8_t* codes) {
        if (to && to != codes) pack_run(job.line, codes, run.count, job.scheme.format.bits, to);
        return codes;
    }

    void decode(const Job& job, const Tile& t, const Run& run, bool spread, const uint8_t* codes) {
        void* out = advance(job.out.data, run.row * job.out.stride + run.begin, job.out.dtype);
        if (spread) {
            job.line.decode(*job.decoder, codes, run.count, spread_out(job, line_->scale), out, job.out.dtype);
            return;
        }
        each_block(job, t, run.begin, run.count, [&](int64_t at, int64_t n, const BlockScale& s) {
            job.line.decode(*job.decoder, codes + at, n, {Factors::kOne, s.value, s.zero_point},
                            advance(out, at, job.out.dtype), job.out.dtype);
        });
    }
};

// -- scales
// ------------------------------------------------------------------------------------------------------------

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
            stats.of(job.line, job.x, b, {row, bottom - row, begin, end}, job.scheme.affine);
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

}  // namespace lowbit::cpu
