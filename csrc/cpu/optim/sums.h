// Sums of squares of the rows or columns of a matrix, as integers.
#pragma once

#include <cstdint>

#include "cpu/codec/codec.h"

namespace lowbit::cpu {

// sums[r] of every row r: its squares in steps of 2^(2 exponents[r] - kSquareBits), docs/numerics.md section 11.
void row_square_sums(const Values& x, Shape shape, const int32_t* exponents, int64_t* sums);
// The same of every column.
void column_square_sums(const Values& x, Shape shape, const int32_t* exponents, int64_t* sums);

}  // namespace lowbit::cpu
