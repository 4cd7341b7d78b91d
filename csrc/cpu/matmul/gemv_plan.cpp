#include "cpu/matmul/gemv_plan.h"

#include <algorithm>

#include "cpu/matmul/plan.h"

namespace lowbit::cpu::mm {
namespace {

constexpr int64_t kMaxBytes = int64_t{4} << 20;    // of a in a unit's order
constexpr int64_t kExactDepth = int64_t{1} << 19;  // a lane's int32 sum cannot overflow

bool exact_in_bf16(const Operand& x) { return x.has_codes() ? x.table->exact_bf16 : x.dtype == Element::bf16; }

const GemvUnit& bf16_unit_of(const Table& t, const GemvKernels& k) {
    static const GemvUnit none;
    if (t.bits == 8) return t.integer ? none : k.bf16_codes8;  // whose lookup is symmetric in the top bit
    return t.bits == 4 ? k.bf16_codes4 : t.bits == 6 ? k.bf16_codes6 : none;
}

const GemvUnit& unit_of(const Table& t, const GemvPlan& plan, const GemvKernels& k) {
    static const GemvUnit none;
    if (plan.integers) return t.bits == 8 ? k.int8 : t.bits == 4 ? k.int4 : none;
    if (t.bits == 4) return k.codes4;
    if (t.bits == 8 && t.integer) return k.bytes;
    if (t.bits == 8 && t.half_shift >= 0) return k.fp16;
    return t.bits == 6 && t.exact_bf16 && t.half_shift >= 0 && t.half_nan == 0 ? k.codes6 : none;
}

// Whether blocks of `block` elements begin with steps, or divide them at the stretches of lanes.
bool fit_blocks(GemvPlan& plan, int64_t block, int width) {
    const int64_t step = plan.unit->elements;
    if (block % step == 0) {
        plan.block_steps = block / step;
        plan.per_step = 1;
        return true;
    }
    plan.per_step = step / block;
    return step % block == 0 && block % (step / width) == 0;
}

int64_t block_along_k(const Operand& x, int64_t depth) {
    return x.has_codes() && x.block_cols < depth ? x.block_cols : 0;
}

// Integers are summed as section 9 has it, or not here.
bool fit_integers(const Problem& p, const GemvKernels& k, GemvPlan& plan) {
    const int64_t a = block_along_k(p.a, p.depth), b = block_along_k(p.b, p.depth);
    const bool shifted = p.a.zero_point != nullptr || !p.a.table->is_signed;
    plan.integers = true;
    plan.blocks = a > 0 || b > 0;
    plan.block = plan.blocks ? std::max(a, b) : p.depth;
    if (a > 0 && b > 0 && a != b) return false;
    if (p.a.table->bits != 8 || (plan.blocks && (shifted || plan.block > kIntegerSegment))) return false;
    if (!plan.blocks && p.depth > kExactDepth) return false;
    plan.unit = &unit_of(*p.b.table, plan, k);
    plan.more = plan.blocks;
    plan.rows = p.a.rows + shifted;
    return plan.unit->elements > 0;
}

bool fit_floats(const Problem& p, const GemvKernels& k, GemvPlan& plan) {
    const bool zeros = p.b.zero_point != nullptr;
    plan.block = block_along_k(p.b, p.depth);
    plan.blocks = plan.block > 0;
    if (!plan.blocks) plan.block = p.depth;
    plan.a_folded = block_along_k(p.a, p.depth) > 0;
    plan.unit = &unit_of(*p.b.table, plan, k);
    const GemvUnit& bf16 = bf16_unit_of(*p.b.table, k);
    const bool exact = exact_in_bf16(p.a) && !plan.a_folded && p.b.table->exact_bf16 && !zeros;
    if (exact && bf16.elements > 0) plan.unit = &bf16;
    plan.more = zeros || (plan.unit->as_signed && !p.b.table->is_signed);
    plan.rows = p.a.rows;
    return plan.unit->elements > 0;
}

}  // namespace

bool make_gemv_plan(const Problem& p, const GemvKernels& k, GemvPlan& plan) {
    if (p.a.rows > kGemvRows || p.depth == 0 || !p.b.has_codes()) return false;
    if (p.b.col_stride != 1 && p.depth > 1) return false;
    plan = GemvPlan{};
    if (!(is_integer_product(p) ? fit_integers : fit_floats)(p, k, plan)) return false;
    if (p.a.rows > plan.unit->most_rows || (plan.more && plan.unit->dots[0][1][0] == nullptr)) return false;
    if (plan.blocks && !fit_blocks(plan, plan.block, k.width)) return false;
    plan.num_blocks = (p.depth - 1) / plan.block + 1;
    const int64_t tiles = (plan.rows + k.tile - 1) / k.tile;
    plan.tile = (plan.rows + tiles - 1) / tiles;
    plan.steps = p.depth / plan.unit->elements;
    plan.rest = p.depth % plan.unit->elements;
    if (!plan.blocks) plan.block_steps = plan.all_steps();
    if (plan.in_totals() && plan.rest > 0 && plan.steps % plan.block_steps != 0) return false;  // a block in two parts
    return plan.rows * plan.all_steps() * plan.unit->vectors * 4 * k.width <= kMaxBytes;
}

}  // namespace lowbit::cpu::mm
