// Rows of an operand, from whatever they are stored as to dwords of one kind; and their scales and zero points.
#pragma once

#include "cpu/matmul/plan.h"

namespace lowbit::cpu::mm {

// Rows of a transposed matrix of bytes are fetched as many at a time as a cache line holds.
constexpr int64_t kTransposed = 64;
constexpr int64_t transposed_pitch(int64_t count) { return count + kSlack; }
// Room that a loader needs besides its output: a chunk's codes or strided floats.
constexpr int64_t kRawBytes = kTransposed * transposed_pitch(kTileDepth * 4);

// Blocks of one row within a chunk, at most, and the part that begins before it.
constexpr int64_t kMaxBlocks = kTileDepth * 4 + 16;

// What a loader leaves for each segment, [segments, stride]; null where the product does not need it.
struct Sums {
    float* scale = nullptr;
    int32_t* zero = nullptr;  // s8u8: what to take off the stored bytes
    int32_t* sum = nullptr;   // s8u8: the sum of the stored bytes; of a's less `zero` each, times `factor`
    int32_t factor = 1;
    int64_t stride = 0;
};

// s8u8 keeps a's elements as signed and b's as unsigned bytes: (code ^ flip) + shift, which are `zero` too large. Codes
// of fewer than 8 bits lose their zero point here where what is left fits a byte; others keep it, and the sums are
// corrected for it.
struct ByteForm {
    uint8_t flip, shift;
    int zero;
};
ByteForm byte_form(const Operand& operand, bool is_a, int zero_point);

struct Loader {
    const Operand& operand;
    const Kernels& kernels;
    const Plan& plan;
    bool is_a;
    uint8_t* raw;   // [kRawBytes]
    float* levels;  // [kMaxBlocks]: the scales of one row's blocks

    bool folded() const { return is_a ? plan.a_folded : plan.b_folded; }

    // Rows [row, row + count) of the segments' stretch of K, to out[count, kTileStride].
    void load(int64_t row, int64_t count, const Segment* segments, int num_segments, uint32_t* out,
              const Sums& sums) const;

    // Rows of a transposed matrix of bytes, a multiple of 16, to `raw`, transposed_pitch apart.
    void fetch_transposed(int64_t row, int64_t count, int64_t begin, int64_t end) const;
    // The scales of the segments of rows [row, row + count): out[segment * stride + row].
    void scale_segments(int64_t row, int64_t count, const Segment* segments, int num_segments, float* out,
                        int64_t stride) const;

  private:
    const void* fetch(int64_t row, int64_t begin, int64_t end) const;
    void decode(int64_t row, const void* stored, int64_t begin, const Segment& segment, uint32_t* out) const;
    void decode_f32(int64_t row, const uint8_t* codes, int64_t begin, int64_t length, float* out) const;
    void sum_segments(int64_t row, const Segment* segments, int num_segments, const uint32_t* data, const Sums& sums,
                      int64_t at) const;
    void fold_bf16(int64_t row, int64_t begin, int64_t length, uint16_t* out) const;
    void decode_s8u8(int64_t row, const uint8_t* codes, const Segment& segment, uint8_t* out) const;
};

// The scales of the blocks of `row` from the one that holds element `begin` to that of `end` - 1.
void row_scales(const Operand& operand, int64_t row, int64_t begin, int64_t end, float* out);
// The same for `count` blocks from the one that is numbered `block`.
void block_scales(const Operand& operand, int64_t row, int64_t block, int64_t count, float* out);

// The block that row or column `at` is in. A 64-bit division costs as much as the products of a short row.
static inline int64_t block_at(int64_t at, int64_t block) { return block == 1 ? at : at < block ? 0 : at / block; }

// Where the scale of a block of K of `row` is stored, and as far from the next block's as scale_col_stride says: with
// strides, or in panels (packed.h), where scale_row_stride is the number of blocks and scale_col_stride kPanelRows.
static inline int64_t scale_index(const Operand& x, int64_t row, int64_t block) {
    const int64_t begin = x.is_packed() ? row / kPanelRows * kPanelRows * x.scale_row_stride + row % kPanelRows
                                        : block_at(row, x.block_rows) * x.scale_row_stride;
    return begin + block * x.scale_col_stride;
}

// The scale stored at an index, without the global one.
float stored_scale(const Operand& operand, int64_t index);

// The global scale of `row`, of an operand that has one.
static inline float global_scale_at(const Operand& x, int64_t row) {
    return x.global_scale[row * x.global_scale_row_stride];
}

// The one fp32 scale of element (row, k), 1 for a float matrix; its zero point, 0 where there is none.
float scale_at(const Operand& operand, int64_t row, int64_t k);
int zero_at(const Operand& operand, int64_t row, int64_t k);

// An fp32 of a float array that may be bf16 or fp16.
float float_at(const void* data, Element dtype, int64_t index);

}  // namespace lowbit::cpu::mm
