// The loops of products with few rows of a: a put into a unit's order once, then rows of b, some at a time.
//
// Every output element is summed over all of K by one thread in an order that depends on K and the formats alone.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/numerics.h"
#include "cpu/arena.h"
#include "cpu/mm_few_plan.h"
#include "cpu/mm_load.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

constexpr int64_t kFinishCols = 64;
constexpr int64_t kDecodedElements = 512;  // of a row of b; those of kFewCols then stay in the nearest cache
constexpr int64_t kAheadBytes = 4096;
constexpr int64_t kAllRows = kFewRows + 1;

const FewKernels& few_in_use() {
    static constexpr const FewKernels& (*kTables[])() = {
#define LOWBIT_FEW(name, ...) few_##name,
        LOWBIT_ISAS(LOWBIT_FEW)
#undef LOWBIT_FEW
    };
    return kTables[static_cast<int>(current_isa())]();
}

// -- a ------------------------------------------------------------------------------------------------------------
// -----------------------------------------------------------------------------------------------------------------

// FewRows of a in the unit's order, tile after tile of at most kFewTile rows.
class FewRows {
  public:
    FewRows(const Problem& p, const FewKernels& few, const FewPlan& plan)
        : p_(p), few_(few), plan_(plan), vector_(4 * few.width), step_(plan.slots * vector_) {
        thread_local Arena arena;
        const int64_t depth = plan.all_steps() * plan.unit->elements;
        const int64_t row = plan.all_steps() * step_, natural = depth * 4 + kTileDepth * 4 + 2 * kSlack;
        packed_ = arena.reserve(static_cast<size_t>(plan.rows * row + natural + kRawBytes + 4 * kMaxBlocks));
        natural_ = packed_ + plan.rows * row;
        for (int64_t m = 0; m < plan.rows; ++m) {
            if (plan.integers) {
                plan.unit->input == FewInput::s8 ? integers<int8_t>(m, depth) : integers<int16_t>(m, depth);
            } else {
                floats(m, depth, natural_ + natural);
            }
        }
    }
    // The vectors of the tile that begins with row m, from a step on.
    const uint8_t* tile(int64_t m, int64_t step) const {
        return packed_ + (m * plan_.all_steps() + step * tile_rows(m)) * step_;
    }
    int64_t tile_rows(int64_t m) const { return std::min<int64_t>(kFewTile, plan_.rows - m / kFewTile * kFewTile); }
    int64_t sum(int64_t m) const { return sums_[m]; }

  private:
    uint8_t* place(int64_t m) const {
        const int64_t first = m / kFewTile * kFewTile;
        return packed_ + first * plan_.all_steps() * step_ + (m - first) * vector_;
    }
    void arrange(int64_t m) const {
        plan_.unit->arrange(natural_, plan_.all_steps(), tile_rows(m) * step_, tile_rows(m) * vector_, place(m));
    }

    // Signed bytes or words; codes of unsigned formats less 128.
    template <class T>
    void integers(int64_t m, int64_t depth) {
        auto* x = reinterpret_cast<T*>(natural_);
        const bool ones = m == p_.a.rows;
        const auto* codes = static_cast<const uint8_t*>(p_.a.data) + m * p_.a.row_stride;
        const uint8_t flip = p_.a.table->is_signed ? 0 : 128;
        for (int64_t k = 0; k < p_.depth; ++k) {
            x[k] = ones ? T{1} : static_cast<int8_t>(codes[k * p_.a.col_stride] ^ flip);
        }
        std::fill(x + p_.depth, x + depth, T{0});
        arrange(m);
        if (plan_.slots > plan_.unit->vectors) return lane_sums(m, x);
        sums_[m] = 0;
        for (int64_t k = 0; k < p_.depth; ++k) sums_[m] += x[k];
    }

    // A step's last slot: less the sum of the elements of each lane, as a word.
    template <class T>
    void lane_sums(int64_t m, const T* x) const {
        const int64_t stretch = plan_.unit->elements / few_.width, pitch = tile_rows(m) * vector_;
        uint8_t* out = place(m) + plan_.unit->vectors * pitch;
        for (int64_t s = 0; s < plan_.all_steps(); ++s, out += plan_.slots * pitch) {
            for (int64_t l = 0; l < few_.width; ++l, x += stretch) {
                int sum = 0;
                for (int64_t i = 0; i < stretch; ++i) sum += x[i];
                const uint32_t word = static_cast<uint16_t>(-sum);
                std::memcpy(out + 4 * l, &word, 4);
            }
        }
    }

