// A step of AdamW on a matrix whose moments are codes with scales.
#pragma once

#include "common/adamw.h"
#include "cpu/runs.h"

namespace lowbit::cpu {

// A moment as it comes and as it goes; both may be the same memory. Blocks are of one row, kMaxMomentBlock columns at
// most, without zero points or global scale.
struct Moment {
    const SchemeParams& scheme;
    const uint8_t* codes;
    const void* scale;
    uint8_t* new_codes;
    void* new_scale;
};
constexpr int64_t kMaxMomentBlock = kRun;

// `rms` is the root of the second moment. param and new_param may be the same memory.
void adamw(const Values& param, const Values& grad, Shape shape, const Moment& avg, const Moment& rms,
           const AdamWFactors& factors, Rounding rounding, const Rng& rng, const Results& new_param);

}  // namespace lowbit::cpu
