#include "cpu/linear.h"

#include <algorithm>
#include <vector>

#include "common/scales.h"
#include "cpu/arena.h"
#include "cpu/lines.h"

namespace lowbit::cpu {
namespace {

// Codes and scales of this many bytes, or of this many rows if they take more, are made at a time, in memory that the
// calling thread keeps; where blocks span all rows, those of all rows are. It keeps no more than twice this.
constexpr int64_t kPieceBytes = int64_t{16} << 20;
constexpr int64_t kPieceRows = 1024;

struct Layout {
    int64_t code_bytes, scales, scale_bytes;  // of the rows in one piece; `scales` is a number
    int64_t zeros_at() const { return code_bytes + scale_bytes; }
    int64_t total() const { return zeros_at() + scales; }
};

int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

Layout layout_of(const SchemeParams& s, int64_t rows, int64_t cols) {
    const int64_t down = (rows + s.block_rows - 1) / s.block_rows, across = (cols + s.block_cols - 1) / s.block_cols;
    const int64_t scales = down * across;
    return {round_up(rows * packed_cols(cols, s.format.bits)), scales, round_up(scales * scale_bytes(s.scale_format))};
}

int64_t piece_rows(const Input& in) {
    const SchemeParams& s = in.scheme;
    if (s.block_rows >= in.shape.rows) return in.shape.rows;
    const int64_t row_bytes = layout_of(s, s.block_rows, in.shape.cols).total() / s.block_rows + 1;
    const int64_t wanted = std::max(kPieceBytes / row_bytes, kPieceRows);
    return std::max<int64_t>(wanted / s.block_rows, 1) * s.block_rows;
}

mm::Operand operand_of(const SchemeParams& s, Shape shape, const uint8_t* base, const Layout& at, const float* outer) {
    mm::Operand a;
    a.data = base;
    a.rows = shape.rows;
    a.row_stride = packed_cols(shape.cols, s.format.bits);
    a.table = &mm::table_of(s.format);
    a.block_rows = s.block_rows;
    a.block_cols = s.block_cols;
    a.scale = base + at.code_bytes;
    a.scale_format = s.scale_format;
    a.scale_row_stride = a.zero_row_stride = (shape.cols + s.block_cols - 1) / s.block_cols;
    a.scale_col_stride = a.zero_col_stride = 1;
    if (s.affine) a.zero_point = base + at.zeros_at();
    a.outer = outer;
    a.outer_row_stride = s.outer == kOuterRow;
    return a;
}

}  // namespace

void linear(const Input& in, mm::Problem problem) {
    thread_local Arena kept;
    Arena large;
    const SchemeParams& s = in.scheme;
    thread_local std::vector<float> outer;
    if (s.outer) {
        outer.resize(static_cast<size_t>(outer_count(s, in.shape.rows)));
        outer_scale(in.x, in.shape, s, outer.data());
    }
    const int64_t most = piece_rows(in);
    const Layout at = layout_of(s, std::min(most, in.shape.rows), in.shape.cols);
    uint8_t* base = (at.total() > 2 * kPieceBytes ? large : kept).reserve(static_cast<size_t>(at.total()));
    const int64_t out_row = problem.b.rows * (problem.out_dtype == mm::Element::f32 ? 4 : 2);
    for (int64_t row = 0; row < in.shape.rows; row += most) {
        const Shape shape{std::min(most, in.shape.rows - row), in.shape.cols};
        const Values x{advance(in.x.data, row * in.x.stride, in.x.dtype), in.x.dtype, in.x.stride};
        const float* level = s.outer ? outer.data() + (s.outer == kOuterRow ? row : 0) : nullptr;
        quantize(x, shape, s, {base + at.code_bytes, s.affine ? base + at.zeros_at() : nullptr, level}, kNearest, {},
                 base);
        problem.a = operand_of(s, shape, base, at, level);
        mm::multiply(problem);
        problem.out = static_cast<char*>(problem.out) + shape.rows * out_row;
    }
}

}  // namespace lowbit::cpu
