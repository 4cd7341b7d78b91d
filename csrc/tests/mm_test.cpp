// Holds every instruction set's matrix product against the scalar one: integers bit for bit, floats within rounding.
// Random pairs of formats, blocks, zero points and shapes; needs neither torch nor Python.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "common/params.h"
#include "cpu/isa.h"
#include "cpu/mm.h"
#include "format_table.h"

using namespace lowbit;
using namespace lowbit::cpu;

namespace {

std::mt19937_64 random_bits(1);
int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(n)); }

struct Matrix {
    mm::Operand operand;
    std::vector<uint8_t> codes, zeros;
    std::vector<float> scales, values;
    bool integer = false;
};

// Codes of a random format in random blocks, or fp32.
void fill(Matrix& m, int64_t rows, int64_t cols, bool integer) {
    mm::Operand& x = m.operand;
    x.rows = rows;
    const FormatRow* format = nullptr;
    do {
        format = &kFormats[below(kNumFormats)];
    } while (format->params.kind == kKindExponent || (integer && format->params.kind != kKindInteger));
    m.integer = format->params.kind == kKindInteger;
    if (!integer && below(4) == 0) {
        m.integer = false;
        m.values.resize(static_cast<size_t>(rows * cols));
        for (float& v : m.values) v = static_cast<float>(below(2001) - 1000) / 256.0f;
        x.data = m.values.data();
        x.dtype = mm::Element::f32;
        x.row_stride = cols;
        return;
    }
    x.table = &mm::table_of(format->params);
    x.row_stride = (cols * format->params.bits + 7) / 8;
    m.codes.resize(static_cast<size_t>(rows * x.row_stride));
    for (uint8_t& code : m.codes) {
        do {
            code = static_cast<uint8_t>(random_bits());
        } while (format->params.bits == 8 && !std::isfinite(x.table->f32[code]));
    }
    x.data = m.codes.data();
    const int64_t blocks[] = {cols, cols, 32, 128, 9};
    x.block_cols = blocks[below(5)];
    x.block_rows = below(2) ? 1 : 5;
    const int64_t scale_cols = (cols + x.block_cols - 1) / x.block_cols;
    const auto count = static_cast<size_t>((rows + x.block_rows - 1) / x.block_rows * scale_cols);
    m.scales.resize(count);
    for (float& s : m.scales) s = 0.001f * static_cast<float>(1 + below(1000));
    x.scale = m.scales.data();
    x.scale_row_stride = x.zero_row_stride = scale_cols;
    x.scale_col_stride = x.zero_col_stride = 1;
    if (m.integer && below(2)) {
        m.zeros.resize(count);
        for (uint8_t& z : m.zeros) z = static_cast<uint8_t>(format->params.qmin + below(1 << format->params.bits));
        x.zero_point = m.zeros.data();
    }
}

std::vector<float> multiply(mm::Problem p, const std::string& isa) {
    std::vector<float> out(static_cast<size_t>(p.a.rows * p.b.rows));
    p.out = out.data();
    force_isa(isa);
    mm::multiply(p);
    force_isa("");
    return out;
}

bool agree(int64_t depth, const std::vector<float>& scalar, const std::vector<float>& other, bool exact) {
    if (exact) return scalar == other;
    float largest = 1.0f;  // stands in for the sums of magnitudes, by which rounding errors are measured
    for (float v : scalar) largest = std::fmax(largest, std::fabs(v));
    const float bound = static_cast<float>(depth + 8) * 0x1p-22f * largest * std::sqrt(static_cast<float>(depth));
    for (size_t i = 0; i < scalar.size(); ++i) {
        if (!(std::fabs(scalar[i] - other[i]) <= bound)) return false;
    }
    return true;
}

}  // namespace

int main() {
    const int64_t row_counts[] = {1, 2, 4, 5, 9, 16, 33}, col_counts[] = {1, 3, 32, 37, 70};
    const int64_t depths[] = {1, 7, 31, 64, 130, 257, 513, 1100, 33000};
    int failures = 0, comparisons = 0;
    for (int i = 0; i < 400; ++i) {
        const int64_t depth = depths[below(i % 50 == 0 ? 9 : 8)];
        Matrix a, b;
        const bool integer = below(2) != 0;
        fill(a, row_counts[below(7)], depth, integer);
        fill(b, col_counts[below(5)], depth, integer);
        mm::Problem p;
        p.a = a.operand;
        p.b = b.operand;
        p.depth = depth;
        const bool whole = a.operand.block_cols >= depth && b.operand.block_cols >= depth;
        const std::vector<float> scalar = multiply(p, "scalar");
        for (const std::string& isa : isas()) {
            ++comparisons;
            if (agree(depth, scalar, multiply(p, isa), a.integer && b.integer && whole)) continue;
            std::printf("%s differs: case %d, [%d, %d] x [%d, %d]\n", isa.c_str(), i, static_cast<int>(p.a.rows),
                        static_cast<int>(depth), static_cast<int>(p.b.rows), static_cast<int>(depth));
            ++failures;
        }
    }
    std::printf("%d comparisons of products, %d failures\n", comparisons, failures);
    return failures != 0;
}
