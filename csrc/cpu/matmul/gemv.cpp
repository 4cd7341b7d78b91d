// Products with few rows of a: rows of b, decoded in registers.
//
// Every output element is summed over all of K by one thread in an order that depends on K, the formats and, of floats,
// the number of a's rows alone. What is bound by memory reads b in the order that it is stored in: a tile of a's rows
// lies in the nearest cache, or a piece of it where K is long, which then some rows of b take turns with; they stay in
// the second cache, where those after them are fetched meanwhile.
#include <algorithm>
#include <cstring>

#include "cpu/arena.h"
#include "cpu/matmul/gemm_cuts.h"
#include "cpu/matmul/gemv_columns.h"
#include "cpu/matmul/load.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

constexpr int64_t kAheadBytes = 4096;       // fetched for later
constexpr int64_t kNearBytes = 16 << 10;    // of a tile of a at a time
constexpr int64_t kChunkBytes = 128 << 10;  // of rows of b at a time,
constexpr int64_t kChunkSums = 128;         // and vectors of their sums
constexpr int64_t kChunkRows = 64;
constexpr int64_t kTotalsBytes = 16 << 10;  // of sums of integers in blocks at a time

const GemvKernels& gemv_in_use() {
    static constexpr const GemvKernels& (*kTables[])() = {
#define LOWBIT_FEW(name, ...) gemv_##name,
        LOWBIT_ISAS(LOWBIT_FEW)
#undef LOWBIT_FEW
    };
    return kTables[static_cast<int>(current_isa())]();
}

// Some rows of b against all of a.
class Columns : GemvColumns {
  public:
    Columns(const Problem& p, const GemvKernels& gemv, const GemvPlan& plan, const GemvRows& rows)
        : GemvColumns(p, gemv, plan, rows),
          piece_(piece_steps()),
          whole_(piece_ >= plan.steps && plan.tile == plan.rows),
          totals_(totals_of_piece()),
          chunk_(chunk_rows()),
          run_(plan.unit->dots[static_cast<int>(blocks_of(plan))][plan.more]) {
        thread_local Arena arena;
        place(arena.reserve(place(nullptr)));
        common_.table = p.b.table;
        common_.lanes = lanes_;
        common_.block_steps = plan.block_steps;
        common_.per_step = plan.per_step;
        common_.scales = row_scales_;
        common_.zeros = row_zeros_;
        common_.nans = nans_;
        common_.sums_pitch = plan.rows * 4 * gemv.width;
        common_.totals_pitch = totals_ * 4 * gemv.width;
        put_lanes(lanes_);
        std::memset(tails_, 0, static_cast<size_t>(chunk_) * kGemvStepBytes);
        std::fill_n(zeros_, block_room(), zero_offset());
    }

