#include "cpu/matmul/load.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "common/numerics.h"
#include "common/scales.h"
#include "cpu/matmul/packed.h"
#include "format_table.h"

namespace lowbit::cpu::mm {
namespace {

template <class T>
void gather(const T* from, int64_t stride, T* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
}

constexpr int kBytes = 16;
typedef uint8_t Bytes __attribute__((vector_size(kBytes)));
template <int... i>
Bytes interleave(Bytes a, Bytes b, int half, std::integer_sequence<int, i...>) {
    const Bytes low = {(i / 2 + i % 2 * kBytes)...}, more = {((void)i, kBytes / 2)...};
    return __builtin_shuffle(a, b, half == 0 ? low : low + more);
}

// to[j][i] = from[i][j], sixteen by sixteen bytes: four perfect shuffles of the rows.
void turn(const uint8_t* from, int64_t stride, uint8_t* to, int64_t pitch) {
    Bytes v[kBytes], w[kBytes];
    for (int i = 0; i < kBytes; ++i) std::memcpy(&v[i], from + i * stride, sizeof v[i]);
    for (int stage = 0; stage < 4; ++stage) {
        for (int i = 0; i < kBytes / 2; ++i) {
            w[2 * i] = interleave(v[i], v[i + kBytes / 2], 0, std::make_integer_sequence<int, kBytes>());
            w[2 * i + 1] = interleave(v[i], v[i + kBytes / 2], 1, std::make_integer_sequence<int, kBytes>());
        }
        std::memcpy(v, w, sizeof v);
    }
    for (int j = 0; j < kBytes; ++j) std::memcpy(to + j * pitch, &v[j], sizeof v[j]);
}

}  // namespace

ByteForm byte_form(const Operand& x, bool is_a, int zero) {
    if (x.is_packed()) return {0, 0, packed_offset(x) + zero};
    if (x.table->bits == 8) {
        const bool flips = x.table->is_signed != is_a;
        const int offset = !flips ? 0 : is_a ? -128 : 128;
        return {static_cast<uint8_t>(flips ? 128 : 0), 0, zero + offset};
    }
    const int half = x.table->is_signed ? 1 << (x.table->bits - 1) : 0, lift = is_a ? 0 : 128;
    const int least = -half - zero, most = least + (1 << x.table->bits) - 1;
    const int kept = least >= -128 && most <= 127 ? 0 : zero;
    return {static_cast<uint8_t>(half), static_cast<uint8_t>(lift - half - zero + kept), lift + kept};
}

float float_at(const void* data, Element dtype, int64_t index) {
    if (dtype == Element::f32) return static_cast<const float*>(data)[index];
    const uint16_t half = static_cast<const uint16_t*>(data)[index];
    return float_of(dtype == Element::bf16 ? widen_bf16(half) : widen_fp16(half));
}

namespace {

// The fp32 bits of scales that are bytes, by their codes; null for others.
const uint32_t* scale_table(int32_t scale_format) {
    if (scale_format == kScaleE4m3) return kFormats[kIndex_fp8_e4m3].values;
    return scale_format == kScaleE8m0 ? kFormats[kIndex_e8m0].values : nullptr;
}

}  // namespace

float stored_scale(const Operand& x, int64_t index) {
    const uint32_t stored = load_scale(x.scale, index, x.scale_format);
    const uint32_t* table = scale_table(x.scale_format);
    return table != nullptr ? float_of(table[stored]) : scale_value(stored, x.scale_format, nullptr);
}

float scale_at(const Operand& x, int64_t row, int64_t k) {
    if (!x.has_codes()) return 1.0f;
    const float scale = stored_scale(x, scale_index(x, row, block_at(k, x.block_cols)));
    return x.global_scale == nullptr ? scale : scale * global_scale_at(x, row);
}

void block_scales(const Operand& x, int64_t row, int64_t block, int64_t count, float* out) {
    const int64_t at = scale_index(x, row, block);
    if (const uint32_t* table = scale_table(x.scale_format)) {  // small blocks, and so many of them
        const uint8_t* codes = static_cast<const uint8_t*>(x.scale) + at;
        const int64_t step = x.scale_col_stride;
        for (int64_t i = 0; i < count; ++i) out[i] = float_of(table[codes[i * step]]);
    } else {
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t stored = load_scale(x.scale, at + i * x.scale_col_stride, x.scale_format);
            out[i] = scale_value(stored, x.scale_format, nullptr);
        }
    }
    if (x.global_scale == nullptr) return;
    const float global_scale = global_scale_at(x, row);
    for (int64_t i = 0; i < count; ++i) out[i] *= global_scale;
}

