// A block of a's rows is decoded once, by all threads, into memory that they share. Then each thread takes panels of
// b's rows, columns of the output, decodes a chunk of K of each, and multiplies it with all rows of the block while it
// is in the nearest cache; a's chunk stays in the second-level cache meanwhile.
//
// Every output element is summed in the order of K by one thread, and how K is cut depends on the product alone; so
// the number of threads never changes a bit.
#include "cpu/matmul/gemm_tiles.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/matmul/gemm_cuts.h"
#include "cpu/matmul/gemm_memory.h"
#include "cpu/matmul/packed.h"
#include "cpu/matmul/panel.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

constexpr int64_t kBlockRows = 512;                  // a chunk of so many decoded rows fits the second-level cache
constexpr int64_t kSharedBytes = 16 << 20;           // decoded rows of a block, where K allows for that many rows
constexpr int64_t kLeastRows = 64;                   // else this many
constexpr int64_t kStreamBytes = int64_t{32} << 20;  // larger outputs bypass the caches

class TileProduct {
  public:
    TileProduct(const Problem& problem, const Kernels& kernels, const Plan& plan, bool serial)
        : p_(problem),
          kernels_(kernels),
          plan_(plan),
          serial_(serial),
          is_few_(problem.b.is_packed() && !plan.matrix && problem.a.rows <= 2 * kStreamedRows),
          need_(problem, plan),
          cuts_(plan, problem.depth, arena(0)) {
        const int64_t fit = kSharedBytes / (cuts_.num_chunks * kTileStride * 4);
        const int64_t most = std::clamp(fit, kLeastRows, kBlockRows);
        block_rows_ = ceil_div(p_.a.rows, ceil_div(p_.a.rows, most));
        const int64_t padded = tiles_of(block_rows_).padded();
        s_.place(plan, need_, cuts_, padded, arena(1).reserve(s_.place(plan, need_, cuts_, padded, nullptr)));
    }

    void run() {
        for (row0_ = 0; row0_ < p_.a.rows; row0_ += block_rows_) {
            rows_ = std::min(block_rows_, p_.a.rows - row0_);
            load_a();
            multiply_block();
        }
    }

  private:
    RowTiles tiles_of(int64_t rows) const {
        const int most = is_few_ ? std::min(kStreamedRows, kernels_.max_rows) : kernels_.max_rows;
        return {rows, plan_, kernels_, plan_.packed != nullptr ? plan_.packed->rows : most};
    }

    // Whether a register tile's sums are done when it is left, so that all tiles have one place for them.
    bool single() const { return cuts_.num_chunks == 1; }

    static Arena& arena(int index) {
        thread_local Arena arenas[2];
        return arenas[index];
    }

    static Sums from(Sums sums, int64_t offset) {
        if (sums.scale != nullptr) sums.scale += offset;
        if (sums.zero != nullptr) sums.zero += offset;
        if (sums.sum != nullptr) sums.sum += offset;
        return sums;
    }

    // Some register tiles of a chunk at a time: about as many rows as are transposed together.
    void load_a() {
        const RowTiles tiles = tiles_of(rows_);
        const int64_t each = ceil_div(kTransposed, tiles.begin(1)), groups = ceil_div(tiles.count, each);
        const int64_t items = groups * cuts_.num_chunks;
        parallel_for(items, serial_ || is_few_ ? items : 1, [&](int64_t begin, int64_t end) {
            thread_local Arena arena;
            const int64_t dwords = plan_.matrix ? 0 : each * tiles.begin(1) * kTileStride;
            uint8_t* raw = arena.reserve(kRawBytes + kMaxBlocks * sizeof(float) + static_cast<size_t>(dwords) * 4);
            auto* levels = reinterpret_cast<float*>(raw + kRawBytes);
            const Loader a{p_.a, kernels_, plan_, true, raw, levels};
            auto* decoded = reinterpret_cast<uint32_t*>(levels + kMaxBlocks);
            for (int64_t i = begin; i < end; ++i) {
                const int64_t first = i % groups * each, last = std::min(first + each, tiles.count);
                const int64_t row = tiles.begin(first), index = i / groups;
                uint32_t* rows = plan_.matrix ? s_.chunk(index, row) : decoded;
                load_rows(a, row, tiles.begin(last), index, rows);
                for (int64_t t = first; t < last && !plan_.matrix; ++t) {
                    const int64_t at = tiles.begin(t), count = tiles.begin(t + 1) - at;
                    kernels_.pack(rows + (at - row) * kTileStride, count, cuts_.chunks[index].dwords,
                                  s_.chunk(index, at));
                }
            }
        });
    }

