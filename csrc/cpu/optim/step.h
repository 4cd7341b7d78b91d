// A step of an optimizer on a matrix.
#pragma once

#include <optional>
#include <variant>

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

// `moments`: as many as the rule has. `rng`: of stochastic rounding of the moments; nothing: to nearest.
void optimizer_step(const StepRule& rule, Shape shape, const Weight& weight, const Values& grad, const Moment* moments,
                    int num_moments, const std::optional<Rng>& rng);

}  // namespace lowbit::cpu
