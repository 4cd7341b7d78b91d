// rms_norm, swiglu and rotary: docs/numerics.md section 15.
#pragma once

#include <cstdint>

#include "common/fused.h"
#include "cpu/codec/codec.h"

namespace lowbit::cpu {

// The weight of a norm: as many numbers as x has columns; factors are those plus `offset`, 0 or 1.
struct NormWeight {
    const void* data;
    Dtype dtype;
    int64_t offset;
};

// x over its root mean square, times the factors; rstd[r] becomes the reciprocal of that of row r.
void rms_norm(const Values& x, Shape shape, const NormWeight& weight, float eps, const Results& out, float* rstd);
// The gradients of x and, unless null, of the weight, in its dtype.
void rms_norm_backward(const Values& grad, const Values& x, Shape shape, const NormWeight& weight, const float* rstd,
                       const Results& grad_x, void* grad_weight);

void swiglu(Activation activation, const Values& gate, const Values& up, Shape shape, const Results& out);
void swiglu_backward(Activation activation, const Values& grad, const Values& gate, const Values& up, Shape shape,
                     const Results& grad_gate, const Results& grad_up);

// Numbers with three axes of any strides before the last, whose stride is 1.
struct Lines {
    const void* data;
    Dtype dtype;
    int64_t strides[3];
};
// Rotates the pairs of each row; `out` is contiguous, in the dtype of x. `sizes`: of the three axes.
void rotary(const Lines& x, const Lines& cos, const Lines& sin, const int64_t (&sizes)[3], int64_t cols, int64_t pairs,
            bool interleaved, void* out);

}  // namespace lowbit::cpu
