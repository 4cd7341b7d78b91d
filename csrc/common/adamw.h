// One element of AdamW on moments of which the second is kept as its root: docs/numerics.md section 11.
#pragma once

#include <cmath>

#include "common/numerics.h"

namespace lowbit {

// Factors of lowbit/ops/optim.py, in its order.
struct AdamWFactors {
    float decay, mix, keep, mix_square, correction, eps, rate;
};

// The next parameter; the moments are replaced.
LOWBIT_HD float adamw_element(const AdamWFactors& f, float param, float grad, float& avg, float& rms) {
    avg = avg + (grad - avg) * f.mix;
    rms = std::sqrt((rms * rms) * f.keep + (grad * grad) * f.mix_square);
    return param * f.decay - avg / (rms * f.correction + f.eps) * f.rate;
}

}  // namespace lowbit
