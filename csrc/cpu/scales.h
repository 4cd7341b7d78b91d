// The scale of one block: from its statistics, to and from its stored form (docs/numerics.md section 5).
#pragma once

#include <cstdint>

#include "cpu/codec.h"

namespace lowbit::cpu {

// What the elements of a block are divided by and multiplied with.
struct BlockScale {
    float divisor;
    float scale;
    float zero;
    bool broken;  // Inf or NaN within: codes are canonical
};

// fp32 numbers that a scheme's scales are computed with, once a call.
struct ScaleRule {
    explicit ScaleRule(const SchemeParams& scheme);
    SchemeParams scheme;
    float divisor;  // amax (affine: range) over this
};

// Computes scale (and zero point) number `index` from the block's largest positive and negative magnitudes (fp32 bits;
// without a zero point `high` is the amax), and stores them unless the pointers are null.
BlockScale make_scale(const ScaleRule& rule, uint32_t high, uint32_t low, int64_t index, const NewScales& out);

// Scale (and zero point) number `index`, as stored.
BlockScale load_scale(const SchemeParams& scheme, int64_t index, const Scales& from);

float make_outer_scale(uint32_t finite_amax, const SchemeParams& scheme);

}  // namespace lowbit::cpu