    void floats(int64_t m, int64_t depth, uint8_t* raw) const {
        auto* x = reinterpret_cast<float*>(natural_);
        Plan plan{};
        plan.kind = Kind::f32;
        plan.a_folded = plan_.a_folded;
        const Loader loader{p_.a, kernels_in_use(), plan, true, raw, reinterpret_cast<float*>(raw + kRawBytes)};
        for (int64_t k = 0; k < p_.depth; k += kTileDepth) {
            const int64_t count = std::min(kTileDepth, p_.depth - k);
            const Segment segment{k, count, 0, count};
            loader.load(m, 1, &segment, 1, reinterpret_cast<uint32_t*>(x + k), Sums{});
        }
        std::fill(x + p_.depth, x + depth, 0.0f);
        if (plan_.unit->input == FewInput::bf16) {
            for (int64_t k = 0; k < depth; ++k) {
                const auto high = static_cast<uint16_t>(bits_of(x[k]) >> 16);
                std::memcpy(natural_ + 2 * k, &high, 2);
            }
        }
        arrange(m);
    }

    const Problem& p_;
    const FewKernels& few_;
    const FewPlan& plan_;
    const int64_t vector_, step_;  // bytes
    uint8_t *packed_, *natural_;
    int64_t sums_[kAllRows];
};

// -- b ------------------------------------------------------------------------------------------------------------
// -----------------------------------------------------------------------------------------------------------------

// Some rows of b against all of a.
class Columns {
  public:
    Columns(const Problem& p, const FewKernels& few, const FewPlan& plan, const FewRows& rows)
        : p_(p), few_(few), plan_(plan), rows_(rows) {
        const int64_t blocks = plan.blocks ? plan.block_of(plan.all_steps()) + 2 * few.width + 1 : 2 * few.width;
        decoded_stride_ = std::max(kDecodedElements, plan.block_steps * plan.unit->elements * plan.blocks);
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
            take(decoded_, in_scratch() ? kFewCols * decoded_stride_ : 0, base);
            take(results_, kAllRows * kFinishCols, base);
            take(factors_, 2 * kFinishCols, base);
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
        for (int l = 0; l < few.width; ++l) {
            lanes_[l] = plan.per_step > 1 ? static_cast<int32_t>(l * plan.per_step / few.width) : 0;
        }
        std::memset(tails_, 0, kFewCols * kFewStepBytes);
        std::fill_n(zeros_, blocks, zero_offset());
    }

    void run(int64_t begin, int64_t end) {
        for (int64_t first = begin; first < end; first += kFinishCols) {
            const int64_t count = std::min(kFinishCols, end - first);
            for (int64_t n = 0; n < count; n += few_.cols)
                multiply(first + n, std::min<int64_t>(few_.cols, count - n), n);
            finish(first, count);
        }
    }

  private:
    bool in_scratch() const { return plan_.unit->decode[0] != nullptr && plan_.rows > kFewTile; }

    // FewRows [row, row + count) of b, to the results' columns from `at` on. Missing rows repeat the last one.
    void multiply(int64_t row, int64_t count, int64_t at) {
        static constexpr float kOne = 1;
        const Operand& b = p_.b;
        Few t = common_;
        const uint8_t* codes[kFewCols] = {};
        for (int64_t n = 0; n < few_.cols; ++n) {
            const int64_t from = row + std::min(n, count - 1);
            codes[n] = static_cast<const uint8_t*>(b.data) + from * b.row_stride;
            t.b[n] = codes[n];
            t.scales[n] = plan_.blocks ? block_scales(from, scales_ + n * blocks_) : &kOne;
            if (plan_.more) t.zeros[n] = block_zeros(from, zeros_ + n * blocks_);
        }
        std::memset(sums_, 0, static_cast<size_t>(plan_.rows * few_.cols * few_.width) * 4);
        stretch(t, 0, plan_.steps);
        if (plan_.rest > 0) {
            const int64_t done = plan_.steps * plan_.unit->bytes, bytes = (plan_.rest * b.table->bits + 7) / 8;
            for (int64_t n = 0; n < few_.cols; ++n) {
                t.b[n] = tails_ + n * kFewStepBytes;
                std::memcpy(tails_ + n * kFewStepBytes, codes[n] + done, static_cast<size_t>(bytes));
            }
            t.ahead = 0;
            stretch(t, plan_.steps, 1);
        }
        plan_.integers && !plan_.blocks ? exact_results(row, count, at) : float_results(codes, count, at);
    }

