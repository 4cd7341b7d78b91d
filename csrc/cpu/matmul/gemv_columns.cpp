#include "cpu/matmul/gemv_columns.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/matmul/load.h"

namespace lowbit::cpu::mm {

void GemvColumns::put_lanes(int32_t* lanes) const {
    for (int l = 0; l < gemv_.width; ++l) {
        lanes[l] = plan_.per_step > 1 ? static_cast<int32_t>(l * plan_.per_step / gemv_.width) : 0;
    }
}

void GemvColumns::find_scales(int64_t first, int64_t count, float* room, const float** scales) const {
    static constexpr float kOne = 1;
    const Operand& b = p_.b;
    if (!plan_.blocks) {
        std::fill_n(scales, count, &kOne);
        return;
    }
    const bool floats = b.scale_format == kScaleFp32 && b.scale_col_stride == 1;
    const bool whole = plan_.rest == 0 && plan_.num_blocks == plan_.steps * plan_.per_step;
    const int64_t each = block_room(), stride = b.scale_row_stride, last = block_at(b.rows - 1, b.block_rows) * stride;
    const bool own = b.block_cols < p_.depth;
    const bool dense = b.block_rows == 1 && stride == plan_.num_blocks;
    if (!plan_.integers && whole && dense && in_bytes()) {
        gemv_.byte_scales(static_cast<const uint8_t*>(b.scale) + first * stride, b.scale_format == kScaleE8m0,
                          count * stride, room);
        for (int64_t n = 0; n < count; ++n) scales[n] = room + n * stride;
        return;
    }
    for (int64_t n = 0; n < count; ++n) {
        const int64_t at = block_at(first + n, b.block_rows) * stride;
        // Several are read as a vector, which at the end would reach beyond them.
        const bool inside = last - at >= gemv_.width;
        const bool there = floats && (plan_.integers ? inside && own && b.global_scale == nullptr
                                                     : plan_.per_step == 1 || (whole && inside));
        scales[n] = there            ? static_cast<const float*>(b.scale) + at
                    : plan_.integers ? integer_scales(first + n, room + n * each)
                                     : block_scales(first + n, room + n * each);
    }
}

bool GemvColumns::in_bytes() const {
    const Operand& b = p_.b;
    return (b.scale_format == kScaleE8m0 || b.scale_format == kScaleE4m3) && b.scale_col_stride == 1;
}

const float* GemvColumns::block_scales(int64_t row, float* out) const {
    const Operand& b = p_.b;
    const int64_t at = block_at(row, b.block_rows) * b.scale_row_stride;
    if (b.scale_format == kScaleFp32 && b.scale_col_stride == 1) {
        std::copy_n(static_cast<const float*>(b.scale) + at, plan_.num_blocks, out);
    } else if (in_bytes()) {
        const auto* codes = static_cast<const uint8_t*>(b.scale) + at;
        gemv_.byte_scales(codes, b.scale_format == kScaleE8m0, plan_.num_blocks, out);
    } else {
        Operand inner = b;
        inner.global_scale = nullptr;
        row_scales(inner, row, 0, p_.depth, out);
    }
    // Lanes of the last step that belong to no block: their elements of a are 0, and must stay so.
    std::fill_n(out + plan_.num_blocks, gemv_.width, 1.0f);
    return out;
}

const float* GemvColumns::integer_scales(int64_t row, float* out) const {
    const Operand& b = p_.b;
    if (b.block_cols >= p_.depth) {
        std::fill_n(out, plan_.num_blocks, scale_at(b, row, 0));
    } else {
        block_scales(row, out);
        for (int64_t i = 0; i < plan_.num_blocks && b.global_scale != nullptr; ++i) out[i] *= global_scale_at(b, row);
    }
    return out;
}

void GemvColumns::find_zeros(int64_t first, int64_t count, int32_t* room, const int32_t** zeros) const {
    const bool own = p_.b.zero_point != nullptr;
    for (int64_t n = 0; n < count; ++n) {
        zeros[n] = room + own * n * block_room();
        if (own) put_zeros(first + n, room + n * block_room());
    }
}

void GemvColumns::put_zeros(int64_t row, int32_t* out) const {
    const Operand& b = p_.b;
    for (int64_t i = 0; i < plan_.num_blocks; ++i) out[i] = zero_at(b, row, i * plan_.block) + zero_offset();
    std::fill_n(out + plan_.num_blocks, gemv_.width, 0);
}

void GemvColumns::take_tail(const uint8_t* codes, uint8_t* to) const {
    const int64_t bits = plan_.rest * p_.b.table->bits, bytes = (bits + 7) / 8;
    std::memcpy(to, codes + plan_.steps * plan_.unit->bytes, static_cast<size_t>(bytes));
    to[bytes - 1] &= static_cast<uint8_t>(0xff >> (8 * bytes - bits));
}

int32_t GemvColumns::zero_offset() const {
    const Table& t = *p_.b.table;
    const int half = 1 << (t.bits - 1);
    if (plan_.integers) return t.is_signed ? half : 0;
    return plan_.unit->as_signed && !t.is_signed ? -half : 0;
}

float GemvColumns::factor(bool has_nan) const {
    const Table& t = *p_.b.table;
    if (!plan_.unit->fp16) return 1;
    return t.half_nan != 0 && has_nan ? NAN : t.half_unit;
}

void GemvColumns::finish(const void* results, int64_t pitch, int kind, int64_t first, int64_t count) const {
    const Operand &a = p_.a, &b = p_.b;
    float scales[kMost + kGemvStepBytes / 4], bias[kMost + kGemvStepBytes / 4];
    Row row;
    row.sum_kind = kind;
    row.scaled = true;
    row.b_scale = scales;
    row.out_dtype = p_.out_dtype;
    row.cols = count;
    if (p_.bias != nullptr) {
        row.bias = bias;
        for (int64_t n = 0; n < count; ++n) bias[n] = float_at(p_.bias, p_.bias_dtype, (first + n) * p_.bias_stride);
    }
    if (plan_.blocks) {
        for (int64_t n = 0; n < count; ++n) {
            scales[n] = plan_.integers || b.global_scale == nullptr ? 1.0f : global_scale_at(b, first + n);
        }
    } else if (b.scale_format == kScaleFp32 && b.block_rows == 1 && b.global_scale == nullptr) {
        const auto* from = static_cast<const float*>(b.scale) + first * b.scale_row_stride;
        for (int64_t n = 0; n < count; ++n) scales[n] = from[n * b.scale_row_stride];
    } else {
        for (int64_t n = 0; n < count; ++n) scales[n] = scale_at(b, first + n, 0);
    }
    const int64_t size = p_.out_dtype == Element::f32 ? 4 : 2;
    for (int64_t m = 0; m < a.rows; ++m) {
        row.sum = static_cast<const uint8_t*>(results) + m * pitch;
        row.a_scale = plan_.a_folded || plan_.in_totals() ? 1.0f : scale_at(a, m, 0);
        row.out = static_cast<uint8_t*>(p_.out) + (m * b.rows + first) * size;
        kernels_in_use().finish(row);
    }
}

}  // namespace lowbit::cpu::mm
