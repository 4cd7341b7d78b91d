// A product whose left operand is quantized on the way: x [M, K] to codes, then codes @ b^T.
#pragma once

#include "cpu/codec/codec.h"
#include "cpu/matmul/matmul.h"

namespace lowbit::cpu {

// What becomes mm::Problem::a: scales are made of x where `given.scale` is null.
struct Input {
    Values x;
    Shape shape;
    SchemeParams scheme;
    Scales given{};
};

// What becomes of the result in fp32: codes, by scales that are given. No global scale.
struct Output {
    SchemeParams scheme;
    Scales scales;
    uint8_t* codes;
};

// Codes [rows, packed columns] with their scales, contiguous, as an operand.
mm::Operand operand_of(const SchemeParams& scheme, Shape shape, const uint8_t* codes, const Scales& scales);

// The bits of quantize() and multiply() one after the other, and with `output` of quantize_static() after them; then
// `problem.out` is not used. `problem` lacks its `a` where there is an `input`. The result is made and read some rows
// at a time.
void linear(const Input* input, mm::Problem problem, const Output* output);

}  // namespace lowbit::cpu
