// The products on CPU tensors, into tensors that are given: checks, then cpu/matmul/matmul.h.
#pragma once

#include <optional>

#include "cpu/matmul/matmul.h"
#include "ops_tensors.h"

namespace lowbit {

namespace mm = cpu::mm;

// Codes with their scales, or without a scheme a float matrix.
struct Coded {
    Tensor data;
    std::optional<SchemeParams> scheme;
    MaybeTensor scale, zero_point, global_scale;
};

// The header of a packed weight, in 64-bit words; lowbit/tensor/prepack.py writes it, and says what each word is.
constexpr int64_t kPackedMagic = 0x316b636150626c00;  // "\0lbPack1"
constexpr int64_t kPackedHeader = 1024;               // bytes
enum PackedWord : int {
    kPackedRows = 2,
    kPackedCols = 3,
    kPackedCodes = 4,  // where each part begins, in bytes
    kPackedScale = 5,
    kPackedZero = 6,
    kPackedGlobalScale = 7,
    kPackedPanel = 8,     // bytes of a panel
    kPackedHasInput = 9,  // whether x is quantized
    kPackedScheme = 16,   // Scheme.params()
    kPackedInput = 40,
};
struct Packed {
    const int64_t* words;
    int64_t rows, cols;
};
Packed packed_of(const Tensor& buffer);

// Parts of the description that cpu/matmul/matmul.h multiplies, of tensors; what does not fit throws.
mm::Operand operand_of(const char* name, const Coded& codes, int64_t cols);
void add_bias(mm::Problem& problem, const MaybeTensor& bias);
// `out` holds [rows, b.rows], contiguous, with any number of axes.
void add_out(mm::Problem& problem, int64_t rows, const Tensor& out);

void scaled_mm(const Coded& a, const Coded& b, const MaybeTensor& bias, const Tensor& out, int64_t cols);
// The scheme that floats are quantized in, with its scales, contiguous, where they are given.
struct Rounded {
    SchemeParams scheme;
    MaybeTensor scale, zero_point, global_scale;

    Rounded(const SchemeParams& scheme, const MaybeTensor& scale, const MaybeTensor& zero_point,
            const MaybeTensor& global_scale)
        : scheme(scheme), scale(dense(scale)), zero_point(dense(zero_point)), global_scale(dense(global_scale)) {}
};
cpu::Scales given_scales(const Rounded& rounded, cpu::Shape shape);
// `input`: how x is quantized on the way. `output`: how the result is, into codes; its scales are given.
void linear(const Tensor& x, const std::optional<Rounded>& input, const Coded& weight, const MaybeTensor& bias,
            const std::optional<Rounded>& output, const Tensor& out);
void linear_packed(const Tensor& x, const Packed& packed, const MaybeTensor& bias, const Tensor& out);

}  // namespace lowbit
