// Where a number lies in a codebook: what vector code looks it up in. Sections 4 and 7 of docs/numerics.md.
#pragma once

#include <cstdint>
#include <vector>

#include "common/params.h"

namespace lowbit {
struct FormatRow;  // format_table.h
}

namespace lowbit::cpu {

// The place of v is how many cuts lie below it. To nearest, cuts are the thresholds. Stochastic: of each entry but the
// first the number just below, so that the place is that of the largest entry at or below v.
//
// Where there are many, magnitudes are cut into cells of 2^shift fp32 patterns, from `least` to `most`, such that a
// cell holds one cut at most, and no number below `least` or above `most` is on another side of a cut. A cell is one
// word: with `low` the number's place in its cell, (cell + low) >> shift is its place in the book; of the cells of
// negative numbers, which follow the `side` of the others, (cell - low) >> shift.
struct BookIndex {
    const FormatRow* row;
    std::vector<uint32_t> cuts;     // fp32 bits, ascending numbers
    std::vector<uint32_t> cells;    // empty of few(), and where one would hold several cuts however small it is
    std::vector<uint64_t> entries;  // fp32 bits: the low half is a value, the high half its weight
    int shift = 0;
    uint32_t least = 0, most = 0, side = 0;

    // Whether 16 entries at most, which a vector or two hold.
    bool few() const { return cuts.size() < 16; }
};

// Made once for each codebook of the table and each rounding. Throws std::invalid_argument for other formats.
const BookIndex& book_index(const FormatParams& format, bool stochastic);

}  // namespace lowbit::cpu