    // The steps [first, first + count), whose codes t.b points to.
    void stretch(Few& t, int64_t first, int64_t count) const {
        if (in_scratch()) return stretch_decoded(t, first, count);
        t.steps = count;
        if (first > 0) move_blocks(t, plan_.block_of(first));
        for (int64_t m = 0; m < plan_.rows; m += kFewTile) {
            t.a = rows_.tile(m, first);
            t.sums = sums_ + m * few_.cols * few_.width;
            run_[rows_.tile_rows(m) - 1](t);
        }
    }

    // For more rows than a tile has: codes become floats once, a nearby piece at a time.
    void stretch_decoded(const Few& t, int64_t first, int64_t count) const {
        const FewUnit& unit = *plan_.unit;
        const int64_t piece = decoded_stride_ / unit.elements;
        Few floats = t;
        floats.per_step = 0;
        static constexpr float kOne = 1;
        for (int64_t n = 0; n < few_.cols; ++n) {
            floats.scales[n] = &kOne;
            floats.b[n] = reinterpret_cast<const uint8_t*>(decoded_ + n * decoded_stride_);
        }
        for (int64_t s = 0; s < count; s += piece) {
            Few part = t;
            part.steps = std::min(piece, count - s);
            for (int64_t n = 0; n < few_.cols; ++n) part.b[n] += s * unit.bytes;
            move_blocks(part, plan_.block_of(first + s));
            part.decoded = decoded_;
            part.decoded_stride = decoded_stride_;
            unit.decode[plan_.more](part);
            floats.steps = floats.block_steps = part.steps * unit.vectors;
            for (int64_t m = 0; m < plan_.rows; m += kFewTile) {
                floats.a = rows_.tile(m, first + s);
                floats.sums = sums_ + m * few_.cols * few_.width;
                few_.floats.dots[0][rows_.tile_rows(m) - 1](floats);
            }
        }
    }

    void move_blocks(Few& t, int64_t block) const {
        for (int64_t n = 0; n < few_.cols; ++n) {
            t.scales[n] += block;
            if (plan_.more) t.zeros[n] += block;
        }
    }

    // The scales of a row's blocks, without the outer one.
    const float* block_scales(int64_t row, float* out) const {
        const Operand& b = p_.b;
        if (b.scale_format == kScaleFp32 && b.scale_col_stride == 1 && plan_.per_step == 1) {
            return static_cast<const float*>(b.scale) + block_at(row, b.block_rows) * b.scale_row_stride;
        }
        if ((b.scale_format == kScaleE8m0 || b.scale_format == kScaleE4m3) && b.scale_col_stride == 1) {
            const auto* codes = static_cast<const uint8_t*>(b.scale) + block_at(row, b.block_rows) * b.scale_row_stride;
            few_.byte_scales(codes, b.scale_format == kScaleE8m0, plan_.num_blocks, out);
        } else {
            Operand inner = b;
            inner.outer = nullptr;
            row_scales(inner, row, 0, p_.depth, out);
        }
        // Lanes of the last step that belong to no block: their elements of a are 0, and must stay so.
        std::fill_n(out + plan_.num_blocks, few_.width, 1.0f);
        return out;
    }

    // Zero points as decoded codes have them; where b has none, they are the same for all rows.
    const int32_t* block_zeros(int64_t row, int32_t* out) const {
        const Operand& b = p_.b;
        if (b.zero_point == nullptr) return zeros_;
        for (int64_t i = 0; i < plan_.num_blocks; ++i) out[i] = zero_at(b, row, i * b.block_cols) + zero_offset();
        std::fill_n(out + plan_.num_blocks, few_.width, 0);
        return out;
    }

    int32_t zero_offset() const {
        const Table& t = *p_.b.table;
        const int half = 1 << (t.bits - 1);
        if (plan_.integers) return t.is_signed ? half : 0;
        return plan_.unit->as_signed && !t.is_signed ? -half : 0;
    }