    void run(int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row += chunk_) {
            const int64_t count = std::min(chunk_, end - row);
            multiply(row, count, end);
            if (plan_.exact()) {
                exact_results(row, count);
            } else if (!plan_.in_totals()) {
                float_results(count);
            }
            finish(results_, chunk_ * sizeof(int64_t), plan_.exact() ? 2 : 0, row, count);
        }
    }

  private:
    static GemvBlocks blocks_of(const GemvPlan& plan) {
        if (plan.per_step > 1) return GemvBlocks::lanes;
        return plan.blocks && plan.block_steps == 1 ? GemvBlocks::step : GemvBlocks::steps;
    }

    size_t place(uint8_t* base) {
        Parts parts(base);
        parts.take(sums_, (plan_.in_totals() ? gemv_.width : chunk_) * gemv_.width *
                              (plan_.in_totals() ? plan_.tile * totals_ : plan_.rows));
        parts.take(block_scales_, plan_.in_totals() ? 2 * block_room() * gemv_.width : 0);
        parts.take(row_sums_, chunk_ * plan_.rows);
        parts.take(results_, chunk_ * plan_.rows);
        parts.take(tails_, chunk_ * kGemvStepBytes);
        parts.take(lanes_, gemv_.width);
        parts.take(scales_, plan_.blocks ? chunk_ * block_room() : 0);
        parts.take(zeros_, (p_.b.zero_point == nullptr ? 1 : chunk_) * block_room());
        return parts.used();
    }

    // Of a tile: what the nearest cache holds, in pieces of about the same length and of whole blocks.
    int64_t piece_steps() const {
        const int64_t step = plan_.unit->vectors * plan_.tile * 4 * gemv_.width,
                      most = std::max<int64_t>(kNearBytes / step, 1);
        const int64_t count = (plan_.steps + most - 1) / most, block = plan_.blocks ? plan_.block_steps : 1;
        return count <= 1 ? plan_.steps : ((plan_.steps + count - 1) / count + block - 1) / block * block;
    }

    // Vectors of sums of integers in blocks, of one row of a and of b.
    int64_t totals_of_piece() const {
        const int64_t each = plan_.tile * gemv_.width * gemv_.width * 4;
        return std::clamp<int64_t>(kTotalsBytes / each, 1, plan_.num_totals());
    }

    int64_t chunk_rows() const {
        if (plan_.in_totals()) return kChunkRows;
        const int64_t most = std::min(kChunkBytes / std::max<int64_t>(p_.b.row_stride, 1), kChunkSums / plan_.tile);
        // Where nothing is read twice, the scales shall not push a out of the nearest cache.
        const int64_t scaled = whole_ && plan_.blocks ? kNearBytes / 8 / block_room() : kChunkRows;
        return std::clamp<int64_t>(std::min(most, scaled), 1, kChunkRows);
    }

    const uint8_t* codes_of(int64_t row) const {
        return static_cast<const uint8_t*>(p_.b.data) + row * p_.b.row_stride;
    }

    // Rows [row, row + count) of b, of those until `end`.
    void multiply(int64_t row, int64_t count, int64_t end) {
        find_scales(row, count, scales_, row_scales_);
        if (plan_.more) find_zeros(row, count, zeros_, row_zeros_);
        if (plan_.in_totals()) return multiply_totals(row, count, end);
        std::fill_n(nans_, count, false);
        std::memset(sums_, 0, static_cast<size_t>(count * plan_.rows * gemv_.width) * 4);
        Gemv t = common_;
        t.count = count;
        for (int64_t m = 0; m < plan_.rows; m += plan_.tile) {
            t.sums = sums_ + m * gemv_.width;
            for (int64_t s = 0; s < plan_.steps; s += piece_) {
                t.steps = std::min(piece_, plan_.steps - s);
                put_codes(t, row, s);
                if (!whole_) fetch_chunk(t, row + count, end, s, count, 0);
                run_steps(t, m, s);
            }
            if (plan_.rest > 0) run_tail(t, m, row);
        }
    }

    // Integers in blocks: as many rows of b at a time as there are lanes, while a piece of a is near.
    void multiply_totals(int64_t row, int64_t count, int64_t end) {
        const int64_t piece = plan_.per_step > 1 ? totals_ : totals_ * plan_.block_steps;
        Gemv t = common_;
        t.sums = sums_;
        auto each_group = [&](const auto& run) {
            for (int64_t n = 0; n < count; n += gemv_.width) {
                t.count = std::min<int64_t>(gemv_.width, count - n);
                t.scales = row_scales_ + n;
                t.zeros = row_zeros_ + n;
                run(n);
            }
        };
        for (int64_t m = 0; m < plan_.rows; m += plan_.tile) {
            t.sums_pitch = rows_.tile_rows(m) * t.totals_pitch;
            for (int64_t s = 0; s < plan_.steps; s += piece) {
                t.steps = std::min(piece, plan_.steps - s);
                const bool last = s + t.steps == plan_.steps && plan_.rest == 0;
                const int64_t blocks = last ? plan_.num_blocks : plan_.block_of(s + t.steps);
                each_group([&](int64_t n) {
                    put_codes(t, row + n, s);
                    if (piece < plan_.steps) fetch_chunk(t, row + count, end, s, count, n);
                    run_steps(t, m, s);
                    sum_totals(t, m, n, blocks);
                });
            }
            if (plan_.rest == 0) continue;
            each_group([&](int64_t n) {
                run_tail(t, m, row + n);
                sum_totals(t, m, n, plan_.num_blocks);
            });
        }
    }

    // Meanwhile the next chunk is fetched, from its row `next` on: as much of it as t.steps of `count` rows read, a
    // part for each, those before row n left out.
    void fetch_chunk(Gemv& t, int64_t next, int64_t end, int64_t step, int64_t count, int64_t n) const {
        t.ahead_pitch = t.steps * plan_.unit->bytes;
        t.ahead = codes_of(std::min(next, end)) + step * plan_.unit->bytes * count + n * t.ahead_pitch;
    }

    void put_codes(Gemv& t, int64_t row, int64_t step) const {
        t.b = codes_of(row) + step * plan_.unit->bytes;
        t.pitch = t.ahead_pitch = p_.b.row_stride;
        t.ahead = t.b + kAheadBytes;
    }

    void run_steps(Gemv& t, int64_t m, int64_t step) const {
        t.a = rows_.tile(m, step);
        t.block = plan_.block_of(step);
        run_[rows_.tile_rows(m) - 1](t);
    }

    void run_tail(Gemv& t, int64_t m, int64_t row) const {
        for (int64_t n = 0; n < t.count; ++n) take_tail(codes_of(row + n), tails_ + n * kGemvStepBytes);
        t.steps = 1;
        t.b = t.ahead = tails_;
        t.pitch = t.ahead_pitch = kGemvStepBytes;
        run_steps(t, m, plan_.steps);
    }

    // The blocks from t.block to `end`.
    void sum_totals(const Gemv& t, int64_t m, int64_t n, int64_t end) const {
        GemvBlockSums sums;
        sums.totals = sums_;
        sums.count = t.count;
        sums.rows = rows_.tile_rows(m);
        sums.vectors = totals_;
        sums.per_step = plan_.per_step;
        sums.begin = t.block;
        sums.end = end;
        sums.a_scales = rows_.scales() + m;
        sums.b_scales = t.scales;
        sums.a_sums = rows_.block_sums() + m;
        sums.zeros = t.zeros;
        sums.scales = block_scales_;
        sums.out = reinterpret_cast<float*>(results_ + m * chunk_) + n;
        sums.pitch = 2 * chunk_;
        gemv_.sum_blocks(sums);
    }

    void float_results(int64_t count) {
        auto* sums = reinterpret_cast<float*>(row_sums_);
        gemv_.sum_floats(reinterpret_cast<const float*>(sums_), count * plan_.rows, sums);
        const float by = factor(false), by_nan = factor(true);
        for (int64_t m = 0; m < plan_.rows; ++m) {
            auto* out = reinterpret_cast<float*>(results_ + m * chunk_);
            for (int64_t n = 0; n < count; ++n) out[n] = sums[n * plan_.rows + m] * (nans_[n] ? by_nan : by);
        }
    }

    // Sum over k of (a - a_zero) * (code - zero), from sums of products, of a, and of codes.
    void exact_results(int64_t row, int64_t count) {
        gemv_.sum_integers(sums_, count * plan_.rows, row_sums_);
        const int half = p_.b.table->is_signed ? 1 << (p_.b.table->bits - 1) : 0;
        for (int64_t n = 0; n < count; ++n) {
            const int64_t* sums = row_sums_ + n * plan_.rows;
            const int64_t zero = zero_at(p_.b, row + n, 0) + half;
            for (int64_t m = 0; m < p_.a.rows; ++m) {
                int64_t sum = sums[m] - zero * rows_.sum(m);
                if (plan_.ones(p_)) {
                    const int64_t a_zero = zero_at(p_.a, m, 0) + rows_.lift();
                    sum -= a_zero * (sums[p_.a.rows] - p_.depth * zero);
                }
                results_[m * chunk_ + n] = sum;
            }
        }
    }

    const int64_t piece_;   // steps at a time
    const bool whole_;      // all of a is one tile's piece
    const int64_t totals_;  // vectors of a row's sums at a time, of integers in blocks
    const int64_t chunk_;   // rows of b at a time
    const GemvUnit::Run* run_;
    Gemv common_;  // what all calls share
    // Vectors: [chunk, rows], fp32, or int32 of integers in one block; of integers in blocks [lanes, tile, totals].
    int32_t* sums_;
    int64_t* row_sums_;  // [chunk, rows], or fp32
    int64_t* results_;   // [rows, chunk], or fp32 [rows, 2 * chunk]
    uint8_t* tails_;
    int32_t *lanes_, *zeros_;
    float *scales_, *block_scales_;
    const float* row_scales_[kChunkRows];
    const int32_t* row_zeros_[kChunkRows];
    bool nans_[kChunkRows];
};

}  // namespace

bool multiply_gemv(const Problem& problem) {
    const GemvKernels& gemv = gemv_in_use();
    GemvPlan plan;
    if (gemv.width == 0 || !make_gemv_plan(problem, gemv, plan)) return false;
    const FloatEnvironment environment;
    const GemvRows rows(problem, gemv, plan);
    const int64_t products = plan.rows * problem.depth;
    parallel_for(problem.b.rows, std::max<int64_t>(kSmallProduct / products, 1),
                 [&](int64_t begin, int64_t end) { Columns(problem, gemv, plan, rows).run(begin, end); });
    return true;
}

}  // namespace lowbit::cpu::mm
