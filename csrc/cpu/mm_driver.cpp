// The loops of the matrix product: tasks over tiles of the output, chunks of K, panels of b, register tiles.
//
// Every output element is summed in the order of K by one thread, and how K is cut depends on the product alone; so
// the number of threads never changes a bit.
#include <algorithm>
#include <cstring>

#include "cpu/arena.h"
#include "cpu/mm_few.h"
#include "cpu/mm_load.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

// What one task works in. `place` runs twice: to find how much is needed, and to hand it out.
struct Scratch {
    uint32_t *a, *b_rows, *b_panel;
    uint32_t* c;    // [tile_rows, c_stride]: fp32 or int32
    int64_t* wide;  // [tile_rows, c_stride]
    Segment* segments;
    Sums a_sums, b_sums;
    float *col_scale, *bias;  // [tile_cols], for the epilogue
    uint8_t* raw;
    float* levels;  // [kMaxBlocks]: scales of one row
    int64_t c_stride;

    size_t place(const Plan& plan, int nr, uint8_t* base) {
        size_t used = 0;
        auto take = [&](auto*& pointer, int64_t count) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + used);
            used += (static_cast<size_t>(count) * sizeof(*pointer) + 2 * kSlack - 1) / kSlack * kSlack;
        };
        const int64_t rows = plan.tile_rows, segs = plan.scaled ? plan.chunk_dwords : 1;
        c_stride = plan.tile_cols + 16;
        take(a, rows * plan.stride);
        take(b_rows, nr * plan.stride);
        take(b_panel, nr * kTileStride);
        take(c, rows * c_stride);
        take(wide, plan.wide ? rows * c_stride : 0);
        take(segments, segs);
        take(raw, kRawBytes);
        take(levels, kMaxBlocks);
        take(col_scale, plan.tile_cols + nr);
        take(bias, plan.tile_cols + nr);
        a_sums.stride = rows;
        b_sums.stride = nr;
        for (Sums* sums : {&a_sums, &b_sums}) {
            if (plan.scaled) take(sums->scale, segs * sums->stride);
            if (plan.kind == Kind::u8s8) take(sums->zero, segs * sums->stride);
            if (plan.kind == Kind::u8s8) take(sums->sum, segs * sums->stride);
        }
        return used;
    }
};

class Task {
  public:
    Task(const Problem& problem, const Kernels& kernels, const Plan& plan, Scratch& scratch, int64_t index)
        : p_(problem),
          kernels_(kernels),
          plan_(plan),
          s_(scratch),
          row0_(index % plan.row_tiles * plan.tile_rows),
          col0_(index / plan.row_tiles * plan.tile_cols),
          rows_(std::min(plan.tile_rows, problem.a.rows - row0_)),
          cols_(std::min(plan.tile_cols, problem.b.rows - col0_)) {}

    void run() {
        const int64_t padded = plan_.tile_rows;
        std::memset(s_.c, 0, static_cast<size_t>(padded * s_.c_stride) * 4);
        if (plan_.wide) std::memset(s_.wide, 0, static_cast<size_t>(padded * s_.c_stride) * 8);
        // Rows that pad the last register tile stay zero; no result of theirs is stored.
        std::memset(s_.a + rows_ * plan_.stride, 0, static_cast<size_t>((padded - rows_) * plan_.stride) * 4);
        if (s_.a_sums.zero != nullptr) std::memset(s_.a_sums.zero, 0, sums_bytes(s_.a_sums));
        if (s_.a_sums.sum != nullptr) std::memset(s_.a_sums.sum, 0, sums_bytes(s_.a_sums));
        if (s_.a_sums.scale != nullptr) std::memset(s_.a_sums.scale, 0, sums_bytes(s_.a_sums));
        const Loader a{p_.a, kernels_, plan_, true, s_.raw, s_.levels};
        int64_t terms = 0;
        for (int64_t k = 0; k < p_.depth;) {
            const int count = cut_chunk(plan_, k, p_.depth, s_.segments);
            const int64_t next = s_.segments[count - 1].begin + s_.segments[count - 1].length;
            if (plan_.wide && terms + next - k > kExactTerms) {
                widen_sums();
                terms = 0;
            }
            a.load(row0_, rows_, s_.segments, count, s_.a, s_.a_sums);
            for (int64_t col = 0; col < cols_; col += kernels_.nr) multiply_panel(col, count);
            terms += next - k;
            k = next;
        }
        if (plan_.wide) widen_sums();
        finish();
    }

  private:
    size_t sums_bytes(const Sums& sums) const {
        return static_cast<size_t>((plan_.scaled ? plan_.chunk_dwords : 1) * sums.stride) * 4;
    }

    // One panel of b, `nr` columns of the output, against all rows of the task.
    void multiply_panel(int64_t col, int num_segments) {
        const int64_t valid = std::min<int64_t>(kernels_.nr, cols_ - col);
        bool any_zero = false;
        Sums sums = s_.b_sums;
        sums.any_zero = &any_zero;
        const Loader b{p_.b, kernels_, plan_, false, s_.raw, s_.levels};
        b.load(col0_ + col, valid, s_.segments, num_segments, s_.b_rows, sums);
        for (int64_t r = valid; r < kernels_.nr; ++r) {
            std::memset(s_.b_rows + r * plan_.stride, 0, static_cast<size_t>(plan_.stride) * 4);
        }
        const Segment& last = s_.segments[num_segments - 1];
        kernels_.transpose(s_.b_rows, plan_.stride, s_.b_panel, last.dword + last.dwords);
        const Multiply tile_kernel = kernels_.tile[static_cast<int>(plan_.kind)];
        for (int64_t row = 0; row < rows_; row += plan_.rows) {
            for (int i = 0; i < num_segments; ++i) {
                Tile tile = tile_at(sums, row, col, i);
                tile.b = s_.b_panel + s_.segments[i].dword * kernels_.nr;
                tile_kernel(plan_.scaled, plan_.rows, tile);
            }
        }
    }

