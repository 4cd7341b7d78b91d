// Convolutions whose groups have one channel in and one out: a dot product of taps for each channel, side by side.
#pragma once

#include "cpu/arena.h"
#include "cpu/matmul/gemm_kernels.h"

namespace lowbit::cpu {

// Whether this convolution is one that `Depthwise` serves, x being `problem.a`, with one scale or floats.
bool is_depthwise(const mm::Window& window, const mm::Problem& problem);

// One convolution, of which rows are asked for. The bits of integers are those of mm::multiply, group by group.
class Depthwise {
  public:
    // `patches`: what problem.a is; for floats, pixels are copied to fp32 where they are not.
    Depthwise(const mm::Patches& patches, const mm::Problem& problem);
    // Rows [first, first + count) of the window, contiguous, of all channels.
    void run(int64_t first, int64_t count, void* out, mm::Element dtype) const;

  private:
    void put_weights(const mm::Patches& patches);
    void put_floats(const mm::Patches& patches);

    const mm::Problem& p_;
    const mm::Window& window_;
    const bool integers_;
    int64_t stride_;  // channels, whole vectors
    const uint8_t *pixels_, *padding_;
    uint32_t* weights_ = nullptr;  // [taps, stride]: int32 or fp32
    int32_t* start_ = nullptr;     // [stride]: what x's zero point costs
    float *scales_ = nullptr, *bias_ = nullptr;
};

}  // namespace lowbit::cpu
