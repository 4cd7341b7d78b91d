// Holds every instruction set's matrix product against the exact one within the bound of docs/numerics.md section 9,
// and products of integers against the scalar code in every bit. Random pairs of formats, scales, zero points, strides
// and shapes. Needs neither torch nor Python.
#include <cfloat>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/matmul/plan.h"
#include "matmul_problems.h"

using namespace lowbit;
using namespace lowbit::cpu;
using namespace lowbit::cpu::test;

namespace {

// What the operands of a case have in common.
enum class Theme { integers, folding, any, kCount };

struct Case {
    Matrix a, b;
    std::vector<uint8_t> bias;
    mm::Problem problem;
    bool exact = false;  // a product of integers: the same bits everywhere

    Case(Theme theme, int64_t rows, int64_t cols, int64_t depth);

  private:
    void fill(Matrix& m, Theme theme, int64_t rows, Reach reach);
};

Case::Case(Theme theme, int64_t rows, int64_t cols, int64_t depth) {
    problem.depth = depth;
    const auto reach = static_cast<Reach>(below(3));
    const bool first = below(2) != 0;
    fill(a, theme, rows, first ? reach : Reach::moderate);
    fill(b, theme, cols, first ? Reach::moderate : reach);
    const bool narrow = b.operand.has_codes() && (b.operand.table->bits == 8 || b.operand.table->bits == 4);
    if (narrow && below(3) == 0) b.keep_as_panels(depth);
    problem.a = a.operand;
    problem.b = b.operand;
    exact = mm::is_integer_product(problem);
    problem.out_dtype = static_cast<mm::Element>(below(3));
    if (below(2)) {
        problem.bias_dtype = static_cast<mm::Element>(below(3));
        problem.bias_stride = 1 + below(2);
        bias.resize(static_cast<size_t>(4 * cols * problem.bias_stride));
        for (int64_t i = 0; i < cols; ++i) put_float(bias, problem.bias_dtype, i * problem.bias_stride, some_float());
        problem.bias = bias.data();
    }
}

void Case::fill(Matrix& m, Theme theme, int64_t rows, Reach reach) {
    const int64_t depth = problem.depth;
    if (theme != Theme::integers && below(4) == 0) {
        return m.make_floats(rows, depth, theme == Theme::folding ? mm::Element::bf16 : mm::Element(below(3)));
    }
    const FormatRow* format = nullptr;
    do {
        format = &kFormats[below(kNumFormats)];
    } while (format->params.bits > 8 || format->params.kind == kKindExponent ||
             (theme == Theme::integers && format->params.kind != kKindInteger));
    const int64_t blocks[] = {depth, depth, 32, 128, 9};
    const bool folding = theme == Theme::folding && below(4) > 0;
    const int scale_format = static_cast<int>(folding ? kScaleE8m0 + below(2) : below(5));
    m.make_codes(rows, depth, *format, scale_format, folding ? 16 << below(2) : blocks[below(5)], reach);
}

std::vector<uint8_t> multiply(mm::Problem p, const std::string& isa) {
    const int64_t width = p.out_dtype == mm::Element::f32 ? 4 : 2;
    std::vector<uint8_t> out(static_cast<size_t>(p.a.rows * p.b.rows * width), 0xa5);
    p.out = out.data();
    force_isa(isa);
    mm::multiply(p);
    force_isa("");
    return out;
}

struct Expected {
    std::vector<double> exact, bound;
};

// Section 9: gamma(K + 6) |A| |B|^T, what flushing takes, two roundings of the bias, and the last cast's unit.
Expected expected(const Case& c) {
    const mm::Problem& p = c.problem;
    const int64_t n = p.b.rows, depth = p.depth;
    const double terms = static_cast<double>(depth + 6) * 0x1p-24, gamma = terms / (1 - terms);
    const auto dtype = static_cast<int>(p.out_dtype);
    const double unit[] = {0, 0x1p-8, 0x1p-11}, tiny[] = {0x1p-149, 0x1p-133, 0x1p-24};
    Expected y;
    for (int64_t i = 0; i < p.a.rows * n; ++i) {
        const double* left = c.a.values.data() + i / n * depth;
        const double* right = c.b.values.data() + i % n * depth;
        double sum = 0, size = 0, both = 0;
        for (int64_t k = 0; k < depth; ++k) {
            sum += left[k] * right[k];
            size += std::fabs(left[k] * right[k]);
            both += std::fabs(left[k]) + std::fabs(right[k]);
        }
        const double bias = p.bias == nullptr ? 0 : binary_value(p.bias, p.bias_dtype, i % n * p.bias_stride);
        const double before = size * gamma + 0x1p-126 * (both + static_cast<double>(depth)) + std::fabs(bias) * 0x1p-23;
        y.exact.push_back(sum + bias);
        y.bound.push_back(before + (std::fabs(sum + bias) + before) * unit[dtype] + tiny[dtype]);
    }
    return y;
}

bool within(const std::vector<uint8_t>& got, const Expected& wanted, mm::Element dtype) {
    const double largest[] = {FLT_MAX, 0x1.fep127, 65504};
    for (size_t i = 0; i < wanted.exact.size(); ++i) {
        const double y = binary_value(got.data(), dtype, static_cast<int64_t>(i));
        const double exact = wanted.exact[i], bound = wanted.bound[i];
        const bool over = std::isinf(y) && std::fabs(exact) + bound > largest[static_cast<int>(dtype)];
        const bool either = std::fabs(exact) <= bound;  // the sign is anybody's
        if (!(std::fabs(y - exact) <= bound) && !(over && (either || std::signbit(y) == std::signbit(exact))))
            return false;
    }
    return true;
}

// Whether an instruction set with bf16 products would multiply scales that change along K into bf16 operands.
bool folds(const mm::Problem& p) {
    mm::Kernels kernels;
    kernels.nr = 16;
    kernels.max_rows = 4;
    kernels.tile[static_cast<int>(mm::Kind::bf16)] = [](bool, int, const mm::Tile&) {};
    const mm::Plan plan = mm::make_plan(p, kernels);
    return plan.kind == mm::Kind::bf16 && (plan.a_folded || plan.b_folded);
}

struct Counts {
    int comparisons = 0, failures = 0, exact = 0, folded = 0, unfolded = 0, zeros = 0;
};

void compare(const Case& c, Theme theme, int number, Counts& counts) {
    const mm::Problem& p = c.problem;
    const Expected wanted = expected(c);
    const std::vector<uint8_t> scalar = multiply(p, "scalar"), zeros(scalar.size());
    counts.exact += c.exact;
    counts.zeros += within(zeros, wanted, p.out_dtype);
    if (theme == Theme::folding) ++(folds(p) ? counts.folded : counts.unfolded);
    for (const std::string& isa : isas()) {
        ++counts.comparisons;
        const std::vector<uint8_t> got = multiply(p, isa);
        if (within(got, wanted, p.out_dtype) && (!c.exact || got == scalar)) continue;
        std::printf(
            "%s differs: case %d, [%d, %d] x [%d, %d], %d and %d bits, panels %d, zero points %d and %d, scales %d and "
            "%d\n",
            isa.c_str(), number, static_cast<int>(p.a.rows), static_cast<int>(p.depth), static_cast<int>(p.b.rows),
            static_cast<int>(p.depth), p.a.has_codes() ? p.a.table->bits : 0, p.b.has_codes() ? p.b.table->bits : 0,
            p.b.is_packed(), p.a.zero_point != nullptr, p.b.zero_point != nullptr, p.a.scale_format, p.b.scale_format);
        ++counts.failures;
    }
}

}  // namespace

