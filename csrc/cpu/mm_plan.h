// Which arithmetic a product is done in.
#pragma once

#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A stretch of K over which neither operand's scale changes, within a chunk; padded to whole dwords.
struct Segment {
    int64_t begin;   // in elements, from the start of K
    int64_t length;  // in elements
    int64_t dword;   // in the chunk's rows
    int64_t dwords;
};

struct Plan {
    Kind kind;
    bool scaled;    // scales change along K: every segment's sum is scaled and added in fp32
    bool a_folded;  // scales that change along K are multiplied in when decoding: in fp32 any, in bf16 exact ones
    bool b_folded;
    bool wide;        // int32 sums go to int64 before they could overflow
    int64_t a_block;  // K elements of a block that ends segments; 0: none
    int64_t b_block;
    bool matrix;   // matrix registers
    int64_t unit;  // dwords that a segment is padded to a multiple of
};

// int32 holds this many products of two integers of at most 8 bits less their zero points (255 * 255 each).
constexpr int64_t kExactTerms = 32768;

Plan make_plan(const Problem& problem, const Kernels& kernels);

// Cuts the chunk of K that starts at `begin` into segments, at most kTileDepth of them; returns how many.
int cut_chunk(const Plan& plan, int64_t begin, int64_t depth, Segment* segments);

}  // namespace lowbit::cpu::mm
