// Products with few rows of a that are lanes: some rows of b at a time, decoded piece by piece of K.
//
// Every output element is summed over all of K by one thread in an order that depends on K and the formats alone.
#include <algorithm>
#include <cstring>

#include "cpu/arena.h"
#include "cpu/mm_cuts.h"
#include "cpu/mm_few_columns.h"
#include "cpu/mm_load.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

class LaneColumns : FewColumns {
  public:
    LaneColumns(const Problem& p, const FewKernels& few, const FewPlan& plan, const FewRows& rows)
        : FewColumns(p, few, plan, rows),
          step_dwords_(plan.unit->vectors * few.width),
          piece_steps_(kLaneDepth / step_dwords_),
          in_blocks_(plan.unit->lanes.dots[0][0][0] == nullptr || (plan.integers && plan.blocks)) {
        thread_local Arena arena;
        place(arena.reserve(place(nullptr)));
        put_lanes(lanes_);
        std::memset(tails_, plan.integers && !p.b.table->is_signed && p.b.table->bits == 8 ? 0x80 : 0,
                    kLaneCols * kFewStepBytes);
        std::fill_n(zeros_, block_room(), zero_offset());
        for (int64_t m = 0; m < plan.rows && plan.exact(); ++m) {
            const bool real = m < p.a.rows;
            a_zeros_[m] = real ? zero_at(p.a, m, 0) + rows.lift() : 0;
            a_sums_[m] = real ? static_cast<int32_t>(rows.sum(m) - p.depth * a_zeros_[m]) : 0;
        }
        lanes_of_.table = p.b.table;
        lanes_of_.per_step = plan.per_step;
        lanes_of_.lanes = lanes_;
        lanes_of_.scales = row_scales_;
        lanes_of_.zeros = row_zeros_;
        lanes_of_.levels = levels_;
        lanes_of_.starts = starts_;
        lanes_of_.totals = totals_;
        lanes_of_.places = rows.places();
        lanes_of_.pitch = plan.rows * 4;
    }

    void run(int64_t begin, int64_t end) {
        const int64_t most = kMost / kLaneCols * few_.lane_cols;
        for (int64_t first = begin; first < end; first += most) {
            const int64_t count = std::min(most, end - first);
            std::memset(sums_, 0, static_cast<size_t>(kMost * plan_.rows) * 4);
            for (int64_t n = 0; n < count; n += few_.lane_cols) {
                multiply(first + n, std::min<int64_t>(few_.lane_cols, count - n), sums_ + n * plan_.rows);
            }
            put_results(first, count);
        }
    }

  private:
    size_t place(uint8_t* base) {
        Parts parts(base);
        parts.take(decoded_, kLaneCols * kLaneDepth);
        parts.take(levels_, kLaneBlocks * kLaneCols);
        parts.take(starts_, kLaneBlocks * kLaneCols);
        parts.take(totals_, kLaneCols * few_.width);
        parts.take(sums_, kMost * plan_.rows);
        parts.take(results_, kMost * plan_.rows + few_.width);
        parts.take(tails_, kLaneCols * kFewStepBytes);
        parts.take(lanes_, few_.width);
        parts.take(scales_, plan_.blocks ? kLaneCols * block_room() : 0);
        parts.take(zeros_, (p_.b.zero_point == nullptr ? 1 : kLaneCols) * block_room());
        return parts.used();
    }

    const uint8_t* codes_of(int64_t row) const {
        return static_cast<const uint8_t*>(p_.b.data) + std::min(row, p_.b.rows - 1) * p_.b.row_stride;
    }

    // Rows [row, row + count) of b.
    void multiply(int64_t row, int64_t count, int32_t* sums) {
        const uint8_t *codes[kLaneCols], *later[kLaneCols], *tails[kLaneCols];
        for (int64_t n = 0; n < kLaneCols; ++n) {
            codes[n] = codes_of(row + n);
            later[n] = codes_of(row + few_.lane_cols + n);
        }
        find_scales(row, count, scales_, row_scales_);
        if (plan_.more) find_zeros(row, count, zeros_, row_zeros_);
        Lanes t = lanes_of_;
        t.count = count;
        t.b = t.ahead = codes;
        t.decoded = decoded_;
        std::memset(totals_, 0, static_cast<size_t>(kLaneCols * few_.width) * 4);
        for (int64_t s = 0; s < plan_.steps; s += t.steps) {
            t.steps = steps_from(s);
            t.at = s * plan_.unit->bytes;
            t.ahead_at = t.at + t.steps * plan_.unit->bytes;
            if (s + t.steps >= plan_.steps) {
                t.ahead = later;
                t.ahead_at = 0;
            }
            piece(t, s, sums);
        }
        if (plan_.rest > 0) {
            for (int64_t n = 0; n < kLaneCols; ++n) {
                take_tail(codes[n], tails_ + n * kFewStepBytes);
                tails[n] = tails_ + n * kFewStepBytes;
            }
            t.b = tails;
            t.ahead = later;
            t.at = t.ahead_at = 0;
            t.steps = 1;
            piece(t, plan_.steps, sums);
        }
        if (!plan_.exact() && !plan_.unit->halves) return;
        plan_.exact() ? correct(row, count, sums) : scale(codes, count, sums);
    }