void row_scales(const Operand& x, int64_t row, int64_t begin, int64_t end, float* out) {
    const int64_t first = block_at(begin, x.block_cols);
    block_scales(x, row, first, block_at(end - 1, x.block_cols) - first + 1, out);
}

int zero_at(const Operand& x, int64_t row, int64_t k) {
    if (!x.has_codes() || x.zero_point == nullptr) return 0;
    const int64_t block = block_at(k, x.block_cols);
    const uint8_t byte =
        x.is_packed() ? x.zero_point[scale_index(x, row, block)]
                      : x.zero_point[block_at(row, x.block_rows) * x.zero_row_stride + block * x.zero_col_stride];
    return x.table->is_signed ? static_cast<int8_t>(byte) : byte;
}

// One row's elements [begin, end), contiguous: codes one a byte, or floats as they are stored.
const void* Loader::fetch(int64_t row, int64_t begin, int64_t end) const {
    const Operand& x = operand;
    if (x.patches != nullptr) {
        x.patches->fetch(row, begin, end, raw);
        return raw;
    }
    const int64_t size = x.dtype == Element::codes ? 1 : x.dtype == Element::f32 ? 4 : 2;
    const auto* base = static_cast<const uint8_t*>(x.data) + row * x.row_stride * size;
    if (x.has_codes() && x.table->bits < 8) {
        const int64_t whole = begin / 8 * 8;  // eight codes are whole bytes, whatever their width
        kernels.unpack(base + whole / 8 * x.table->bits, raw, end - whole, x.table->bits);
        return raw + (begin - whole);
    }
    const uint8_t* from = base + begin * x.col_stride * size;
    if (x.col_stride == 1) return from;
    if (size == 1) gather(from, x.col_stride, raw, end - begin);
    if (size == 2) {
        gather(reinterpret_cast<const uint16_t*>(from), x.col_stride, reinterpret_cast<uint16_t*>(raw), end - begin);
    }
    if (size == 4) {
        gather(reinterpret_cast<const uint32_t*>(from), x.col_stride, reinterpret_cast<uint32_t*>(raw), end - begin);
    }
    return raw;
}

// The same for `rows` rows (a multiple of kBytes) of a transposed matrix of bytes, transposed_pitch apart in `raw`.
void Loader::fetch_transposed(int64_t row, int64_t rows, int64_t begin, int64_t end) const {
    const int64_t stride = operand.col_stride, count = end - begin, pitch = transposed_pitch(count);
    const int64_t whole = count - count % kBytes;
    const auto* from = static_cast<const uint8_t*>(operand.data) + row + begin * stride;
    for (int64_t k = 0; k < whole; k += kBytes) {
        for (int64_t i = 0; i < rows; i += kBytes) turn(from + k * stride + i, stride, raw + i * pitch + k, pitch);
    }
    for (int64_t i = 0; i < rows; ++i)
        gather(from + whole * stride + i, stride, raw + i * pitch + whole, count - whole);
}

void Loader::decode_f32(int64_t row, const uint8_t* codes, int64_t begin, int64_t length, float* out) const {
    const Operand& x = operand;
    if (!folded()) {
        return kernels.decode_f32(*x.table, codes, out, length, static_cast<float>(zero_at(x, row, begin)), 1.0f);
    }
    const int64_t first = x.block_cols - begin % x.block_cols, end = begin + length;
    row_scales(x, row, begin, end, levels);
    if (x.zero_point == nullptr) {
        kernels.decode_f32(*x.table, codes, out, length, 0.0f, 1.0f);
        return kernels.scale_blocks(out, length, first, x.block_cols, levels);
    }
    const float* scale = levels;
    for (int64_t k = begin, next = begin + first; k < end; k = next, next += x.block_cols, ++scale) {
        next = std::min(next, end);
        const auto zero = static_cast<float>(zero_at(x, row, k));
        kernels.decode_f32(*x.table, codes + (k - begin), out + (k - begin), next - k, zero, *scale);
    }
}

