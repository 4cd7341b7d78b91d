// Which arithmetic a product is done in.
#pragma once

#include "cpu/matmul/gemm_kernels.h"

namespace lowbit::cpu::mm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements of K over which neither operand's scale changes, within a chunk; padded to whole dwords. Those of integers
// are the segments of docs/numerics.md section 9, whatever the instruction set.
struct Segment {
    int64_t begin;   // in elements, from the start of K
    int64_t length;  // in elements
    int64_t dword;   // in the chunk's rows
    int64_t dwords;
};

struct Plan {
    Kind kind;
    const PackedTile* packed;  // what reads b's codes as they are packed; null: none
    bool scaled;               // scales change along K: every segment's sum is scaled and added in fp32
    bool a_folded;  // scales that change along K are multiplied in when decoding: in fp32 any, in bf16 exact ones
    bool b_folded;
    bool wide;        // int32 sums go to int64 before they could overflow
    int64_t a_block;  // K elements of a block that ends segments; 0: none
    int64_t b_block;
    int64_t most;  // K elements of a segment
    bool matrix;   // matrix registers
    int64_t unit;  // dwords that a segment is padded to a multiple of
};

// int32 holds this many products of two integers of at most 8 bits less their zero points (255 * 255 each).
constexpr int64_t kExactTerms = 32768;

// Elements of a segment of integers, at most: a chunk holds them in every kind, and int32 their sum.
constexpr int64_t kIntegerSegment = 512;
static_assert(kIntegerSegment <= kTileDepth * 2 && kIntegerSegment <= kExactTerms, "a segment fits a chunk and int32");
// Integers in shorter blocks are multiplied as floats, their scales multiplied in.
constexpr int64_t kMinIntegerBlock = 8;

// Whether a product is one of integers in exact segments or with one scale a row.
bool is_integer_product(const Problem& problem);

Plan make_plan(const Problem& problem, const Kernels& kernels);

// Cuts the chunk of K that starts at `begin` into segments, at most kTileDepth of them; returns how many.
int cut_chunk(const Plan& plan, int64_t begin, int64_t depth, Segment* segments);

}  // namespace lowbit::cpu::mm
