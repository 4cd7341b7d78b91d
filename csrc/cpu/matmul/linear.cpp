#include "cpu/matmul/linear.h"

#include <algorithm>
#include <vector>

#include "common/scales.h"
#include "cpu/arena.h"
#include "cpu/row_kernels.h"

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

// The part of a block's scales (or zero points) from a row on that begins a row of blocks.
const void* from_row(const void* scales, int64_t row, int64_t block_rows, int64_t across, int bytes) {
    return scales == nullptr ? nullptr : static_cast<const char*>(scales) + row / block_rows * across * bytes;
}
Scales from_row(const Scales& s, int64_t row, const SchemeParams& scheme, int64_t cols) {
    const int64_t across = (cols + scheme.block_cols - 1) / scheme.block_cols;
    const int bytes = static_cast<int>(scale_bytes(scheme.scale_format));
    return {from_row(s.scale, row, scheme.block_rows, across, bytes),
            from_row(s.zero_point, row, scheme.block_rows, across, 1),
            s.global_scale == nullptr ? nullptr : s.global_scale + (scheme.global_scale == kGlobalScaleRow ? row : 0)};
}

// Multiplies some rows after each other, each time those of `problem.a`.
class Product {
  public:
    Product(const mm::Problem& problem, const Output* output) : problem_(problem), output_(output) {
        if (output_ == nullptr) return;
        problem_.out_dtype = mm::Element::f32;
    }

    // The most rows at a time: of codes, those of one row of blocks at least.
    int64_t most() const {
        if (output_ == nullptr) return INT64_MAX;
        const int64_t block = output_->scheme.block_rows;
        return std::max<int64_t>(std::max(kPieceBytes / (4 * problem_.b.rows + 1), kPieceRows / 4) / block, 1) * block;
    }

    void add(const mm::Operand& a) {
        problem_.a = a;
        if (output_ == nullptr) {
            mm::multiply(problem_);
            const int64_t row_bytes = problem_.b.rows * (problem_.out_dtype == mm::Element::f32 ? 4 : 2);
            problem_.out = static_cast<char*>(problem_.out) + a.rows * row_bytes;
            return;
        }
        const int64_t n = problem_.b.rows;
        thread_local Arena kept;
        Arena large;
        const int64_t bytes = a.rows * n * 4;
        problem_.out = (bytes > 2 * kPieceBytes ? large : kept).reserve(static_cast<size_t>(bytes));
        mm::multiply(problem_);
        const SchemeParams& s = output_->scheme;
        quantize_static({problem_.out, Dtype::kFloat32, n}, {a.rows, n}, s, from_row(output_->scales, row_, s, n),
                        kNearest, {}, output_->codes + row_ * packed_cols(n, s.format.bits));
        row_ += a.rows;
    }

  private:
    mm::Problem problem_;
    const Output* output_;
    int64_t row_ = 0;
};

void quantized(const Input& in, Product& product) {
    thread_local Arena kept;
    thread_local std::vector<float> global_scale;
    Arena large;
    const SchemeParams& s = in.scheme;
    const bool given = in.given.scale != nullptr;
    Scales all = in.given;
    if (!given && s.global_scale) {
        global_scale.resize(static_cast<size_t>(global_scale_count(s, in.shape.rows)));
        cpu::global_scale(in.x, in.shape, s, global_scale.data());
        all.global_scale = global_scale.data();
    }
    const int64_t most = std::max(std::min(piece_rows(in), product.most()) / s.block_rows, int64_t{1}) * s.block_rows;
    const Layout at = layout_of(s, std::min(most, in.shape.rows), in.shape.cols);
    uint8_t* base = (at.total() > 2 * kPieceBytes ? large : kept).reserve(static_cast<size_t>(at.total()));
    for (int64_t row = 0; row < in.shape.rows; row += most) {
        const Shape shape{std::min(most, in.shape.rows - row), in.shape.cols};
        const Values x{advance(in.x.data, row * in.x.stride, in.x.dtype), in.x.dtype, in.x.stride};
        Scales scales = from_row(all, row, s, in.shape.cols);
        if (given) {
            quantize_static(x, shape, s, scales, kNearest, {}, base);
        } else {
            uint8_t* zeros = s.affine ? base + at.zeros_at() : nullptr;
            quantize(x, shape, s, {base + at.code_bytes, zeros, scales.global_scale}, kNearest, {}, base);
            scales = {base + at.code_bytes, zeros, scales.global_scale};
        }
        product.add(operand_of(s, shape, base, scales));
    }
}

// Rows [begin, begin + count) of floats.
mm::Operand some_rows(mm::Operand a, int64_t begin, int64_t count) {
    const int64_t bytes = a.dtype == mm::Element::f32 ? 4 : 2;
    a.data = static_cast<const char*>(a.data) + begin * a.row_stride * bytes;
    a.rows = count;
    return a;
}

}  // namespace

mm::Operand operand_of(const SchemeParams& s, Shape shape, const uint8_t* codes, const Scales& scales) {
    mm::Operand a;
    a.data = codes;
    a.rows = shape.rows;
    a.row_stride = packed_cols(shape.cols, s.format.bits);
    a.table = &mm::table_of(s.format);
    a.block_rows = s.block_rows;
    a.block_cols = s.block_cols;
    a.scale = scales.scale;
    a.scale_format = s.scale_format;
    a.scale_row_stride = a.zero_row_stride = (shape.cols + s.block_cols - 1) / s.block_cols;
    a.scale_col_stride = a.zero_col_stride = 1;
    a.zero_point = static_cast<const uint8_t*>(scales.zero_point);
    a.global_scale = scales.global_scale;
    a.global_scale_row_stride = s.global_scale == kGlobalScaleRow;
    return a;
}

void linear(const Input* input, mm::Problem problem, const Output* output) {
    Product product(problem, output);
    if (input != nullptr) return quantized(*input, product);
    const int64_t rows = problem.a.rows, most = std::min(product.most(), rows);
    for (int64_t row = 0; row < rows; row += most) {
        product.add(some_rows(problem.a, row, std::min(most, rows - row)));
    }
}

}  // namespace lowbit::cpu
