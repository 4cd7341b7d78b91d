// rms_norm: threads over rows; for the gradient of the weight over blocks of rows, then over columns.
#include <cmath>
#include <vector>

#include "cpu/fused/fused.h"
#include "cpu/runs.h"

namespace lowbit::cpu {
namespace {

std::vector<float> factors_of(const RowKernels& kernels, const NormWeight& weight, int64_t cols) {
    std::vector<float> factors(static_cast<size_t>(cols));
    kernels.widen(weight.data, weight.dtype, cols, factors.data());
    if (weight.offset != 0) {
        for (float& factor : factors) factor += 1.0f;
    }
    return factors;
}

// Rows of a matrix that are worth a thread of their own.
int64_t grain_of(Shape shape) { return (kGrain + shape.cols - 1) / shape.cols; }

// grad_weight from the sums of every block of rows, which are added up as the terms of a row are.
void add_blocks(const RowKernels& kernels, std::vector<float>& sums, int64_t blocks, int64_t cols, Dtype dtype,
                void* grad_weight) {
    parallel_for(cols, (kGrain + blocks - 1) / blocks, [&](int64_t begin, int64_t end) {
        const auto at = [&](int64_t block) { return sums.data() + block * cols + begin; };
        for (int64_t count = blocks; count > 1;) {
            int64_t half = 1;
            while (2 * half < count) half *= 2;
            for (int64_t b = half; b < count; ++b) kernels.add_terms(at(b), end - begin, at(b - half));
            count = half;
        }
        kernels.narrow(at(0), dtype, end - begin, nullptr, advance(grad_weight, begin, dtype));
    });
}

}  // namespace

void rms_norm(const Values& x, Shape shape, const NormWeight& weight, float eps, const Results& out, float* rstd) {
    const RowKernels& kernels = row_kernels();
    const std::vector<float> factors = factors_of(kernels, weight, shape.cols);
    parallel_for(shape.rows, grain_of(shape), [&](int64_t first, int64_t last) {
        std::vector<float> numbers(static_cast<size_t>(shape.cols)), terms(numbers.size());
        for (int64_t row = first; row < last; ++row) {
            const Run run{row, 0, shape.cols};
            const float* wide = numbers_at(kernels, x, run, numbers.data());
            kernels.product(wide, Dtype::kFloat32, shape.cols, 0.0f, wide, terms.data());
            const float mean = kernels.sum_terms(terms.data(), shape.cols) / static_cast<float>(shape.cols);
            const float by = 1.0f / std::sqrt(mean + eps);
            kernels.norm(wide, factors.data(), by, shape.cols, terms.data());
            kernels.narrow(terms.data(), out.dtype, shape.cols, nullptr, at_run(out, run));
            kernels.narrow(&by, Dtype::kFloat32, 1, nullptr, rstd + row);
        }
    });
}

void rms_norm_backward(const Values& grad, const Values& x, Shape shape, const NormWeight& weight, const float* rstd,
                       const Results& grad_x, void* grad_weight) {
    const RowKernels& kernels = row_kernels();
    const std::vector<float> factors = factors_of(kernels, weight, shape.cols);
    const int64_t cols = shape.cols, blocks = (shape.rows + kNormRows - 1) / kNormRows;
    const size_t width = static_cast<size_t>(cols);
    std::vector<float> sums(grad_weight ? static_cast<size_t>(blocks) * width : 0);
    parallel_for(blocks, grain_of(shape) / kNormRows, [&](int64_t first, int64_t last) {
        std::vector<float> x_room(width), grad_room(width), normed(width), scaled(width), terms(width);
        for (int64_t row = first * kNormRows; row < std::min(last * kNormRows, shape.rows); ++row) {
            const Run run{row, 0, cols};
            const float* given = numbers_at(kernels, grad, run, grad_room.data());
            kernels.product(numbers_at(kernels, x, run, x_room.data()), Dtype::kFloat32, cols, rstd[row], nullptr,
                            normed.data());
            kernels.product(given, Dtype::kFloat32, cols, 0.0f, factors.data(), scaled.data());
            kernels.product(scaled.data(), Dtype::kFloat32, cols, 0.0f, normed.data(), terms.data());
            const float share = kernels.sum_terms(terms.data(), cols) / static_cast<float>(cols);
            kernels.norm_gradient(scaled.data(), normed.data(), share, rstd[row], cols, terms.data());
            kernels.narrow(terms.data(), grad_x.dtype, cols, nullptr, at_run(grad_x, run));
            if (grad_weight) {
                kernels.add_products(given, normed.data(), cols, sums.data() + row / kNormRows * cols);
            }
        }
    });
    if (grad_weight) add_blocks(kernels, sums, blocks, cols, weight.dtype, grad_weight);
}

}  // namespace lowbit::cpu
