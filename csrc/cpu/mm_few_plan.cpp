#include "cpu/mm_few_plan.h"

#include "cpu/mm_plan.h"

namespace lowbit::cpu::mm {
namespace {

constexpr int64_t kMaxBytes = int64_t{4} << 20;    // of a in a unit's order
constexpr int64_t kExactDepth = int64_t{1} << 19;  // a lane's int32 sum cannot overflow

bool is_integer(const Operand& x) { return x.has_codes() && x.table->integer; }

bool exact_in_bf16(const Operand& x) { return x.has_codes() ? x.table->exact_bf16 : x.dtype == Element::bf16; }

const FewUnit& bf16_unit_of(const Table& t, const FewKernels& k) {
    static const FewUnit none;
    if (t.bits == 8) return t.integer ? none : k.bf16_codes;  // whose lookup is symmetric in the top bit
    return t.bits == 4 ? k.bf16_nibbles : t.bits == 6 ? k.bf16_sextets : none;
}

const FewUnit& unit_of(const Table& t, const FewPlan& plan, const FewKernels& k) {
    static const FewUnit none;
    if (plan.integers && plan.lanes) return t.bits == 8 ? k.lane_int8 : t.bits == 4 ? k.lane_int4 : none;
    if (plan.integers) return t.bits == 8 ? k.int8 : t.bits == 4 ? k.int4 : none;
    if (t.bits == 4) return k.nibbles;
    if (t.bits == 8 && t.integer) return k.bytes;
    if (t.bits == 8 && t.half_shift >= 0) return k.halves;
    return t.bits == 6 && t.exact_bf16 && t.half_shift >= 0 && t.half_nan == 0 ? k.sextets : none;
}

// Whether blocks of `block` elements begin with steps, or divide them at the stretches of lanes.
bool fit_blocks(FewPlan& plan, int64_t block, int width) {
    const int64_t step = plan.unit->elements;
    if (block % step == 0) {
        plan.block_steps = block / step;
        plan.per_step = 1;
        return true;
    }
    plan.per_step = step / block;
    return step % block == 0 && block % (step / width) == 0;
}

// How the product is done with a's rows as lanes, or else with their elements.
bool fit(const Problem& p, const FewKernels& k, bool lanes, FewPlan& plan) {
    const Operand &a = p.a, &b = p.b;
    const bool a_blocks = a.has_codes() && a.block_cols < p.depth, integers = is_integer(a) && is_integer(b);
    const bool shifted = a.zero_point != nullptr || (a.has_codes() && !a.table->is_signed);
    const bool zeros = b.zero_point != nullptr;
    plan = FewPlan{};
    plan.lanes = lanes;
    plan.blocks = b.block_cols < p.depth;
    plan.num_blocks = plan.blocks ? (p.depth - 1) / b.block_cols + 1 : 1;
    const bool b_shifted = zeros || (b.table->bits == 8 && !b.table->is_signed);  // of lanes: bytes are signed there
    const bool correctable = !plan.blocks || !(shifted || (lanes && b_shifted));
    plan.integers =
        integers && !a_blocks && a.table->bits == 8 && correctable && p.depth <= (lanes ? kExactTerms : kExactDepth);
    if (integers && !a_blocks && !plan.integers && (lanes || !plan.blocks)) return false;  // only exact sums will do
    plan.unit = &unit_of(*b.table, plan, k);
    const FewUnit& bf16 = bf16_unit_of(*b.table, k);
    const bool exact = exact_in_bf16(a) && !a_blocks && b.table->exact_bf16 && !zeros;
    if (!plan.integers && exact && bf16.elements > 0) plan.unit = &bf16;
    if (plan.unit->elements == 0) return false;
    if (plan.blocks && !fit_blocks(plan, b.block_cols, k.width)) return false;
    // Sums that are scaled block by block: of four lanes of bytes at least, or two dwords that follow each other.
    if (lanes && plan.unit->input != FewInput::f32 && plan.per_step > k.width / (plan.integers ? 4 : 2)) return false;
    plan.more = plan.integers ? plan.blocks : zeros || (plan.unit->as_signed && !b.table->is_signed);
    if (plan.more && (lanes ? plan.unit->lanes.decode[1] == nullptr : plan.unit->dots[0][1][0] == nullptr))
        return false;
    plan.a_folded = a_blocks;
    plan.rows = lanes ? (a.rows + k.width - 1) / k.width * k.width : a.rows + (plan.integers && shifted);
    const int64_t most = lanes ? 2 * k.width : k.tile, tiles = (plan.rows + most - 1) / most;
    plan.tile = lanes ? most : (plan.rows + tiles - 1) / tiles;
    plan.steps = p.depth / plan.unit->elements;
    plan.rest = p.depth % plan.unit->elements;
    if (!plan.blocks) plan.block_steps = plan.all_steps();
    plan.slots = plan.unit->vectors + (plan.integers && plan.blocks && !lanes);
    return plan.rows * plan.all_steps() * plan.slots * 4 * k.width <= (lanes ? kMaxBytes / 2 : kMaxBytes);
}

}  // namespace

bool make_few_plan(const Problem& p, const FewKernels& k, FewPlan& plan) {
    if (p.a.rows > kFewRows || p.depth == 0 || !p.b.has_codes()) return false;
    if (p.b.col_stride != 1 && p.depth > 1) return false;
    return (p.a.rows >= k.least_lanes && fit(p, k, true, plan)) || fit(p, k, false, plan);
}

}  // namespace lowbit::cpu::mm