// The global scale, if there is one, is left to the epilogue: with it, products would not be bf16 numbers.
void Loader::fold_bf16(int64_t row, int64_t begin, int64_t length, uint16_t* out) const {
    Operand inner = operand;
    inner.global_scale = nullptr;
    row_scales(inner, row, begin, begin + length, levels);
    const int64_t first = inner.block_cols - begin % inner.block_cols;
    kernels.scale_bf16_blocks(out, length, first, inner.block_cols, levels);
}

void Loader::decode_s8u8(int64_t row, const uint8_t* codes, const Segment& s, uint8_t* out) const {
    const ByteForm form = byte_form(operand, is_a, zero_at(operand, row, s.begin));
    if (form.flip == 0 && form.shift == 0) {
        std::memcpy(out, codes, static_cast<size_t>(s.length));
    } else {
        kernels.decode_bytes(codes, out, s.length, form.flip, form.shift);
    }
}

void Loader::decode(int64_t row, const void* stored, int64_t begin, const Segment& s, uint32_t* out) const {
    const Operand& x = operand;
    const auto* codes = static_cast<const uint8_t*>(stored) + (s.begin - begin);
    const int zero = plan.kind == Kind::f32 ? 0 : zero_at(x, row, s.begin);
    switch (plan.kind) {
        case Kind::f32:
            if (x.has_codes()) return decode_f32(row, codes, s.begin, s.length, reinterpret_cast<float*>(out));
            return kernels.widen(stored, x.dtype, reinterpret_cast<float*>(out), s.length);
        case Kind::bf16:
            if (x.has_codes()) {
                kernels.decode_bf16(*x.table, codes, reinterpret_cast<uint16_t*>(out), s.length, zero);
                if (folded()) fold_bf16(row, s.begin, s.length, reinterpret_cast<uint16_t*>(out));
            } else {
                const auto* halves = static_cast<const uint16_t*>(stored) + (s.begin - begin);
                std::memcpy(out, halves, static_cast<size_t>(s.length) * 2);
            }
            break;
        case Kind::s16: {
            const int half = x.table->is_signed ? 1 << (x.table->bits - 1) : 0;
            kernels.decode_s16(codes, reinterpret_cast<int16_t*>(out), s.length, half, zero);
            break;
        }
        case Kind::s8u8:
            decode_s8u8(row, codes, s, reinterpret_cast<uint8_t*>(out));
            break;
    }
    const int64_t bytes = s.length * 4 / elements_per_dword(plan.kind);
    std::memset(reinterpret_cast<uint8_t*>(out) + bytes, 0, static_cast<size_t>(s.dwords * 4 - bytes));
}

void Loader::load(int64_t row, int64_t count, const Segment* segments, int num_segments, uint32_t* out,
                  const Sums& sums) const {
    const Segment& last = segments[num_segments - 1];
    const int64_t begin = segments[0].begin, end = last.begin + last.length;
    // Without zero points and padding between segments, one pass decodes them all.
    const bool dense =
        operand.zero_point == nullptr && last.begin - begin == last.dword * elements_per_dword(plan.kind);
    const Segment all{begin, end - begin, 0, last.dword + last.dwords};
    const bool transposed =
        operand.has_codes() && operand.table->bits == 8 && operand.row_stride == 1 && operand.col_stride != 1;
    // More rows than are asked for, if there are more.
    const int64_t up = ceil_div(count, kBytes) * kBytes, turnable = row + up <= operand.rows ? up : up - kBytes;
    const int64_t turned = transposed ? turnable : 0;
    for (int64_t r = 0; r < count; ++r, out += kTileStride) {
        const void* stored = nullptr;
        if (r < turned) {
            if (r % kTransposed == 0) fetch_transposed(row + r, std::min(kTransposed, turned - r), begin, end);
            stored = raw + r % kTransposed * transposed_pitch(end - begin);
        } else {
            stored = fetch(row + r, begin, end);
        }
        if (dense) {
            decode(row + r, stored, begin, all, out);
        } else {
            for (int i = 0; i < num_segments; ++i) {
                decode(row + r, stored, begin, segments[i], out + segments[i].dword);
            }
        }
        if (sums.zero != nullptr || sums.sum != nullptr) sum_segments(row + r, segments, num_segments, out, sums, r);
    }
    if (sums.scale != nullptr) scale_segments(row, count, segments, num_segments, sums.scale, sums.stride);
}

