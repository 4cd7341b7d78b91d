// Sums of squares: threads over rows. Integers add exactly, so their order does not matter.
#include "cpu/optim/sums.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "cpu/runs.h"

namespace lowbit::cpu {
namespace {

// 2^(kSquareBits - 2 exponent). Exponents beyond 256 mean the same as 256: of fp32 numbers but 0 none is below 2^-256,
// and below 2^256 all squares round to 0.
double scale_of(int32_t exponent) {
    const int64_t power = kSquareBits - 2 * int64_t{std::clamp(exponent, -256, 256)}, bits = (power + 1023) << 52;
    double scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
}

// Calls f(run, numbers) over some rows.
template <class F>
void for_numbers(const Values& x, int64_t cols, int64_t first_row, int64_t last_row, const F& f) {
    const RowKernels& kernels = row_kernels();
    float room[kRun];
    for (int64_t row = first_row; row < last_row; ++row) {
        for (int64_t begin = 0; begin < cols; begin += kRun) {
            const Run run{row, begin, std::min(kRun, cols - begin)};
            f(run, numbers_at(kernels, x, run, room));
        }
    }
}

}  // namespace

void row_square_sums(const Values& x, Shape shape, const int32_t* exponents, int64_t* sums) {
    if (shape.cols == 1 && x.stride == 1) return column_square_sums(x, {1, shape.rows}, exponents, sums);
    const auto kernel = row_kernels().square_sum;
    std::fill_n(sums, shape.rows, 0);
    parallel_for(shape.rows, (kGrain + shape.cols - 1) / shape.cols, [&](int64_t begin, int64_t end) {
        for_numbers(x, shape.cols, begin, end, [&](const Run& run, const float* numbers) {
            sums[run.row] += kernel(numbers, run.count, scale_of(exponents[run.row]));
        });
    });
}

void column_square_sums(const Values& x, Shape shape, const int32_t* exponents, int64_t* sums) {
    // A thread has sums of its own to clear and to add: its rows are several.
    constexpr int64_t kLeastRows = 16;
    const auto kernel = row_kernels().add_squares;
    std::vector<double> scales(static_cast<size_t>(shape.cols));
    std::transform(exponents, exponents + shape.cols, scales.begin(), scale_of);
    std::fill_n(sums, shape.cols, 0);
    std::mutex adding;
    const int64_t grain = std::max(kLeastRows, (kGrain + shape.cols - 1) / shape.cols);
    parallel_for(shape.rows, grain, [&](int64_t begin, int64_t end) {
        std::vector<int64_t> mine(scales.size());
        for_numbers(x, shape.cols, begin, end, [&](const Run& run, const float* numbers) {
            kernel(numbers, run.count, scales.data() + run.begin, mine.data() + run.begin);
        });
        const std::lock_guard lock(adding);
        for (size_t i = 0; i < mine.size(); ++i) sums[i] += mine[i];
    });
}

}  // namespace lowbit::cpu
