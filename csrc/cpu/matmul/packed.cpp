#include "cpu/matmul/packed.h"

#include <algorithm>
#include <cstring>

#include "common/scales.h"
#include "cpu/arena.h"
#include "cpu/matmul/few.h"
#include "cpu/matmul/gemm_cuts.h"
#include "cpu/matmul/gemm_tiles.h"
#include "cpu/matmul/load.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

// Whether tiles read the panels: products of integers, whose segments are whole dwords of storage.
bool readable(const Problem& p) {
    const int64_t codes = 32 / p.b.table->bits;
    auto whole = [&](const Operand& x) { return x.block_cols >= p.depth || x.block_cols % codes == 0; };
    return is_integer_product(p) && whole(p.a) && whole(p.b);
}

// One row, as `quantize` stores it.
void store_row(const Operand& b, int64_t row, int64_t depth, uint8_t* out) {
    const auto* from = reinterpret_cast<const uint8_t*>(packed_panel(b, row));
    const auto offset = static_cast<uint8_t>(packed_offset(b));
    constexpr int64_t kStep = kPanelRows * 4;
    if (b.table->bits == 8) {
        for (int64_t k = 0; k < depth; ++k) out[k] = from[k / 4 * kStep + k % 4] ^ offset;
        return;
    }
    auto code = [&](int64_t k) { return (from[k / 8 * kStep + k % 4] >> (k % 8 / 4 * 4) & 15) ^ offset; };
    for (int64_t k = 0; k < depth; k += 2) {
        out[k / 2] = static_cast<uint8_t>(code(k) | (k + 1 < depth ? code(k + 1) << 4 : 0));
    }
}

}  // namespace

const float* panel_scales(const Operand& b, int64_t row, int64_t blocks, const Kernels& kernels, float* room) {
    const int64_t at = scale_index(b, row, 0), count = blocks * kPanelRows;
    const auto* halves = static_cast<const uint16_t*>(b.scale) + at;
    if (b.scale_format == kScaleFp32) {
        const float* stored = static_cast<const float*>(b.scale) + at;
        if (b.global_scale == nullptr) return stored;
        std::copy_n(stored, count, room);
    } else if (b.scale_format == kScaleFp16 || b.scale_format == kScaleBf16) {
        kernels.widen(halves, b.scale_format == kScaleFp16 ? Element::f16 : Element::bf16, room, count);
    } else {
        for (int64_t i = 0; i < count; ++i) room[i] = stored_scale(b, at + i);
    }
    for (int64_t n = 0; b.global_scale != nullptr && n < std::min(kPanelRows, b.rows - row); ++n) {
        const float global_scale = global_scale_at(b, row + n);
        for (int64_t i = 0; i < blocks; ++i) room[i * kPanelRows + n] *= global_scale;
    }
    return room;
}

void multiply_packed(const Problem& problem, const Kernels& kernels) {
    if (multiply_few(problem, kernels)) return;
    if (readable(problem)) return multiply_tiles(problem, kernels);
    Arena arena;
    Problem plain = problem;
    Operand& b = plain.b;
    const int64_t blocks = problem.b.scale_row_stride, bytes = scale_bytes(b.scale_format);
    b.panel_bytes = 0;
    b.row_stride = ceil_div(problem.depth * b.table->bits, 8);
    b.col_stride = 1;
    const auto place = [&](Parts parts, uint8_t*& rows, uint8_t*& scales, uint8_t*& zeros) {
        parts.take(rows, b.rows * b.row_stride);
        parts.take(scales, b.rows * blocks * bytes);
        parts.take(zeros, b.rows * blocks);
        return parts.used();
    };
    uint8_t *rows, *scales, *zeros;
    place(Parts(arena.reserve(place(Parts(nullptr), rows, scales, zeros))), rows, scales, zeros);
    b.data = rows;
    b.scale = scales;
    if (b.zero_point != nullptr) b.zero_point = zeros;
    b.zero_row_stride = blocks;
    b.scale_col_stride = b.zero_col_stride = 1;
    for (int64_t i = 0; i < b.rows * blocks; ++i) {
        const int64_t at = scale_index(problem.b, i / blocks, i % blocks);
        std::memcpy(scales + i * bytes, static_cast<const uint8_t*>(problem.b.scale) + at * bytes,
                    static_cast<size_t>(bytes));
        if (b.zero_point != nullptr) zeros[i] = problem.b.zero_point[at];
    }
    parallel_for(b.rows, kPanelRows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) store_row(problem.b, r, problem.depth, rows + r * b.row_stride);
    });
    multiply(plain);
}

}  // namespace lowbit::cpu::mm