    // Whole blocks, or a part of one.
    int64_t steps_from(int64_t step) const {
        const int64_t block = plan_.block_steps, left = plan_.steps - step;
        if (!plan_.blocks || plan_.per_step > 1) return std::min(piece_steps_, left);
        if (block <= piece_steps_) return std::min(piece_steps_ / block * block, left);
        return std::min({piece_steps_, left, block - step % block});
    }

    // The steps from `step` on, whose codes t.b points to.
    void piece(Lanes& t, int64_t step, int32_t* sums) const {
        const LaneUnit& unit = plan_.unit->lanes;
        t.block = plan_.block_of(step);
        t.block_steps = plan_.per_step > 1 ? 1 : std::min(plan_.block_steps, t.steps);
        t.dwords = t.steps * step_dwords_;
        t.block_dwords = plan_.per_step > 1 ? step_dwords_ / plan_.per_step : t.block_steps * step_dwords_;
        unit.decode[plan_.more](t);
        const int64_t pair = 2 * few_.width;
        for (int64_t m = 0; m < plan_.rows; m += pair) {
            const bool two = rows_.tile_rows(m) == pair;
            const LaneUnit::Run* dots = unit.dots[in_blocks_][two];
            const int64_t size = few_.lane_cols >> two;
            for (int64_t n = 0; n < t.count; n += size) {
                Lanes part = t;
                part.a = rows_.tile(m, step);
                part.decoded += n * few_.width;
                part.levels += n;
                part.starts += n;
                part.ahead += n;
                part.sums = reinterpret_cast<uint8_t*>(sums + n * plan_.rows + m);
                const int64_t left = t.count - n;
                dots[left <= size >> 2 ? 2 : left <= size >> 1 ? 1 : 0](part);
            }
        }
    }

    // Sums of (a - a_zero) * (code - zero), from those of a * code.
    void correct(int64_t row, int64_t count, int32_t* sums) const {
        int64_t wide[kLaneCols];
        int32_t totals[kLaneCols], zeros[kLaneCols];
        few_.sum_integers(totals_, count, wide);
        for (int64_t n = 0; n < count; ++n) {
            totals[n] = static_cast<int32_t>(wide[n]);
            zeros[n] = zero_at(p_.b, row + n, 0) + zero_offset();
        }
        few_.correct(sums, count, static_cast<int>(plan_.rows / few_.width), totals, zeros, a_zeros_, a_sums_);
    }

    void scale(const uint8_t* const* codes, int64_t count, int32_t* sums) const {
        auto* x = reinterpret_cast<float*>(sums);
        const uint8_t nan = p_.b.table->half_nan;
        for (int64_t n = 0; n < count; ++n, x += plan_.rows) {
            const float by = factor(nan != 0 && few_.holds(codes[n], p_.depth, nan));
            for (int64_t m = 0; m < plan_.rows; ++m) x[m] *= by;
        }
    }

    void put_results(int64_t first, int64_t count) const {
        const int64_t width = few_.width, pitch = kMost * 4;
        for (int64_t n = 0; n < count; n += width) {
            const uint8_t* from[kFewRows];
            for (int64_t i = 0; i < width; ++i) from[i] = reinterpret_cast<uint8_t*>(sums_ + (n + i) * plan_.rows);
            for (int64_t m = 0; m < plan_.rows; m += width) {
                few_.turn(from, m * 4, reinterpret_cast<uint8_t*>(results_ + m * kMost + n), pitch, nullptr);
            }
        }
        finish(results_, pitch, plan_.exact() ? 1 : 0, first, count);
    }

    const int64_t step_dwords_, piece_steps_;
    const bool in_blocks_;  // LaneUnit::dots[1]
    Lanes lanes_of_;        // what all pieces share
    uint32_t* decoded_;
    float *levels_, *scales_;
    int32_t *starts_, *totals_, *sums_, *results_, *lanes_, *zeros_;
    uint8_t* tails_;
    const float* row_scales_[kLaneCols];
    const int32_t* row_zeros_[kLaneCols];
    int32_t a_zeros_[kFewRows], a_sums_[kFewRows];
};

}  // namespace

void multiply_lanes(const Problem& problem, const FewKernels& few, const FewPlan& plan, const FewRows& rows) {
    const int64_t each = few.lane_cols / 4, groups = (problem.b.rows + each - 1) / each;
    const int64_t products = each * plan.rows * problem.depth;
    parallel_for(groups, std::max<int64_t>(kSmallProduct / products, 1), [&](int64_t begin, int64_t end) {
        LaneColumns(problem, few, plan, rows).run(begin * each, std::min(end * each, problem.b.rows));
    });
}

}  // namespace lowbit::cpu::mm
