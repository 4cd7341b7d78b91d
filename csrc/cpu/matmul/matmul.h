// Matrix product of quantized or float operands on the CPU: out[M, N] = a[M, K] @ b[N, K]^T (+ bias).
//
// matmul.cpp chooses: with up to 16 rows of a the GEMV kernels (gemv.h), else the GEMM ones. Of those, one file each:
// gemm_table (values of codes), plan (which arithmetic), patches (rows of a that are an image's), gemm_cuts (which
// tiles), load (codes or floats to rows of dwords), panel (the same to panels of b), packed (weights in the packed
// layout), gemm_body.inl, gemm_convert.inl and gemm_panel_avx512.inl (micro-kernels, decoders and epilogue, per
// instruction set), gemm_tiles (loops, threads; its memory in gemm_memory). What an instruction set provides is
// gemm_kernels.h. Numerics: docs/numerics.md section 9. Nothing here knows of torch.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "cpu/matmul/patches.h"

namespace lowbit::cpu::mm {

// What the elements of an operand or of the output are stored as.
enum class Element : int { f32 = 0, bf16 = 1, f16 = 2, codes = 3 };

// The values of a format's codes, in the shapes that decoders look them up in.
struct Table {
    int bits = 8;
    bool integer = false;
    bool is_signed = true;
    bool exact_bf16 = true;  // every value is a bf16 number, so that bf16 products are exact in fp32
    bool short_bf16 = true;  // at most 4 significant bits, so that a product with an e4m3 scale is a bf16 number too
    bool moderate = true;    // every value but 0 lies in 2^-20 .. 2^40, so that moderate power-of-two scales are exact
    // Floats whose code, shifted right arithmetically from the top of a word, is an fp16 number 1 / half_unit times
    // as large. -1: not of this format. half_nan: a code without sign that means NaN, but not in fp16; 0: none.
    int half_shift = -1;
    float half_unit = 1;
    uint8_t half_nan = 0;
    alignas(64) float f32[256];
    // Low and high bytes of the bf16 values of codes 0..127; an 8-bit float format is symmetric in its top bit.
    alignas(64) uint8_t low[128];
    alignas(64) uint8_t high[128];
};

// Rows of a panel of packed codes (cpu/matmul/packed.h).
constexpr int64_t kPanelRows = 32;

// One operand as the op received it: floats, or codes with scales.
struct Operand {
    const void* data = nullptr;
    Element dtype = Element::codes;
    int64_t rows = 0;
    int64_t row_stride = 0;  // in elements; bytes for codes. Packed rows (fewer than 8 bits) have unit column stride
    int64_t col_stride = 1;
    const Patches* patches = nullptr;  // of a: what its rows are, instead of data and strides; codes of 8 bits
    const Table* table = nullptr;      // codes only, as is all that follows
    // Above 0: b is in the packed layout (cpu/matmul/packed.h), panels of so many bytes; no strides then.
    int64_t panel_bytes = 0;
    int64_t block_rows = 1;
    int64_t block_cols = 1;
    const void* scale = nullptr;  // [ceil(rows / block_rows), ceil(K / block_cols)]
    int scale_format = 0;         // the id of lowbit.scaling.SCALE_FORMATS
    int64_t scale_row_stride = 0;
    int64_t scale_col_stride = 0;
    const uint8_t* zero_point = nullptr;  // int8 or uint8 as the format is signed or not; null: none
    int64_t zero_row_stride = 0;
    int64_t zero_col_stride = 0;
    const float* global_scale = nullptr;  // the global scale, or one a row; null: none
    int64_t global_scale_row_stride = 0;  // 0: one for all rows

    bool has_codes() const { return dtype == Element::codes; }
    bool is_packed() const { return panel_bytes > 0; }
};

struct Problem {
    Operand a, b;
    int64_t depth = 0;           // K
    const void* bias = nullptr;  // [N]
    Element bias_dtype = Element::f32;
    int64_t bias_stride = 1;
    void* out = nullptr;  // [M, N]
    Element out_dtype = Element::f32;
    int64_t out_stride = 0;  // elements from row to row; 0: N
};

// The table of a format. It lives as long as the process.
const Table& table_of(const FormatParams& format);

// The product, on the instruction set in use, with the same bits for any number of threads.
void multiply(const Problem& problem);

}  // namespace lowbit::cpu::mm