    void float_results(const uint8_t* const* codes, int64_t count, int64_t at) {
        float sums[kAllRows * kFewCols];
        few_.sum_floats(reinterpret_cast<const float*>(sums_), plan_.rows * few_.cols, sums);
        const Table& t = *p_.b.table;
        const bool halves = plan_.unit->halves;
        for (int64_t n = 0; n < count; ++n) {
            const bool damaged = halves && t.half_nan != 0 && few_.holds(codes[n], p_.depth, t.half_nan);
            const float factor = damaged ? NAN : halves ? t.half_unit : 1.0f;
            for (int64_t m = 0; m < plan_.rows; ++m) {
                reinterpret_cast<float*>(results_)[m * 2 * kFinishCols + at + n] = sums[m * few_.cols + n] * factor;
            }
        }
    }

    // Sum over k of (a - a_zero) * (code - zero), from sums of products, of a, and of codes.
    void exact_results(int64_t row, int64_t count, int64_t at) {
        int64_t sums[kAllRows * kFewCols];
        few_.sum_integers(sums_, plan_.rows * few_.cols, sums);
        const int lift = p_.a.table->is_signed ? 0 : 128;
        for (int64_t n = 0; n < count; ++n) {
            const int half = p_.b.table->is_signed ? 1 << (p_.b.table->bits - 1) : 0;
            const int64_t zero = zero_at(p_.b, row + n, 0) + half;
            for (int64_t m = 0; m < p_.a.rows; ++m) {
                int64_t sum = sums[m * few_.cols + n] - zero * rows_.sum(m);
                if (plan_.ones(p_)) {
                    const int64_t a_zero = zero_at(p_.a, m, 0) - lift;
                    sum -= a_zero * (sums[p_.a.rows * few_.cols + n] - p_.depth * zero);
                }
                results_[m * kFinishCols + at + n] = sum;
            }
        }
    }

    // Scales that are constant along K, bias and cast.
    void finish(int64_t first, int64_t count) const {
        const Operand &a = p_.a, &b = p_.b;
        float* bias = factors_ + kFinishCols;
        const float outer = b.outer == nullptr ? 1.0f : *b.outer;
        for (int64_t n = 0; n < count; ++n) {
            factors_[n] = plan_.blocks ? outer : scale_at(b, first + n, 0);
            if (p_.bias != nullptr) bias[n] = float_at(p_.bias, p_.bias_dtype, (first + n) * p_.bias_stride);
        }
        const int64_t size = p_.out_dtype == Element::f32 ? 4 : 2;
        for (int64_t m = 0; m < a.rows; ++m) {
            Row row;
            row.sum = results_ + m * kFinishCols;
            row.sum_kind = plan_.integers && !plan_.blocks ? 2 : 0;
            row.scaled = true;
            row.a_scale = plan_.a_folded ? 1.0f : scale_at(a, m, 0);
            row.b_scale = factors_;
            row.bias = p_.bias == nullptr ? nullptr : bias;
            row.out = static_cast<uint8_t*>(p_.out) + (m * b.rows + first) * size;
            row.out_dtype = p_.out_dtype;
            row.cols = count;
            kernels_in_use().finish(row);
        }
    }

    const Problem& p_;
    const FewKernels& few_;
    const FewPlan& plan_;
    const FewRows& rows_;
    int64_t decoded_stride_, blocks_;
    const FewUnit::Run* run_;
    Few common_;     // what all stretches share
    int32_t* sums_;  // [rows, cols] vectors: fp32, or int32 of integers in one block
    uint8_t* tails_;
    int32_t* lanes_;
    float* scales_;
    int32_t* zeros_;
    float* decoded_;
    int64_t* results_;  // [rows, kFinishCols], or fp32 [rows, 2 * kFinishCols]
    float* factors_;    // b's scales, and its bias
};

}  // namespace

bool multiply_few(const Problem& problem) {
    const FewKernels& few = few_in_use();
    FewPlan plan;
    if (few.width == 0 || !make_few_plan(problem, few, plan)) return false;
    const FloatEnvironment environment;
    const FewRows rows(problem, few, plan);
    const int64_t groups = (problem.b.rows + few.cols - 1) / few.cols;
    const int64_t products = few.cols * plan.rows * problem.depth;
    parallel_for(groups, std::max<int64_t>(kSmallProduct / products, 1), [&](int64_t begin, int64_t end) {
        Columns(problem, few, plan, rows).run(begin * few.cols, std::min(end * few.cols, problem.b.rows));
    });
    return true;
}

}  // namespace lowbit::cpu::mm
