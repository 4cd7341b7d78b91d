// A product whose left operand is quantized on the way: x [M, K] to codes, then codes @ b^T.
#pragma once

#include "cpu/codec.h"
#include "cpu/mm.h"

namespace lowbit::cpu {

// What becomes mm::Problem::a.
struct Input {
    Values x;
    Shape shape;
    SchemeParams scheme;
};

// The bits of quantize() and multiply() one after the other. `problem` lacks its `a`.
void linear(const Input& input, mm::Problem problem);

}  // namespace lowbit::cpu
