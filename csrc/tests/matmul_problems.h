// Random products for matmul_test.cpp, with what their operands decode to by arithmetic of the test's own, in double.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "common/numerics.h"
#include "common/params.h"
#include "common/scales.h"
#include "cpu/matmul/matmul.h"
#include "format_table.h"

namespace lowbit::cpu::test {

inline std::mt19937_64 random_bits(1);
inline int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(n)); }

// -- numbers ---------------------------------------------------------------------------------------------------------

// A sign, `exponent` bits, `mantissa` bits; finite.
inline double float_value(uint32_t code, int exponent, int mantissa, int bias) {
    const auto fraction = static_cast<double>(code & ((1u << mantissa) - 1));
    const int field = static_cast<int>(code >> mantissa & ((1u << exponent) - 1));
    const double sign = code >> (exponent + mantissa) & 1 ? -1 : 1, hidden = std::ldexp(1.0, mantissa);
    return sign * std::ldexp(field > 0 ? hidden + fraction : fraction, (field > 0 ? field : 1) - bias - mantissa);
}

// A binary number of 32 or 16 bits, Inf and NaN included.
inline double binary_value(const void* data, mm::Element dtype, int64_t index) {
    if (dtype == mm::Element::f32) return static_cast<double>(static_cast<const float*>(data)[index]);
    const uint32_t bits = static_cast<const uint16_t*>(data)[index];
    const int exponent = dtype == mm::Element::bf16 ? 8 : 5, mantissa = 15 - exponent;
    const uint32_t top = ((1u << exponent) - 1) << mantissa;
    if ((bits & 0x7fffu) > top) return NAN;
    if ((bits & 0x7fffu) == top) return bits >> 15 ? -INFINITY : INFINITY;
    return float_value(bits, exponent, mantissa, (1 << (exponent - 1)) - 1);
}

inline double code_value(const FormatRow& row, uint32_t code) {
    const FormatParams& f = row.params;
    if (f.kind == kKindCodebook) return static_cast<double>(float_of(row.values[code]));
    if (f.kind == kKindFloat) return float_value(code, f.exponent, f.mantissa, f.bias);
    return static_cast<double>(f.is_signed && code >> (f.bits - 1) ? static_cast<int>(code) - (1 << f.bits)
                                                                   : static_cast<int>(code));
}

inline bool is_finite(const FormatParams& f, uint32_t code) {
    return f.kind != kKindFloat || static_cast<int>(code & ((1u << (f.bits - 1)) - 1)) <= f.max_code;
}

// -- arrays ----------------------------------------------------------------------------------------------------------

struct Strides {
    int64_t row, col, size;
};

// Of a [rows, cols] array: row by row, the same with gaps, or column by column.
inline Strides strides(int64_t rows, int64_t cols) {
    switch (below(4)) {
        case 0:
            return {1, rows + 1, cols * (rows + 1)};
        case 1:
            return {2 * cols + 3, 2, rows * (2 * cols + 3)};
        default:
            return {cols, 1, rows * cols};
    }
}

// A float array of any dtype: a number of few bits times a power of two, as near as the dtype has it.
inline void put_float(std::vector<uint8_t>& to, mm::Element dtype, int64_t index, float value) {
    const uint32_t bits = bits_of(value);
    const uint16_t half = dtype == mm::Element::bf16 ? static_cast<uint16_t>(bits >> 16) : narrow_fp16(bits);
    if (dtype == mm::Element::f32) std::memcpy(&to[static_cast<size_t>(4 * index)], &bits, 4);
    if (dtype != mm::Element::f32) std::memcpy(&to[static_cast<size_t>(2 * index)], &half, 2);
}

inline float some_float() {
    return std::ldexp(static_cast<float>(below(2001) - 1000) / 256.0f, static_cast<int>(below(13)) - 6);
}

// -- operands --------------------------------------------------------------------------------------------------------

// Where power-of-two scales lie; folding them into bf16 operands takes moderate ones (cpu/matmul/plan.cpp). At most one
// operand's are not, and products stay far from both ends of fp32.
enum class Reach { moderate, low, high };

struct Matrix {
    mm::Operand operand;
    std::vector<uint8_t> data, panels, scales, zeros;
    std::vector<float> global_scale;  // one, or one a row
    std::vector<double> values;       // [rows, cols], decoded
    bool integer = false;

