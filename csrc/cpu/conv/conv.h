// Convolutions: products of patches (cpu/matmul/patches.h) with a weight, group by group.
#pragma once

#include "cpu/matmul/linear.h"

namespace lowbit::cpu {

// How x is quantized: `once`, as it lies, by one scale (which may be given) to codes of 8 bits; or each patch by
// itself, in blocks of one row. `are_codes`: x holds the codes already.
struct PixelInput {
    SchemeParams scheme;
    Scales given;
    bool once;
    bool are_codes;
};

// `x` [pixels, channels], contiguous, `window` says of what; null `input`: its floats are multiplied. `problem`: the
// weight [O, depth of a patch] as its `b`, a bias, and the output [rows of the window, O]; `output`: see linear.h.
// The bits are those of `linear` on the patches of each group.
void conv(const Values& x, const mm::Window& window, const PixelInput* input, mm::Problem problem,
          const Output* output);

}  // namespace lowbit::cpu
