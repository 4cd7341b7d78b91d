// GEMV and skinny GEMM: products with few rows of a (the decode phase of language models), which read every code of b
// once for little arithmetic: rows of b are multiplied as they are stored, so that nothing but their codes comes from
// memory.
//
// Lanes are elements along K, decoded in registers for up to eight rows of a at a time. Sums over lanes come last: of
// integers exact, in every block of K by itself.
//
// A step is one register of a row's codes, or a part of one. A unit turns it into vectors, in whose lanes the codes
// stand `vectors` apart; a's rows are put into that order once a call. Lane l of every vector of a step then holds
// codes of the same stretch, [l, l + 1) * elements / width, so that a lane has one scale also where blocks are shorter
// than a step.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/isa.h"
#include "cpu/matmul/matmul.h"

namespace lowbit::cpu::mm {

constexpr int64_t kGemvRows = 16;   // of a, at most; measured: docs/measured.md
constexpr int kGemvTile = 8;        // rows of a that are multiplied at a time, at most
constexpr int kGemvStepBytes = 64;  // of a step, at most, and of a vector

// A tile of a's rows against rows of b, over some steps.
struct Gemv {
    const Table* table = nullptr;
    int64_t count = 0;           // rows of b
    const uint8_t* b = nullptr;  // codes of the first step; bytes from row to row:
    int64_t pitch = 0;
    const uint8_t* ahead = nullptr;  // what is fetched for later meanwhile, as many bytes
    int64_t ahead_pitch = 0;
    const uint8_t* a = nullptr;  // [steps, vectors of a step, rows] vectors
    int64_t steps = 0;
    // Blocks of b's scales, from `block` on: one every `block_steps` steps, or `per_step` > 1 in each step (then
    // block_steps is 1); per_step 0: one for all. Lane l of a step belongs to its block lanes[l].
    int64_t block = 0, block_steps = 1, per_step = 0;
    const int32_t* lanes = nullptr;
    const float* const* scales = nullptr;
    const int32_t* const* zeros = nullptr;  // what is taken off decoded codes
    void* sums = nullptr;                   // vectors, fp32 or int32, which are added to; bytes from row to row of b:
    int64_t sums_pitch = 0;
    int64_t totals_pitch =
        0;                 // integers in blocks, which leave a vector for each block or step: bytes between rows of a
    bool* nans = nullptr;  // of units with `halves`: whether a row of b holds a NaN that fp16 does not show
};

// Vectors of sums of integers in some blocks, to sums over lanes, less those of a times b's zero points, which are
// scaled and added in the order of K (docs/numerics.md section 9). Vector i of a row holds the blocks from i * per_step
// on, each in so many lanes.
struct GemvBlockSums {
    const int32_t* totals = nullptr;  // [count, rows, vectors] vectors; count is at most their lanes, but all are there
    int64_t count = 0, rows = 0, vectors = 0, per_step = 1;
    int64_t begin = 0, end = 0;              // blocks
    const float* const* a_scales = nullptr;  // [rows], and of the blocks of each
    const float* const* b_scales = nullptr;  // [count], the same, which may be read a vector beyond `end`
    const int32_t* const* a_sums = nullptr;  // [rows], and of the blocks of each
    const int32_t* const* zeros = nullptr;   // as b_scales
    float* scales = nullptr;                 // [2, end - begin, padded to vectors] vectors, to work in
    float* out = nullptr;                    // [rows, pitch]: stored from block 0 on, else added to
    int64_t pitch = 0;
};

// What a unit multiplies with.
enum class GemvInput : int { f32, bf16, s16, s8 };

// What has a scale of its own: some steps or all, each step, or some lanes of each step.
enum class GemvBlocks : int { steps, step, lanes };

struct GemvUnit {
    int64_t elements = 0;  // of a step; 0: this instruction set has no such unit
    int64_t bytes = 0;
    int vectors = 0;
    GemvInput input = GemvInput::f32;
    bool fp16 = false;              // codes come out as fp16 numbers, to be multiplied by Table::half_unit
    bool as_signed = false;         // unsigned integers come out less 128
    int64_t most_rows = kGemvRows;  // of a, beyond which register tiles are faster
    using Run = void (*)(const Gemv&);
    // By GemvBlocks. Floats: without and with zero points. Integers, of codes without zero points: one block; and
    // blocks, each of which leaves its own vector of sums.
    Run dots[3][2][kGemvTile] = {};
    // One row of a as the unit multiplies it: vector v of a step, `pitch` bytes from the next, holds the elements
    // congruent to v modulo `vectors`.
    void (*arrange)(const void* x, int64_t steps, int64_t step_pitch, int64_t pitch, uint8_t* out) = nullptr;
};

// The units of an instruction set, by what they decode.
struct GemvKernels {
    int width = 0;                         // lanes of a vector
    int tile = 0;                          // rows of a at a time
    GemvUnit codes4, bytes, fp16, codes6;  // to fp32: 4 bits, 8-bit integers, 8-bit floats by way of fp16, 6 bits
    GemvUnit bf16_codes4, bf16_codes8, bf16_codes6;  // to bf16: 4 bits, 8-bit floats, 6 bits
    GemvUnit int8, int4;                             // by int8
    // One number a vector: its lanes' sum.
    void (*sum_floats)(const float* vectors, int64_t count, float* sums) = nullptr;
    void (*sum_integers)(const int32_t* vectors, int64_t count, int64_t* sums) = nullptr;
    void (*sum_blocks)(const GemvBlockSums& sums) = nullptr;
    void (*byte_scales)(const uint8_t* codes, bool e8m0, int64_t count, float* out) = nullptr;
};

#define LOWBIT_FEW(name, ...) const GemvKernels& gemv_##name();
LOWBIT_ISAS(LOWBIT_FEW)
#undef LOWBIT_FEW

// What more processors have, as in gemm_kernels.h.
void add_gemv_avx512vnni(GemvKernels& kernels);
void add_gemv_avx512vbmibf16(GemvKernels& kernels);

// The product, if it is one for this path; else false, and nothing is done.
bool multiply_gemv(const Problem& problem);

}  // namespace lowbit::cpu::mm
