// Blocks on a matrix; tiles, which are what one thread takes at a time: some columns of the rows of one row of blocks;
// and the maxima of the blocks in a tile.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/codec/codec.h"
#include "cpu/row_kernels.h"
#include "cpu/runs.h"
#include "cpu/threads.h"

namespace lowbit::cpu {

constexpr int64_t kNarrow = 16;      // blocks of fewer columns: maxima by columns, folded afterwards
constexpr int64_t kPlain = 1 << 17;  // elements of a tile that needs no whole blocks
constexpr int64_t kTall = 1 << 16;   // elements of a tile of several rows of whole blocks: a fraction of the
                                     // second-level cache

// Divisions of 64 bits take as long as a hundred elements.
inline int64_t quotient_of(int64_t a, int64_t b) {
    return ((a | b) >> 31) == 0 ? static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b)) : a / b;
}

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

// Rows [row, row + height) of one row of blocks, columns [begin, end), from block number `block` of its row on.
struct Tile {
    int64_t row, height, begin, end, index, block_row, block;
    int64_t blocks(int64_t width) const { return quotient_of(end - 1, width) - block + 1; }
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
        const int64_t strip = quotient_of(i, across_), block_row = quotient_of(strip, down_);
        const int64_t top = block_row * b_.height, row = top + (strip - block_row * down_) * height_;
        const int64_t bottom = std::min({row + height_, top + b_.height, b_.rows});
        const int64_t begin = (i - strip * across_) * width_, end = std::min(begin + width_, b_.cols);
        return {row, std::max<int64_t>(bottom - row, 0), begin, end, i, block_row, quotient_of(begin, b_.width)};
    }
    // Calls f(number of a tile, its first column) for the tiles that touch a block, in order.
    template <class F>
    void touching(int64_t block_row, int64_t block_col, const F& f) const {
        const int64_t begin = block_col * b_.width, end = std::min(begin + b_.width, b_.cols);
        for (int64_t i = block_row * down_; i < (block_row + 1) * down_; ++i) {
            for (int64_t k = begin / width_; k * width_ < end; ++k) f(i * across_ + k, k * width_);
        }
    }
    // Calls f(Worker&, tile, the tile that comes after it) on several threads, each with a Worker that it keeps; last
    // tiles first where `backwards`.
    template <class Worker, class F>
    void run(bool backwards, const F& f) const {
        parallel_for(count(), (kGrain + elements() - 1) / elements(), [&](int64_t first, int64_t last) {
            Worker& worker = Worker::mine();
            worker.start();
            Tile now = at(backwards ? last - 1 : first);
            for (int64_t i = first; i < last; ++i) {
                const int64_t after = std::min(i + 1, last - 1);
                const Tile next = at(backwards ? first + last - 1 - after : after);
                f(worker, now, next);
                now = next;
            }
        });
    }

  private:
    const Blocks& b_;
    int64_t height_, width_, down_, across_;
};

// Tiles that need no whole blocks: runs of some rows, over which spread factors serve.
inline Tiles plain_tiles(const Blocks& b) {
    return Tiles(b, std::max<int64_t>(kPlain / std::min(b.cols, kRun), 1), kRun);
}

// Columns of tiles that hold whole blocks, at whole bytes of packed codes.
inline int64_t whole_width(const Blocks& b) {
    const int64_t unit = b.width / std::gcd(b.width, int64_t{8}) * 8;
    const int64_t wanted = std::clamp<int64_t>(kTall / b.height, 256, kRun);
    return unit >= b.cols ? b.cols : std::max(unit, wanted / unit * unit);
}

// Elements of a run, as x.element() has them; `room` holds them where they are products.
inline const void* elements(const RowKernels& kernels, const Values& x, const Run& run, std::vector<float>& room) {
    const void* at = at_run(x, run);
    if (!x.has_factors()) return at;
    if (room.size() < static_cast<size_t>(run.count)) room.resize(static_cast<size_t>(run.count));
    kernels.product(at, x.dtype, run.count, x.row_factors ? x.row_factors[run.row] : 1.0f,
                    x.col_factors ? x.col_factors + run.begin : nullptr, room.data());
    return room.data();
}

// The largest positive and negative magnitudes of each block in a tile; without `both`, the amax in `high` alone.
class Stats {
  public:
    void of(const RowKernels& kernels, const Values& x, const Blocks& b, const Tile& t, bool both) {
        start(b, t);
        for (int64_t r = t.row; r < t.row + t.height; ++r)
            row(kernels, elements(kernels, x, {r, t.begin, t.end - t.begin}, products_), x.element(), b, t, both);
        finish(b, t);
    }
    // The same, row by row.
    void start(const Blocks& b, const Tile& t) {
        const int64_t slots = b.width < kNarrow ? t.end - t.begin : t.blocks(b.width);
        const size_t room = static_cast<size_t>((slots + kAlign - 1) & -kAlign);
        high.assign(room, 0);
        low.assign(room, 0);
    }
    void row(const RowKernels& kernels, const void* from, Dtype dtype, const Blocks& b, const Tile& t, bool both) {
        const int64_t n = t.end - t.begin;
        if (b.width < kNarrow) return kernels.column_stats(from, dtype, n, both, high.data(), low.data());
        kernels.block_stats(from, dtype, n, b.width, both, high.data(), low.data());
    }
    void finish(const Blocks& b, const Tile& t) {
        if (b.width >= kNarrow || b.width == 1) return;
        for (int64_t j = 0; j < t.end - t.begin; ++j) {
            const size_t from = static_cast<size_t>(j), to = static_cast<size_t>(j / b.width);
            const bool first = j % b.width == 0;
            high[to] = first ? high[from] : std::max(high[to], high[from]);
            low[to] = first ? low[from] : std::max(low[to], low[from]);
        }
    }
    std::vector<uint32_t> high, low;

  private:
    std::vector<float> products_;
};

}  // namespace lowbit::cpu