    void load_rows(const Loader& a, int64_t row, int64_t padded, int64_t index, uint32_t* rows) const {
        const Chunk& chunk = cuts_.chunks[index];
        const int64_t end = std::min(padded, rows_);
        const Sums sums = from(s_.a_sums, chunk.first * s_.a_sums.stride + row);
        a.load(row0_ + row, end - row, cuts_.segments + chunk.first, chunk.count, rows, sums);
        if (index == 0 && in_epilogue(p_.a, plan_.a_folded)) {
            for (int64_t r = row; r < end; ++r) s_.row_scale[r] = row_scale(p_.a, plan_.a_folded, row0_ + r);
        }
        // Rows that pad the last register tile are zero; no result of theirs is stored.
        for (int64_t r = end; r < padded; ++r) {
            std::memset(rows + (r - row) * kTileStride, 0, static_cast<size_t>(kTileStride) * 4);
            for (int64_t s = chunk.first; s < chunk.first + chunk.count; ++s) {
                const int64_t at = s * s_.a_sums.stride + r;
                if (s_.a_sums.scale != nullptr) s_.a_sums.scale[at] = 0;
                if (s_.a_sums.zero != nullptr) s_.a_sums.zero[at] = 0;
                if (s_.a_sums.sum != nullptr) s_.a_sums.sum[at] = 0;
            }
        }
    }

    // Columns, and where there are too few of them for the threads also rows, are what threads take.
    void multiply_block() {
        const RowTiles tiles = tiles_of(rows_);
        const int64_t panels = ceil_div(p_.b.rows, kernels_.nr), threads = serial_ ? 1 : num_threads();
        int64_t parts = 1;
        auto waste = [&](int64_t n) { return ceil_div(panels * n, threads) * threads * 8 > panels * n * 9; };
        while (waste(parts) && 2 * parts < tiles.count && parts < threads) ++parts;
        const int64_t units = panels * parts;
        parallel_for(units, serial_ ? units : 1, [&](int64_t begin, int64_t end) {
            thread_local Arena arena;
            ThreadMemory own{};
            const int64_t rows = single() ? tiles.begin(1) : tiles.padded();
            const size_t bytes = own.place(plan_, need_, kernels_.nr, rows, nullptr);
            own.place(plan_, need_, kernels_.nr, rows, arena.reserve(bytes));
            if (plan_.matrix) kernels_.enter();
            while (begin < end) {
                const int64_t part = begin / panels, panel = begin % panels;
                const int64_t count =
                    std::min({is_few_ ? kPanelRows / kernels_.nr : kGroup, panels - panel, end - begin});
                const int64_t first = part * tiles.count / parts, last = (part + 1) * tiles.count / parts;
                Group(*this, own, tiles, first, last, panel, count).run();
                begin += count;
            }
            if (plan_.matrix) kernels_.leave();
            std::atomic_thread_fence(std::memory_order_seq_cst);  // what bypassed the caches is seen by all
        });
    }

    // Whether an operand leaves a scale to the epilogue: one that is constant along K, or the global scale of folded
    // ones.
    bool in_epilogue(const Operand& x, bool folded) const {
        if (!x.has_codes() || plan_.scaled) return false;
        return !folded || (plan_.kind == Kind::bf16 && x.global_scale != nullptr);
    }
    static float row_scale(const Operand& x, bool folded, int64_t row) {
        return folded ? global_scale_at(x, row) : scale_at(x, row, 0);
    }

    // Some panels of b with some rows of a's block.
    class Group {
      public:
        Group(const TileProduct& product, const ThreadMemory& own, const RowTiles& tiles, int64_t first, int64_t last,
              int64_t panel, int64_t count)
            : t_(product),
              own_(own),
              tiles_(tiles),
              first_(first),
              last_(last),
              col0_(panel * product.kernels_.nr),
              cols_(std::min(count * product.kernels_.nr, product.p_.b.rows - col0_)) {}

        void run() {
            prepare_epilogue();
            const int nr = t_.kernels_.nr;
            int64_t terms = 0;
            for (int64_t chunk = 0; chunk < t_.cuts_.num_chunks; ++chunk) {
                const int64_t length = t_.cuts_.chunks[chunk].end - t_.cuts_.chunks[chunk].begin;
                if (t_.plan_.wide && terms + length > kExactTerms) {
                    widen_sums();
                    terms = 0;
                }
                fresh_ = terms == 0;
                final_ = chunk == t_.cuts_.num_chunks - 1 && !t_.plan_.wide;
                for (int64_t col = 0; col < cols_; col += nr) {
                    const bool more = col + nr < cols_;
                    multiply_panel(chunk, col, more ? chunk : chunk + 1, more ? col + nr : 0);
                }
                terms += length;
            }
            if (!t_.plan_.wide) return;
            widen_sums();
            for (int64_t col = 0; col < cols_; col += nr) {
                for (int64_t tile = first_; tile < last_; ++tile) finish(tile, col);
            }
        }