void Loader::scale_segments(int64_t row, int64_t count, const Segment* segments, int num_segments, float* out,
                            int64_t stride) const {
    const int64_t cols = operand.block_cols, first = segments[0].begin / cols;
    const int64_t blocks = (segments[num_segments - 1].begin) / cols - first + 1;
    const Operand& x = operand;
    // One fp32 for each row and segment, which few rows of a would else wait for.
    if (x.has_codes() && blocks == num_segments && x.scale_format == kScaleFp32 && x.global_scale == nullptr &&
        x.block_rows == 1) {
        if (x.is_packed()) {
            const float* scale = static_cast<const float*>(x.scale) + scale_index(x, row, first);
            for (int64_t i = 0; i < blocks; ++i) std::copy_n(scale + i * kPanelRows, count, out + i * stride);
            return;
        }
        const int64_t pitch = x.scale_row_stride, step = x.scale_col_stride;
        const float* scale = static_cast<const float*>(x.scale) + row * pitch + first * step;
        for (int64_t r = 0; r < count; ++r) __builtin_prefetch(scale + (count + r) * pitch);  // the next panel's
        const int64_t past = ceil_div(blocks, 16) * 16 - blocks;  // what the transposition reads past the last row's
        if (count == kernels.nr && count == stride && step == 1 && past <= (x.rows - row - count) * pitch) {
            return kernels.transpose(reinterpret_cast<const uint32_t*>(scale), pitch, reinterpret_cast<uint32_t*>(out),
                                     blocks);
        }
        for (int64_t r = 0; r < count; ++r) {
            for (int64_t i = 0; i < blocks; ++i) out[i * stride + r] = scale[r * pitch + i * step];
        }
        return;
    }
    for (int64_t r = 0; r < count; ++r) {
        levels[0] = 1.0f;
        if (x.has_codes()) block_scales(x, row + r, first, blocks, levels);
        int64_t block = 0, end = (first + 1) * cols;
        for (int i = 0; i < num_segments; ++i) {
            if (x.has_codes() && segments[i].begin == end) {  // a block never ends within a segment
                ++block;
                end += cols;
            }
            out[i * stride + r] = levels[block];
        }
    }
}

void Loader::sum_segments(int64_t row, const Segment* segments, int num_segments, const uint32_t* data,
                          const Sums& sums, int64_t at) const {
    for (int i = 0; i < num_segments; ++i) {
        const Segment& s = segments[i];
        const int64_t to = i * sums.stride + at;
        if (plan.kind == Kind::s16) {  // less their zero points already
            const auto* words = reinterpret_cast<const int16_t*>(data + s.dword);
            sums.sum[to] = std::accumulate(words, words + s.length, int32_t{0}) * sums.factor;
            continue;
        }
        const auto* bytes = reinterpret_cast<const uint8_t*>(data + s.dword);
        const int zero = byte_form(operand, is_a, zero_at(operand, row, s.begin)).zero;
        if (sums.zero != nullptr) sums.zero[to] = zero;
        if (sums.sum != nullptr) {
            sums.sum[to] = (kernels.sum_bytes(bytes, s.length) - static_cast<int32_t>(s.length) * zero) * sums.factor;
        }
    }
}

}  // namespace lowbit::cpu::mm