    Matrix() = default;
    Matrix(const Matrix&) = delete;  // the operand points into this one

    void make_floats(int64_t rows, int64_t cols, mm::Element dtype);
    void make_codes(int64_t rows, int64_t cols, const FormatRow& format, int scale_format, int64_t block_cols,
                    Reach reach);
    // The same codes as a weight in the packed layout (cpu/matmul/packed.h).
    void keep_as_panels(int64_t cols);

  private:
    uint32_t code_at(int64_t row, int64_t col, int bits) const;
    void put_codes(int64_t cols, const FormatRow& format);
    void put_scales(int64_t count, Reach reach);
    double scale_of(int64_t row, int64_t at) const;
};

inline void Matrix::make_floats(int64_t rows, int64_t cols, mm::Element dtype) {
    const Strides s = strides(rows, cols);
    data.resize(static_cast<size_t>(4 * s.size));
    values.resize(static_cast<size_t>(rows * cols));
    for (int64_t i = 0; i < rows * cols; ++i) {
        const int64_t at = i / cols * s.row + i % cols * s.col;
        put_float(data, dtype, at, some_float());
        values[static_cast<size_t>(i)] = binary_value(data.data(), dtype, at);
    }
    operand.data = data.data();
    operand.dtype = dtype;
    operand.rows = rows;
    operand.row_stride = s.row;
    operand.col_stride = s.col;
}

// Random finite codes; `values` are theirs, without zero points and scales.
inline void Matrix::put_codes(int64_t cols, const FormatRow& format) {
    mm::Operand& x = operand;
    const int bits = format.params.bits;
    const int64_t packed = (cols * bits + 7) / 8;
    const Strides s = bits == 8 ? strides(x.rows, cols) : Strides{packed + below(3), 1, x.rows * (packed + 2)};
    data.resize(static_cast<size_t>(s.size));
    for (uint8_t& code : data) {
        do {
            code = static_cast<uint8_t>(random_bits());
        } while (bits == 8 && !is_finite(format.params, code));
    }
    x.data = data.data();
    x.row_stride = s.row;
    x.col_stride = s.col;
    values.resize(static_cast<size_t>(x.rows * cols));
    for (int64_t i = 0; i < x.rows * cols; ++i) {
        values[static_cast<size_t>(i)] = code_value(format, code_at(i / cols, i % cols, bits));
    }
}

inline uint32_t Matrix::code_at(int64_t row, int64_t col, int bits) const {
    const int64_t bit = col * bits;
    const uint8_t* at = data.data() + row * operand.row_stride + (bits == 8 ? col * operand.col_stride : bit / 8);
    const uint32_t two = at[0] | (bit % 8 + bits > 8 ? static_cast<uint32_t>(at[1]) << 8 : 0u);
    return two >> (bit % 8) & ((1u << bits) - 1);
}

inline void Matrix::keep_as_panels(int64_t cols) {
    const int bits = operand.table->bits;
    const int64_t rows = operand.rows, depth = (cols * bits + 31) / 32;
    const uint32_t sign = integer && operand.table->is_signed ? 1u << (bits - 1) : 0;
    panels.assign(static_cast<size_t>((rows + 31) / 32 * depth * 128), 0);
    for (int64_t i = 0; i < rows * cols; ++i) {
        const int64_t row = i / cols, k = i % cols, in_dword = k % (32 / bits);
        const int64_t dword = row / 32 * depth + k / (32 / bits);
        const uint32_t code = code_at(row, k, bits) ^ sign;
        uint8_t& byte = panels[static_cast<size_t>(dword * 128 + row % 32 * 4 + in_dword % 4)];
        byte = static_cast<uint8_t>(byte | code << (in_dword / 4 * 4));
    }
    const mm::Operand plain = operand;
    const int64_t blocks = (cols + plain.block_cols - 1) / plain.block_cols;
    const auto count = static_cast<size_t>((rows + 31) / 32 * 32 * blocks);
    const auto bytes = static_cast<size_t>(scale_bytes(plain.scale_format));
    std::vector<uint8_t> scale_panels(count * bytes), zero_panels(count);
    for (int64_t i = 0; i < rows * blocks; ++i) {
        const int64_t row = i / blocks, block = i % blocks, down = row / plain.block_rows;
        const auto to = static_cast<size_t>((row / 32 * blocks + block) * 32 + row % 32);
        const auto from = static_cast<size_t>(down * plain.scale_row_stride + block * plain.scale_col_stride);
        std::memcpy(&scale_panels[to * bytes], &scales[from * bytes], bytes);
        if (plain.zero_point != nullptr) zero_panels[to] = zeros[from];
    }
    scales = scale_panels;
    zeros = zero_panels;
    operand.data = panels.data();
    operand.panel_bytes = depth * 128;
    operand.row_stride = 0;
    operand.col_stride = operand.block_rows = 1;
    operand.scale = scales.data();
    operand.scale_row_stride = blocks;
    operand.scale_col_stride = 32;
    if (plain.zero_point != nullptr) operand.zero_point = zeros.data();
}

