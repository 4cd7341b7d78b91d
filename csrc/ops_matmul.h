// What products on CPU tensors share: parts of the description that cpu/matmul/matmul.h multiplies.
#pragma once

#include <optional>

#include "cpu/matmul/matmul.h"
#include "ops_entry.h"
#include "ops_tensors.h"

namespace lowbit {

namespace mm = cpu::mm;

// Codes with their scales, or without a scheme a float matrix.
struct Coded {
    Tensor data;
    std::optional<SchemeParams> scheme;
    MaybeTensor scale, zero_point, global_scale;
};

// Parts of the description that cpu/matmul/matmul.h multiplies, of tensors; what does not fit throws.
mm::Operand operand_of(const Coded& codes, int64_t cols);
void add_bias(mm::Problem& problem, const MaybeTensor& bias);
// `out` holds [rows, b.rows], contiguous, with any number of axes.
void add_out(mm::Problem& problem, int64_t rows, const Tensor& out);

// The scheme that floats are quantized in, with its scales, contiguous, where they are given.
struct Rounded {
    SchemeParams scheme;
    MaybeTensor scale, zero_point, global_scale;

    Rounded(const SchemeParams& scheme, const MaybeTensor& scale, const MaybeTensor& zero_point,
            const MaybeTensor& global_scale)
        : scheme(scheme), scale(dense(scale)), zero_point(dense(zero_point)), global_scale(dense(global_scale)) {}
};
cpu::Scales given_scales(const Rounded& rounded, cpu::Shape shape);
// Codes `[rows, packed columns]` in a scheme; nothing where they are no codes, or the scheme is none.
std::optional<Coded> coded(const Tensor& data, const entry::Text& scheme, const MaybeTensor& scale,
                           const MaybeTensor& zero_point, const MaybeTensor& global_scale, int64_t cols);
// Sets `to` where there is a scheme; whether that is one, and no scales are given without it.
bool rounded(std::optional<Rounded>& to, const entry::MaybeText& scheme, int64_t rows, int64_t cols,
             const MaybeTensor& scale, const MaybeTensor& zero_point, const MaybeTensor& global_scale);

}  // namespace lowbit
