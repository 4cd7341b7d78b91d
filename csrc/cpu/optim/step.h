// A step of an optimizer on one matrix or many.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "common/optim.h"
#include "cpu/runs.h"

namespace lowbit::cpu {

// A moment as it comes and as it goes, contiguous; both may be the same memory. Codes are in blocks of one row,
// kMaxMomentBlock columns at most, without zero points or global scale.
struct CodedMoment {
    SchemeParams scheme;
    const uint8_t* codes;
    const void* scale;
    uint8_t* new_codes;
    void* new_scale;
};
constexpr int64_t kMaxMomentBlock = kRun;
// Numbers in fp32 or bf16.
struct FloatMoment {
    Dtype dtype;
    const void* numbers;
    void* new_numbers;
};
using Moment = std::variant<CodedMoment, FloatMoment>;

// What a weight is read from and kept in. Masters are contiguous.
struct Weight {
    Values param;
    Results new_param;
    enum Master { kNone, kFloat32, kResidual } kind = kNone;
    const void* master = nullptr;
    void* new_master = nullptr;
    std::optional<Rng> rng = std::nullopt;  // a bf16 parameter is rounded by these random bits
};

// A tensor in a step. `moments`: as many as the rule has. `rng`: of stochastic rounding of the moments; nothing: to
// nearest.
struct StepTensor {
    Shape shape;
    Weight weight;
    Values grad;
    Moment moments[kMaxMoments] = {};
    std::optional<Rng> rng = std::nullopt;
};

// One step of tensors that lie apart. Their moments are in the formats and scales of the first one's, and all are
// rounded as its are. `finite`, unless null, is made 1 for each tensor whose scales are finite, and its moments in
// floats where it has no more than `look` elements; else 0.
void optimizer_steps(const StepRule& rule, const std::vector<StepTensor>& tensors, int num_moments, int64_t look,
                     uint8_t* finite);

}  // namespace lowbit::cpu
