// What one instruction set offers to the matrix product: a table of plain functions.
//
// Everything is a GEMM of dwords. A dword of a panel holds one fp32, two bf16, two int16 or four bytes along K, and a
// register tile multiplies dwords of a's rows, broadcast, with dwords of b's columns. So the loops, the transposition
// and the tile are written once, and a kind of arithmetic is one function `dot`.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/matmul/matmul.h"

namespace lowbit::cpu::mm {

// f32: anything. bf16: formats exact in bf16, and bf16 activations. s16: integers less their zero points.
// s8u8: integers for vpdpbusd, a as signed bytes (the operand that may be a dword of memory) and b as unsigned ones,
// with corrections for the offsets.
enum class Kind : int { f32 = 0, bf16 = 1, s16 = 2, s8u8 = 3 };
constexpr int kNumKinds = 4;

constexpr int64_t elements_per_dword(Kind kind) { return kind == Kind::f32 ? 1 : kind == Kind::s8u8 ? 4 : 2; }

// Depth, in dwords, of what is decoded at a time. Half of it, whose panels of b would fit the first-level cache beside
// a's rows, was measured to be slower: sums are loaded and stored twice as often.
constexpr int64_t kTileDepth = 256;
// Dwords from one row of a to the next where they lie row by row: not a multiple of 4 KiB.
constexpr int64_t kTileStride = kTileDepth + 16;
// Decoders may write this many bytes past the end of what they were asked for.
constexpr int64_t kSlack = 64;
// Transposes turn 16 dwords of depth at a time: the last ones of a segment may lie past its end, but not the panel's.
static_assert(kTileDepth % 16 == 0, "a panel holds whole steps of transposes");

// Steps of a tile from one line that it fetches for later to the next.
constexpr int64_t kAheadSteps = 4;
// Bytes that streams from memory are fetched ahead.
constexpr int64_t kStreamAhead = 4096;
constexpr int64_t kPanelAhead = 16384;  // about a chunk of a panel

// Rows of a tile, at most, that multiply faster than memory gives them panels.
constexpr int kStreamedRows = 8;

// One register tile: c[rows, nr] += a[rows, depth] . b[depth, nr] over one K segment.
// s8u8: the segment's sum is start[r] + acc - a_zero[r] * b_sum[n] - a_sum[r] * b_zero[n], where a_sum has
// length * a_zero taken off already; start is -a_sum * b_zero where all columns have the same b_zero.
// Scaled: c (fp32) += fp32(fp32(sum) * fp32(a_scale[r] * b_scale[n])), from 0; else c (fp32 or int32) += sum.
struct Tile {
    const uint32_t* a = nullptr;  // [depth, rows]; of matrix registers [rows, kTileStride]
    const uint32_t* b = nullptr;  // [depth, nr]
    int64_t depth = 0;
    void* c = nullptr;
    int64_t c_stride = 0;
    bool fresh = false;                     // c holds nothing yet: it is stored, not added to
    const uint8_t* const* ahead = nullptr;  // [depth / kAheadSteps] lines to fetch meanwhile, for later
    bool streamed = false;                  // b comes from memory: what follows it is fetched instead, for few rows
    const float* a_scale = nullptr;
    const float* b_scale = nullptr;
    const int32_t* start = nullptr;   // null: zeros
    const int32_t* b_zero = nullptr;  // null: in `start`
    const int32_t* b_sum = nullptr;
    const int32_t* a_zero = nullptr;  // null: all zero
    const int32_t* a_sum = nullptr;
};

constexpr int kMaxNr = 32;

// A panel [length / elements per dword, nr] from rows of 8- or 4-bit codes, or 6-bit ones, each in a byte. What they
// decode to: f32: (value - zero) * scale; bf16: value; s8u8: (code ^ flip) - less, as bytes.
struct Panel {
    const Table* table = nullptr;
    const uint8_t* rows[kMaxNr];
    int64_t length = 0;             // elements, a multiple of kPanelBytes bytes
    const float* scales = nullptr;  // [blocks, nr]; null: 1
    const float* zeros = nullptr;   // [blocks, nr]; null: 0
    int64_t first = 0;              // element k is of block (first + k) >> shift
    int shift = 0;
    uint8_t flip = 0, less = 0;
    uint32_t* out = nullptr;
};
constexpr int64_t kPanelBytes = 64;
constexpr int kPanelStep = 16;  // blocks of scales are multiples of it, and begin at them

// One row of the output: out[n] = cast(fp32(sum[n]) * (a_scale * b_scale[n]) + bias[n]).
struct Row {
    const void* sum = nullptr;  // fp32, int32 or int64
    int sum_kind = 0;           // 0, 1, 2
    bool scaled = false;        // false: no multiplication
    float a_scale = 1;
    const float* b_scale = nullptr;
    const float* bias = nullptr;  // null: none
    void* out = nullptr;
    Element out_dtype = Element::f32;
    int64_t cols = 0;
    bool stream = false;  // past the caches
};

// Some rows of the output.
struct Rows {
    Row row;  // the first one; its a_scale is not used
    int64_t count = 0;
    int64_t sum_stride = 0, out_stride = 0;  // in bytes
    const float* a_scales = nullptr;         // null: 1
};

// Sums of one kind of arithmetic: a register tile of `rows` rows.
using Multiply = void (*)(bool scaled, int rows, const Tile& tile);

// A register tile that reads b's codes as they are packed (packed.h). Sums are corrected as those of s8u8, whatever
// a's kind is; a has no zero point to be corrected for.
struct PackedTile {
    Multiply run = nullptr;  // null: there is none
    Kind kind = Kind::s16;   // of a's dwords
    int rows = 0;            // of a tile, at most
    int64_t limit = 0;       // rows of a up to which nothing is faster
};

// Few rows of a by a panel of b as it is stored (few.h): `rows` of them, at most kFewTile.
struct Few;
using RunFew = void (*)(bool scaled, int rows, const Few& few);
constexpr int64_t kFewTile = 4;
// Rows of a beyond which tiles are faster: with one segment of K, and with more.
constexpr int64_t kFewRows = 8, kFewScaledRows = 16;

// Sums of a convolution whose groups have one channel: sums[p][c] = start[c] + the sum over taps of pixels[p][t][c] *
// weights[t][c], channels side by side in vectors. What is read and written past the last channel, up to
// kMaxLanes channels more, is memory that is there. Elements of pixels: bytes, or for floats fp32.
struct Depthwise {
    const uint8_t* const* pixels = nullptr;  // [count, taps]
    int64_t count = 0, taps = 0, channels = 0;
    const void* weights = nullptr;  // [taps, stride]: int32, or fp32
    const int32_t* start = nullptr;
    void* sums = nullptr;  // [count, stride]: int32, or fp32
    int64_t stride = 0;    // a multiple of kMaxLanes
};
constexpr int64_t kMaxLanes = 16;

struct Kernels {
    int nr = 0;                // columns of a tile
    int max_rows = 0;          // rows of a tile, at most
    Kind integer = Kind::s16;  // how integers are multiplied: s16 or s8u8
    // By Kind; null where the instruction set has none. f32 and `integer` are always there.
    Multiply tile[kNumKinds] = {};
    PackedTile packed8, packed4;
    RunFew few8 = nullptr, few4 = nullptr;  // of codes of 8 and of 4 bits; null: there is none
    // Multiplies and adds in registers alone, for benchmarks: how many operations that were.
    int64_t (*spin[kNumKinds])(int64_t steps) = {};
    int32_t (*read_lines)(const void* data, int64_t lines) = nullptr;  // of 256 bytes
    // Codes of `bits` bits to one a byte.
    void (*unpack)(const uint8_t* packed, uint8_t* codes, int64_t count, int bits) = nullptr;
    // fp32((value - zero) * scale).
    void (*decode_f32)(const Table& table, const uint8_t* codes, float* out, int64_t count, float zero,
                       float scale) = nullptr;
    // values[i] *= scales[block of i], blocks of `block` elements, the first of them `first` long.
    void (*scale_blocks)(float* values, int64_t count, int64_t first, int64_t block, const float* scales) = nullptr;
    // The same for bf16 values whose products are bf16 numbers. Null without Kind::bf16.
    void (*scale_bf16_blocks)(uint16_t* values, int64_t count, int64_t first, int64_t block,
                              const float* scales) = nullptr;
    // The bf16 of value - zero; exact. Null without Kind::bf16.
    void (*decode_bf16)(const Table& table, const uint8_t* codes, uint16_t* out, int64_t count, int zero) = nullptr;
    // (code ^ flip) + shift, modulo 256.
    void (*decode_bytes)(const uint8_t* codes, uint8_t* out, int64_t count, uint8_t flip, uint8_t shift) = nullptr;
    // ((code ^ half) - half) - zero.
    void (*decode_s16)(const uint8_t* codes, int16_t* out, int64_t count, int half, int zero) = nullptr;
    void (*widen)(const void* values, Element dtype, float* out, int64_t count) = nullptr;
    // rows[count, kTileStride] to out[depth, count], count <= max_rows; may write to the end of out[kTileStride,
    // count].
    void (*pack)(const uint32_t* rows, int64_t count, int64_t depth, uint32_t* out) = nullptr;
    // rows[nr, stride] to panel[depth, nr].
    void (*transpose)(const uint32_t* rows, int64_t stride, uint32_t* panel, int64_t depth) = nullptr;
    // By Kind; null: there is none.
    void (*panel[kNumKinds])(const Panel& panel) = {};
    // Packed dwords of b's codes of `bits` bits (packed.h), [count, kPanelRows], nr columns of them, to those of
    // `integer`: of s16 less zeros[nr], of s8u8 as they are.
    void (*spread)(const uint32_t* packed, int64_t count, int bits, const int32_t* zeros, uint32_t* panel) = nullptr;
    // s8u8: the sum of a row's signed bytes; sums[nr] of a panel's unsigned ones.
    int32_t (*sum_bytes)(const uint8_t* bytes, int64_t count) = nullptr;
    void (*sum_panel)(const uint32_t* panel, int64_t depth, int32_t* sums) = nullptr;
    // Codes that are signed bytes, unsigned ones, and floats.
    void (*depthwise_s8)(const Depthwise& d) = nullptr;
    void (*depthwise_u8)(const Depthwise& d) = nullptr;
    void (*depthwise_f32)(const Depthwise& d) = nullptr;
    void (*finish)(const Row& row) = nullptr;
    void (*finish_rows)(const Rows& rows) = nullptr;
    bool has(Kind kind) const { return tile[static_cast<int>(kind)] != nullptr; }
    // Matrix registers: `tile` of bf16 and s8u8 then has matrix_side or twice as many rows, and segments are padded to
    // matrix_side dwords. A thread calls `enter` before such tiles and `leave` after them.
    int matrix_side = 0;  // 0: there are none
    void (*enter)() = nullptr;
    void (*leave)() = nullptr;
};

// kernels_scalar(), and its like for every other instruction set: from mm_NAME.cpp.
#define LOWBIT_KERNELS(name, ...) const Kernels& kernels_##name();
LOWBIT_ISAS(LOWBIT_KERNELS)
#undef LOWBIT_KERNELS
const Kernels& kernels_in_use();

// Below this many products, threads cost more than they save.
constexpr int64_t kSmallProduct = int64_t{1} << 16;

// What processors with more than the row's features (isa.h) do better: each file mm_avx512ADDED.cpp or mm_neonADDED.cpp
// replaces entries.
void add_avx512vbmi(Kernels& kernels);
void add_avx512vnni(Kernels& kernels);
void add_avx512bf16(Kernels& kernels);
void add_avx512amx(Kernels& kernels);
void add_neondot(Kernels& kernels);
void add_neoni8mm(Kernels& kernels);
void add_neonbf16(Kernels& kernels);
// Asks the operating system, once, to let this process use matrix registers.
bool allow_amx();

}  // namespace lowbit::cpu::mm