inline void Matrix::put_scales(int64_t count, Reach reach) {
    const int format = operand.scale_format;
    scales.resize(static_cast<size_t>(4 * count));
    for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(i);
        const int64_t far = reach == Reach::moderate || below(2) ? 117 : reach == Reach::low ? 57 : 188;
        if (format == kScaleE8m0) scales[at] = static_cast<uint8_t>(far + below(far == 188 ? 3 : 20));
        if (format == kScaleE4m3) scales[at] = static_cast<uint8_t>(below(127));
        if (format <= kScaleFp16) {
            put_float(scales, static_cast<mm::Element>(format), i, 0.001f * static_cast<float>(1 + below(1000)));
        }
    }
}

inline double Matrix::scale_of(int64_t row, int64_t at) const {
    const auto code = static_cast<uint32_t>(scales[static_cast<size_t>(at)]);
    if (operand.scale_format == kScaleE8m0) return std::ldexp(1.0, static_cast<int>(code) - 127);
    const double stored = operand.scale_format == kScaleE4m3
                              ? code_value(kFormats[kIndex_fp8_e4m3], code)
                              : binary_value(scales.data(), static_cast<mm::Element>(operand.scale_format), at);
    if (operand.global_scale == nullptr) return stored;
    return stored * static_cast<double>(global_scale[static_cast<size_t>(row * operand.global_scale_row_stride)]);
}

inline void Matrix::make_codes(int64_t rows, int64_t cols, const FormatRow& format, int scale_format,
                               int64_t block_cols, Reach reach) {
    mm::Operand& x = operand;
    x.rows = rows;
    x.table = &mm::table_of(format.params);
    x.scale_format = scale_format;
    x.block_cols = block_cols;
    x.block_rows = below(2) ? 1 : 5;
    integer = format.params.kind == kKindInteger;
    put_codes(cols, format);
    const Strides s = strides((rows + x.block_rows - 1) / x.block_rows, (cols + block_cols - 1) / block_cols);
    put_scales(s.size, reach);
    x.scale = scales.data();
    x.scale_row_stride = x.zero_row_stride = s.row;
    x.scale_col_stride = x.zero_col_stride = s.col;
    if (scale_format == kScaleE4m3) {
        global_scale.resize(static_cast<size_t>(x.block_rows == 1 ? rows : 1));
        for (float& one : global_scale) one = 0.001f * static_cast<float>(1 + below(1000));
        x.global_scale = global_scale.data();
        x.global_scale_row_stride = x.block_rows == 1;
    }
    if (integer && scale_format != kScaleE4m3 && below(2)) {  // any that its bytes can hold, also for 4-bit codes
        zeros.resize(static_cast<size_t>(s.size));
        for (uint8_t& z : zeros) z = static_cast<uint8_t>(below(3) ? random_bits() : below(2) ? 0x7f : 0x80);
        x.zero_point = zeros.data();
    }
    for (int64_t i = 0; i < rows * cols; ++i) {
        const int64_t at = i / cols / x.block_rows * s.row + i % cols / block_cols * s.col;
        double& value = values[static_cast<size_t>(i)];
        if (x.zero_point != nullptr) {
            const uint8_t zero = zeros[static_cast<size_t>(at)];
            value -= format.params.is_signed ? static_cast<double>(static_cast<int8_t>(zero)) : zero;
        }
        value *= scale_of(i / cols, at);
    }
}

}  // namespace lowbit::cpu::test