      private:
        void multiply_panel(int64_t index, int64_t col, int64_t next_chunk, int64_t next_col) {
            const Plan& plan = t_.plan_;
            const Kernels& kernels = t_.kernels_;
            const Chunk& chunk = t_.cuts_.chunks[index];
            const Segment* segments = t_.cuts_.segments + chunk.first;
            const int64_t valid = std::min<int64_t>(kernels.nr, cols_ - col);
            const PanelLoader b{t_.p_.b, kernels, plan, own_.b_rows, own_.scales, own_.zeros, own_.raw, own_.levels};
            const bool packed = plan.packed != nullptr;
            const uint32_t* panel = packed ? packed_panel(t_.p_.b, col0_ + col)
                                           : b.load(col0_ + col, valid, segments, chunk.count, own_.b_panel);
            b.load_sums(col0_ + col, valid, segments, chunk.count, panel, own_.b_sums);
            look_ahead(next_chunk, next_col);
            int64_t ahead = 0;
            const uint32_t* a = t_.s_.chunk(index, 0);
            const Multiply tile_kernel = packed ? plan.packed->run : kernels.tile[static_cast<int>(plan.kind)];
            const int64_t per_dword = 32 / (t_.p_.b.has_codes() ? t_.p_.b.table->bits : 32);
            Tile tile;  // made once: clearing it takes longer than it seems
            tile.c_stride = own_.c_stride;
            for (int64_t i = first_; i < last_; ++i) {
                const int64_t row = tiles_.begin(i), rows = tiles_.begin(i + 1) - row;
                tile.c = own_.c + sums_at(row, col);
                tile.fresh = fresh_;
                for (int s = 0; s < chunk.count; ++s) {
                    tile.a = a + row * kTileStride + segments[s].dword * (plan.matrix ? 1 : rows);
                    tile.b =
                        panel + (packed ? segments[s].begin / per_dword * kPanelRows : segments[s].dword * kernels.nr);
                    tile.depth = segments[s].dwords;
                    tile.streamed = t_.is_few_ && i == first_ && panel != own_.b_panel;
                    tile.ahead = own_.ahead + std::min(ahead, num_ahead_);
                    ahead += tile.depth / kAheadSteps;
                    put_sums(tile, (chunk.first + s) * t_.s_.a_sums.stride + row, s * own_.b_sums.stride);
                    tile_kernel(plan.scaled, static_cast<int>(rows), tile);
                    tile.fresh = false;
                }
                if (final_) finish(i, col);
            }
        }

        // Lists the lines that the next panel is made from: rows far apart, which the hardware does not foresee.
        void look_ahead(int64_t index, int64_t col) {
            const Operand& b = t_.p_.b;
            num_ahead_ = 0;
            if (index < t_.cuts_.num_chunks && b.col_stride == 1 && !t_.is_few_) {
                const int64_t bits = b.has_codes() ? b.table->bits : b.dtype == Element::f32 ? 32 : 16;
                const int64_t pitch = b.has_codes() ? b.row_stride : b.row_stride * bits / 8;
                const int64_t valid = std::min<int64_t>(t_.kernels_.nr, cols_ - col);
                const Chunk& chunk = t_.cuts_.chunks[index];
                const uint8_t* base = static_cast<const uint8_t*>(b.data) + (col0_ + col) * pitch;
                const int64_t begin = chunk.begin * bits / 8, end = ceil_div(chunk.end * bits, 8);
                auto list = [&](const uint8_t* from, const uint8_t* to) {
                    for (; from < to; from += kLine) own_.ahead[num_ahead_++] = from;
                };
                if (b.is_packed()) {
                    if (t_.kernels_.nr < kPanelRows) return fill_ahead();  // a stream, which the hardware foresees
                    const auto* panel = reinterpret_cast<const uint8_t*>(packed_panel(b, col0_ + col));
                    list(panel + begin * kPanelRows, panel + end * kPanelRows);
                } else {
                    for (int64_t r = 0; r < valid; ++r, base += pitch) list(base + begin, base + end);
                }
            }
            fill_ahead();
        }
        void fill_ahead() const {
            std::fill_n(own_.ahead + num_ahead_, kAheadPad, reinterpret_cast<const uint8_t*>(own_.b_panel));
        }