    Tile tile_at(const Sums& sums, int64_t row, int64_t col, int segment) const {
        Tile t;
        t.a = s_.a + row * plan_.stride + s_.segments[segment].dword;
        t.depth = s_.segments[segment].dwords;
        t.c = s_.c + row * s_.c_stride + col;
        t.c_stride = s_.c_stride;
        const int64_t a = segment * s_.a_sums.stride + row, b = segment * sums.stride;
        if (sums.scale != nullptr) {
            t.a_scale = s_.a_sums.scale + a;
            t.b_scale = sums.scale + b;
        }
        if (sums.zero != nullptr) {
            t.a_zero = s_.a_sums.zero + a;
            t.a_sum = s_.a_sums.sum + a;
            t.b_zero = *sums.any_zero ? sums.zero + b : nullptr;
            t.b_sum = sums.sum + b;
        }
        return t;
    }

    void widen_sums() {
        auto* narrow = reinterpret_cast<int32_t*>(s_.c);
        for (int64_t i = 0; i < plan_.tile_rows * s_.c_stride; ++i) s_.wide[i] += narrow[i];
        std::memset(narrow, 0, static_cast<size_t>(plan_.tile_rows * s_.c_stride) * 4);
    }

    // Whether an operand leaves a scale to the epilogue: one that is constant along K, or the outer scale of folded
    // ones.
    bool in_epilogue(const Operand& x, bool folded) const {
        if (!x.has_codes() || plan_.scaled) return false;
        return !folded || (plan_.kind == Kind::bf16 && x.outer != nullptr);
    }
    static float row_scale(const Operand& x, bool folded, int64_t row) {
        return folded ? *x.outer : scale_at(x, row, 0);
    }

    // Scales that are constant along K, bias and cast.
    void finish() {
        const bool integers = plan_.kind == Kind::s16 || plan_.kind == Kind::u8s8;
        const bool a_scaled = in_epilogue(p_.a, plan_.a_folded), b_scaled = in_epilogue(p_.b, plan_.b_folded);
        for (int64_t n = 0; n < cols_; ++n) {
            s_.col_scale[n] = b_scaled ? row_scale(p_.b, plan_.b_folded, col0_ + n) : 1.0f;
            if (p_.bias != nullptr) s_.bias[n] = float_at(p_.bias, p_.bias_dtype, (col0_ + n) * p_.bias_stride);
        }
        const int64_t size = p_.out_dtype == Element::f32 ? 4 : 2;
        for (int64_t m = 0; m < rows_; ++m) {
            Row row;
            row.sum_kind = plan_.wide ? 2 : integers && !plan_.scaled ? 1 : 0;
            row.sum = plan_.wide ? static_cast<void*>(s_.wide + m * s_.c_stride) : s_.c + m * s_.c_stride;
            row.scaled = a_scaled || b_scaled;
            row.a_scale = a_scaled ? row_scale(p_.a, plan_.a_folded, row0_ + m) : 1.0f;
            row.b_scale = s_.col_scale;
            row.bias = p_.bias == nullptr ? nullptr : s_.bias;
            row.out = static_cast<uint8_t*>(p_.out) + ((row0_ + m) * p_.b.rows + col0_) * size;
            row.out_dtype = p_.out_dtype;
            row.cols = cols_;
            kernels_.finish(row);
        }
    }

    const Problem& p_;
    const Kernels& kernels_;
    const Plan& plan_;
    Scratch& s_;
    const int64_t row0_, col0_, rows_, cols_;
};

}  // namespace

const Kernels& kernels_in_use() {
    static constexpr const Kernels& (*kTables[])() = {
#define LOWBIT_KERNELS(name, ...) kernels_##name,
        LOWBIT_ISAS(LOWBIT_KERNELS)
#undef LOWBIT_KERNELS
    };
    return kTables[static_cast<int>(current_isa())]();
}

void multiply(const Problem& problem) {
    if (problem.a.rows == 0 || problem.b.rows == 0 || multiply_few(problem)) return;
    const Kernels& kernels = kernels_in_use();
    const bool small = problem.a.rows * problem.b.rows * std::max<int64_t>(problem.depth, 1) < kSmallProduct;
    const Plan plan = make_plan(problem, kernels, small ? 1 : num_threads());
    const int64_t tasks = plan.row_tiles * plan.col_tiles;
    parallel_for(tasks, small ? tasks : 1, [&](int64_t begin, int64_t end) {
        thread_local Arena arena;
        Scratch scratch{};
        scratch.place(plan, kernels.nr, arena.reserve(scratch.place(plan, kernels.nr, nullptr)));
        if (plan.matrix) kernels.enter();
        for (int64_t i = begin; i < end; ++i) Task(problem, kernels, plan, scratch, i).run();
        if (plan.matrix) kernels.leave();
    });
}

}  // namespace lowbit::cpu::mm