// An argument of N takes one case in N, for emulators.
int main(int argc, char** argv) {
    const int share = argc > 1 ? std::atoi(argv[1]) : 1;
    const int64_t row_counts[] = {1, 2, 4, 5, 9, 13, 16, 33}, col_counts[] = {1, 3, 32, 37, 70, 230};
    const int64_t depths[] = {1, 7, 31, 64, 130, 257, 512, 513, 1100, 33000};
    const int cases = 900 / share;
    Counts counts;
    for (int i = 0; i < cases; ++i) {
        const int64_t depth = i % 100 < 3 ? 33000 : depths[below(9)];
        const auto theme = static_cast<Theme>(i % static_cast<int>(Theme::kCount));
        compare(Case(theme, row_counts[below(8)], col_counts[below(6)], depth), theme, i, counts);
    }
    // More rows than are decoded at a time, and more columns than a thread takes at a time.
    for (int i = 0; i < 12 / share; ++i) {
        const auto theme = static_cast<Theme>(i % static_cast<int>(Theme::kCount));
        compare(Case(theme, 513 + below(60), 129 + below(200), i % 2 == 0 ? 129 : 520), theme, cases + i, counts);
    }
    // A bound that zeros would pass, or a path that is never taken, would make this test one of nothing.
    const int least = 20 / share;
    const bool thorough =
        counts.zeros * 20 < cases && counts.exact > least && counts.folded > least && counts.unfolded > least;
    std::printf("%d comparisons of products, %d failures; %d exact, %d folded into bf16, %d not; zeros would pass %d\n",
                counts.comparisons, counts.failures, counts.exact, counts.folded, counts.unfolded, counts.zeros);
    return counts.failures != 0 || !thorough;
}