        void put_sums(Tile& tile, int64_t a, int64_t b) const {
            const Sums &left = t_.s_.a_sums, &right = own_.b_sums;
            if (right.scale != nullptr) {
                tile.a_scale = left.scale + a;
                tile.b_scale = right.scale + b;
            }
            if (left.zero != nullptr) {
                tile.a_zero = left.zero + a;
                tile.b_sum = right.sum + b;
            }
            if (right.zero != nullptr) {
                tile.a_sum = left.sum + a;
                tile.b_zero = right.zero + b;
            } else if (left.sum != nullptr) {
                tile.start = left.sum + a;
            }
        }

        int64_t sums_at(int64_t row, int64_t col) const { return t_.single() ? 0 : row * own_.c_stride + col; }

        void widen_sums() {
            const auto* narrow = reinterpret_cast<const int32_t*>(own_.c);
            const int64_t begin = tiles_.begin(first_) * own_.c_stride, end = tiles_.begin(last_) * own_.c_stride;
            for (int64_t i = begin; i < end; ++i) own_.wide[i] = (widened_ ? own_.wide[i] : 0) + narrow[i];
            widened_ = true;
        }

        void prepare_epilogue() {
            const Problem& p = t_.p_;
            const bool scaled = t_.in_epilogue(p.b, t_.plan_.b_folded);
            for (int64_t n = 0; n < cols_; ++n) {
                own_.col_scale[n] = scaled ? row_scale(p.b, t_.plan_.b_folded, col0_ + n) : 1.0f;
                if (p.bias != nullptr) own_.bias[n] = float_at(p.bias, p.bias_dtype, (col0_ + n) * p.bias_stride);
            }
        }

        // Scales that are constant along K, bias and cast, of one register tile.
        void finish(int64_t tile, int64_t col) const {
            const Problem& p = t_.p_;
            const Plan& plan = t_.plan_;
            const int64_t row = tiles_.begin(tile), end = std::min(tiles_.begin(tile + 1), t_.rows_);
            const bool integers = plan.kind == Kind::s16 || plan.kind == Kind::s8u8;
            const bool a_scaled = t_.in_epilogue(p.a, plan.a_folded), b_scaled = t_.in_epilogue(p.b, plan.b_folded);
            const int64_t at = sums_at(row, col), size = p.out_dtype == Element::f32 ? 4 : 2;
            Rows rows;
            rows.row.sum_kind = plan.wide ? 2 : integers && !plan.scaled ? 1 : 0;
            rows.row.sum = plan.wide ? static_cast<void*>(own_.wide + at) : own_.c + at;
            rows.row.scaled = a_scaled || b_scaled;
            rows.row.b_scale = own_.col_scale + col;
            rows.row.bias = p.bias == nullptr ? nullptr : own_.bias + col;
            const int64_t pitch = p.out_stride > 0 ? p.out_stride : p.b.rows;
            rows.row.out = static_cast<uint8_t*>(p.out) + ((t_.row0_ + row) * pitch + col0_ + col) * size;
            rows.row.out_dtype = p.out_dtype;
            rows.row.cols = std::min<int64_t>(t_.kernels_.nr, cols_ - col);
            rows.row.stream = p.a.rows * p.b.rows * size >= kStreamBytes;
            rows.count = end - row;
            rows.sum_stride = own_.c_stride * (plan.wide ? 8 : 4);
            rows.out_stride = pitch * size;
            rows.a_scales = a_scaled ? t_.s_.row_scale + row : nullptr;
            t_.kernels_.finish_rows(rows);
        }

        const TileProduct& t_;
        const ThreadMemory& own_;
        const RowTiles& tiles_;
        const int64_t first_, last_, col0_, cols_;
        int64_t num_ahead_ = 0;
        bool fresh_ = false, final_ = false, widened_ = false;
    };

    const Problem& p_;
    const Kernels& kernels_;
    const Plan plan_;
    const bool serial_;
    const bool is_few_;  // rows of a weight in panels, which then is one stream from memory
    const Corrections need_;
    const Cuts cuts_;
    Shared s_{};
    int64_t block_rows_ = 0, row0_ = 0, rows_ = 0;
};

}  // namespace

void multiply_tiles(const Problem& problem, const Kernels& kernels) {
    const bool small = problem.a.rows * problem.b.rows * problem.depth < kSmallProduct;
    TileProduct(problem, kernels, make_plan(problem, kernels), small).run();
}

}  // namespace lowbit::cpu::mm
