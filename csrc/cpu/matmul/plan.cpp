#include "cpu/matmul/plan.h"

#include <algorithm>

namespace lowbit::cpu::mm {
namespace {

// In shorter blocks, scaling the sums of segments costs more than multiplying scales into fp32 operands.
constexpr int64_t kMinBf16Block = 16;

int64_t block_along_k(const Operand& x, int64_t depth) {
    return x.has_codes() && x.block_cols < depth ? x.block_cols : 0;
}

int64_t shortest_block(const Problem& p) {
    const int64_t a = block_along_k(p.a, p.depth), b = block_along_k(p.b, p.depth);
    return std::min(a > 0 ? a : p.depth, b > 0 ? b : p.depth);
}

bool exact_in_bf16(const Operand& x) { return x.has_codes() ? x.table->exact_bf16 : x.dtype == Element::bf16; }

bool integer(const Operand& x) { return x.has_codes() && x.table->integer; }

// Whether every power-of-two scale is NaN or in 2^-40 .. 2^60: then folded elements are multiples of 2^-60, and no
// product or sum of products is so small that bf16 dot products would flush it.
bool moderate_scales(const Operand& x, int64_t depth) {
    const auto* codes = static_cast<const uint8_t*>(x.scale);
    const int64_t rows = ceil_div(x.rows, x.block_rows), cols = ceil_div(depth, x.block_cols);
    bool all = true;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
            const int code = codes[r * x.scale_row_stride + c * x.scale_col_stride];
            all = all && (code == 255 || (code >= 127 - 40 && code <= 127 + 60));
        }
    }
    return all;
}

// Whether values times the scales of their blocks (not the global scale) are bf16 numbers.
bool folds_into_bf16(const Operand& x, int64_t depth) {
    if (block_along_k(x, depth) == 0) return true;
    if (!x.table->exact_bf16 || !x.table->moderate || x.zero_point != nullptr) return false;
    if (x.scale_format == kScaleE4m3) return x.table->short_bf16;
    return x.scale_format == kScaleE8m0 && moderate_scales(x, depth);
}

// The tile that reads b as it is packed, if one serves.
const PackedTile* packed_tile(const Problem& p, const Kernels& kernels) {
    if (!p.b.is_packed() || kernels.matrix_side > 0) return nullptr;
    const PackedTile& tile = p.b.table->bits == 4 ? kernels.packed4 : kernels.packed8;
    if (tile.run == nullptr || p.a.rows > tile.limit) return nullptr;
    const bool as_stored = p.a.zero_point == nullptr && (p.a.table->is_signed || p.a.table->bits < 8);
    return tile.kind == Kind::s16 || as_stored ? &tile : nullptr;
}

void choose_kind(Plan& plan, const Problem& p, const Kernels& kernels) {
    const int64_t a = block_along_k(p.a, p.depth), b = block_along_k(p.b, p.depth);
    plan.scaled = a > 0 || b > 0;
    if (is_integer_product(p)) {
        plan.packed = packed_tile(p, kernels);
        plan.kind = plan.packed != nullptr ? plan.packed->kind : kernels.integer;
    } else if (kernels.has(Kind::bf16) && plan.scaled && exact_in_bf16(p.a) && exact_in_bf16(p.b) &&
               folds_into_bf16(p.a, p.depth) && folds_into_bf16(p.b, p.depth)) {
        plan.kind = Kind::bf16;
        plan.scaled = false;
        plan.a_folded = a > 0;
        plan.b_folded = b > 0;
    } else if (kernels.has(Kind::bf16) && exact_in_bf16(p.a) && exact_in_bf16(p.b) &&
               (!plan.scaled || shortest_block(p) >= kMinBf16Block)) {
        plan.kind = Kind::bf16;
    } else {
        plan.kind = Kind::f32;
        plan.scaled = false;
        plan.a_folded = a > 0;
        plan.b_folded = b > 0;
    }
    plan.a_block = plan.scaled ? a : 0;
    plan.b_block = plan.scaled ? b : 0;
    const bool integers = plan.kind == Kind::s16 || plan.kind == Kind::s8u8;
    plan.most = plan.scaled && integers ? kIntegerSegment : p.depth;
    plan.wide = !plan.scaled && integers && p.depth > kExactTerms;
}

}  // namespace

bool is_integer_product(const Problem& p) {
    const bool blocks = block_along_k(p.a, p.depth) > 0 || block_along_k(p.b, p.depth) > 0;
    return integer(p.a) && integer(p.b) && (!blocks || shortest_block(p) >= kMinIntegerBlock);
}

Plan make_plan(const Problem& p, const Kernels& kernels) {
    Plan plan{};
    choose_kind(plan, p, kernels);
    plan.matrix = kernels.matrix_side > 0 && (plan.kind == Kind::bf16 || plan.kind == Kind::s8u8);
    plan.unit = plan.matrix ? kernels.matrix_side : 1;
    return plan;
}

int cut_chunk(const Plan& plan, int64_t begin, int64_t depth, Segment* segments) {
    const int64_t per_dword = elements_per_dword(plan.kind);
    int count = 0;
    for (int64_t k = begin, dword = 0; k < depth && dword < kTileDepth;) {
        int64_t end = depth;
        if (plan.a_block > 0) end = std::min(end, (k / plan.a_block + 1) * plan.a_block);
        if (plan.b_block > 0) end = std::min(end, (k / plan.b_block + 1) * plan.b_block);
        end = std::min(end, k + plan.most);
        const int64_t room = kTileDepth - dword;
        if (ceil_div(end - k, per_dword) > room) {
            if (plan.scaled && count > 0) break;  // a whole segment in the next chunk rather than two pieces
            end = k + room * per_dword;
        }
        segments[count++] = {k, end - k, dword, ceil_div(ceil_div(end - k, per_dword), plan.unit) * plan.unit};
        dword += segments[count - 1].dwords;
        k = end;
    }
    return count;
}

}  // namespace lowbit::cpu::mm
