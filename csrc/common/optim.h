// What kernels know of the rules of optimizers and of the weights that they move: docs/numerics.md section 11.
#pragma once

#include <cstdint>

#include "common/numerics.h"

namespace lowbit {

// Rules of lowbit/ops/optim.py: the name there, the struct of cpu/optim/rules, how many moments and factors it has.
#define LOWBIT_RULES(row) \
    row(adamw, AdamW, 2, 7) row(lion, Lion, 1, 4) row(sgd, Sgd, 0, 3) row(momentum, Momentum, 1, 6)

enum class RuleId : int32_t {
#define LOWBIT_RULE(name, ...) name,
    LOWBIT_RULES(LOWBIT_RULE)
#undef LOWBIT_RULE
};
constexpr int kMaxMoments = 2, kMaxFactors = 8;

// A rule with its factors, in the rule's order.
struct StepRule {
    RuleId id;
    float factors[kMaxFactors];
};

// Bits of a term of a sum of squares, and what terms are below.
constexpr int kSquareBits = 38;
constexpr double kSquareEnd = 0x1p38;

// fp32 bits to bf16, up with the probability of what is cut off; Inf beyond the range, and one NaN. `noise`: 16 bits.
LOWBIT_HD uint16_t narrow_bf16_stochastic(uint32_t bits, uint32_t noise) {
    if (is_nan(bits)) return static_cast<uint16_t>(kNan >> 16);
    const uint32_t sum = (bits & kMagnitude) + noise;
    return static_cast<uint16_t>(((sum < kInf ? sum : kInf) | (bits & kSign)) >> 16);
}

// A weight of 24 bits: a bf16 number, and the 8 bits below its last one as what is added to its magnitude's pattern.
struct Split {
    uint16_t high;
    int8_t low;
};
LOWBIT_HD uint32_t join24(uint16_t high, int8_t low) {
    const int32_t magnitude = static_cast<int32_t>(widen_bf16(high) & kMagnitude) + low * 256;
    return static_cast<uint32_t>(magnitude < 0 ? 0 : magnitude) | (widen_bf16(high) & kSign);
}
LOWBIT_HD Split split24(uint32_t bits) {
    const uint32_t number = is_nan(bits) ? kNan : bits, magnitude = number & kMagnitude;
    const uint32_t rounded = (magnitude + 0x7fu + ((magnitude >> 8) & 1u)) >> 8, high = (rounded + 128u) >> 8;
    return {static_cast<uint16_t>(high | (number & kSign) >> 16),
            static_cast<int8_t>(static_cast<int32_t>(rounded) - static_cast<int32_t>(high << 8))};
}

}  // namespace lowbit
