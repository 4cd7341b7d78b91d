// Products with few rows of a whose lanes are elements: rows of b, some at a time, decoded in registers.
//
// Every output element is summed over all of K by one thread in an order that depends on K and the formats alone.
#include <algorithm>
#include <cstring>

#include "cpu/arena.h"
#include "cpu/mm_few_columns.h"
#include "cpu/mm_load.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

constexpr int64_t kAheadBytes = 4096;  // fetched for later
constexpr int64_t kFinishCols = 64;

const FewKernels& few_in_use() {
    static constexpr const FewKernels& (*kTables[])() = {
#define LOWBIT_FEW(name, ...) few_##name,
        LOWBIT_ISAS(LOWBIT_FEW)
#undef LOWBIT_FEW
    };
    return kTables[static_cast<int>(current_isa())]();
}

// Some rows of b against all of a.
class Columns : FewColumns {
  public:
    Columns(const Problem& p, const FewKernels& few, const FewPlan& plan, const FewRows& rows)
        : FewColumns(p, few, plan, rows) {
        const int64_t blocks = block_room();
        size_t used = 0;
        auto take = [&](auto*& pointer, int64_t count, uint8_t* base) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + used);
            used += (static_cast<size_t>(count) * sizeof(*pointer) + 63) / 64 * 64;
        };
        auto place = [&](uint8_t* base) {
            used = 0;
            take(sums_, kAllRows * kFewCols * few.width, base);
            take(tails_, kFewCols * kFewStepBytes, base);
            take(lanes_, few.width, base);
            take(scales_, kFewCols * blocks, base);
            take(zeros_, kFewCols * blocks, base);
            take(results_, kAllRows * kFinishCols, base);
            return used;
        };
        thread_local Arena arena;
        place(arena.reserve(place(nullptr)));
        blocks_ = blocks;
        common_.table = p.b.table;
        common_.lanes = lanes_;
        common_.block_steps = plan.block_steps;
        common_.per_step = plan.per_step;
        const int64_t together = std::max<int64_t>(p.b.row_stride * few.cols, 1);
        common_.ahead = together * ((kAheadBytes + together - 1) / together);
        const bool lookups = plan.per_step <= 1 && plan.unit->lookups[0][0] != nullptr;
        run_ = (lookups ? plan.unit->lookups : plan.unit->dots)[plan.more];
        put_lanes(lanes_);
        std::memset(tails_, 0, kFewCols * kFewStepBytes);
        std::fill_n(zeros_, blocks, zero_offset());
    }

    void run(int64_t begin, int64_t end) {
        for (int64_t first = begin; first < end; first += kFinishCols) {
            const int64_t count = std::min(kFinishCols, end - first);
            for (int64_t n = 0; n < count; n += few_.cols)
                multiply(first + n, std::min<int64_t>(few_.cols, count - n), n);
            finish(results_, kFinishCols * sizeof(int64_t), plan_.exact() ? 2 : 0, first, count);
        }
    }

  private:
    // Rows [row, row + count) of b, to the results' columns from `at` on. Missing rows repeat the last one.
    void multiply(int64_t row, int64_t count, int64_t at) {
        const Operand& b = p_.b;
        Few t = common_;
        const uint8_t* codes[kFewCols] = {};
        for (int64_t n = 0; n < few_.cols; ++n) {
            const int64_t from = row + std::min(n, count - 1);
            codes[n] = static_cast<const uint8_t*>(b.data) + from * b.row_stride;
            t.b[n] = codes[n];
            t.scales[n] = block_scales(from, scales_ + n * blocks_);
            if (plan_.more) t.zeros[n] = block_zeros(from, b.zero_point == nullptr ? zeros_ : zeros_ + n * blocks_);
        }
        std::memset(sums_, 0, static_cast<size_t>(plan_.rows * few_.cols * few_.width) * 4);
        stretch(t, 0, plan_.steps);
        if (plan_.rest > 0) {
            for (int64_t n = 0; n < few_.cols; ++n) {
                take_tail(codes[n], tails_ + n * kFewStepBytes);
                t.b[n] = tails_ + n * kFewStepBytes;
            }
            t.ahead = 0;
            stretch(t, plan_.steps, 1);
        }
        plan_.exact() ? exact_results(row, count, at) : float_results(codes, count, at);
    }

    // The steps [first, first + count), whose codes t.b points to.
    void stretch(Few& t, int64_t first, int64_t count) const {
        t.steps = count;
        if (first > 0) move_blocks(t, plan_.block_of(first));
        for (int64_t m = 0; m < plan_.rows; m += kFewTile) {
            t.a = rows_.tile(m, first);
            t.sums = sums_ + m * few_.cols * few_.width;
            run_[rows_.tile_rows(m) - 1](t);
        }
    }

    void move_blocks(Few& t, int64_t block) const {
        for (int64_t n = 0; n < few_.cols; ++n) {
            t.scales[n] += block;
            if (plan_.more) t.zeros[n] += block;
        }
    }

    void float_results(const uint8_t* const* codes, int64_t count, int64_t at) {
        float sums[kAllRows * kFewCols];
        few_.sum_floats(reinterpret_cast<const float*>(sums_), plan_.rows * few_.cols, sums);
        for (int64_t n = 0; n < count; ++n) {
            const float by = factor(codes[n]);
            for (int64_t m = 0; m < plan_.rows; ++m) {
                reinterpret_cast<float*>(results_)[m * 2 * kFinishCols + at + n] = sums[m * few_.cols + n] * by;
            }
        }
    }

    // Sum over k of (a - a_zero) * (code - zero), from sums of products, of a, and of codes.
    void exact_results(int64_t row, int64_t count, int64_t at) {
        int64_t sums[kAllRows * kFewCols];
        few_.sum_integers(sums_, plan_.rows * few_.cols, sums);
        for (int64_t n = 0; n < count; ++n) {
            const int half = p_.b.table->is_signed ? 1 << (p_.b.table->bits - 1) : 0;
            const int64_t zero = zero_at(p_.b, row + n, 0) + half;
            for (int64_t m = 0; m < p_.a.rows; ++m) {
                int64_t sum = sums[m * few_.cols + n] - zero * rows_.sum(m);
                if (plan_.ones(p_)) {
                    const int64_t a_zero = zero_at(p_.a, m, 0) + rows_.lift();
                    sum -= a_zero * (sums[p_.a.rows * few_.cols + n] - p_.depth * zero);
                }
                results_[m * kFinishCols + at + n] = sum;
            }
        }
    }

    int64_t blocks_;
    const FewUnit::Run* run_;
    Few common_;     // what all stretches share
    int32_t* sums_;  // [rows, cols] vectors: fp32, or int32 of integers in one block
    uint8_t* tails_;
    int32_t* lanes_;
    float* scales_;
    int32_t* zeros_;
    int64_t* results_;  // [rows, kFinishCols], or fp32 [rows, 2 * kFinishCols]
};

}  // namespace

void multiply_elements(const Problem& problem, const FewKernels& few, const FewPlan& plan, const FewRows& rows) {
    const int64_t groups = (problem.b.rows + few.cols - 1) / few.cols;
    const int64_t products = few.cols * plan.rows * problem.depth;
    parallel_for(groups, std::max<int64_t>(kSmallProduct / products, 1), [&](int64_t begin, int64_t end) {
        Columns(problem, few, plan, rows).run(begin * few.cols, std::min(end * few.cols, problem.b.rows));
    });
}

bool multiply_few(const Problem& problem) {
    const FewKernels& few = few_in_use();
    FewPlan plan;
    if (few.width == 0 || !make_few_plan(problem, few, plan)) return false;
    const FloatEnvironment environment;
    const FewRows rows(problem, few, plan);
    (plan.lanes ? multiply_lanes : multiply_elements)(problem, few, plan, rows);
    return true;
}

}  // namespace lowbit::cpu::mm
