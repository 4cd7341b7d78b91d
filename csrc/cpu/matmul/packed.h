// Weights in the packed layout (lowbit/tensor/prepack.py), which products of integers read in place.
//
// Panels of kPanelRows rows follow each other; a panel is dwords of depth, [depth, kPanelRows]. A dword holds four
// codes of 8 bits, or eight of 4: the first four in the low halves of its bytes, the others in the high ones. Codes of
// signed integers have their sign bit flipped, so that they are unsigned and packed_offset too large. Scales and zero
// points are [panels, blocks, kPanelRows]: those of a block of K side by side.
#pragma once

#include "cpu/matmul/plan.h"

namespace lowbit::cpu::mm {

inline int packed_offset(const Operand& b) {
    return b.table->integer && b.table->is_signed ? 1 << (b.table->bits - 1) : 0;
}

// The dwords of `row` and of those after it in its panel, kPanelRows apart.
inline const uint32_t* packed_panel(const Operand& b, int64_t row) {
    const auto* base = static_cast<const uint8_t*>(b.data) + row / kPanelRows * b.panel_bytes;
    return reinterpret_cast<const uint32_t*>(base) + row % kPanelRows;
}

// The scales of the panel that begins with `row`, as numbers [blocks, kPanelRows]: as they are stored if those are fp32
// without a global scale, else in `room`, of as many.
const float* panel_scales(const Operand& b, int64_t row, int64_t blocks, const Kernels& kernels, float* room);

// The product with such a b: by the tiles that read panels, or where there are none for it, of b's rows.
void multiply_packed(const Problem& problem, const Kernels& kernels);

}  // namespace lowbit::cpu::mm
