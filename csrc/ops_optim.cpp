// The CPU kernels of optimizers: checks, then cpu/optim.
#include <algorithm>
#include <vector>

#include "cpu/optim/step.h"
#include "cpu/optim/sums.h"
#include "ops_params.h"
#include "ops_random.h"

namespace lowbit {
namespace {

using entry::Text;
using MaybeInt = std::optional<int64_t>;

struct RuleRow {
    std::string_view name;
    RuleId id;
    int moments;
    size_t factors;
};
constexpr RuleRow kRules[] = {
#define LOWBIT_RULE(name, type, moments, factors) {#name, RuleId::name, moments, factors},
    LOWBIT_RULES(LOWBIT_RULE)
#undef LOWBIT_RULE
};

const RuleRow* find_rule(std::string_view name) {
    const auto* row =
        std::find_if(std::begin(kRules), std::end(kRules), [&](const RuleRow& r) { return r.name == name; });
    return row == std::end(kRules) ? nullptr : row;
}

// A tensor of param's shape beside the new one: contiguous, of the same dtype.
void check_numbers(const Tensor& t, const Tensor& made, cpu::Shape shape, const char* what) {
    for (const Tensor& each : {t, made}) {
        STD_TORCH_CHECK(
            each.is_contiguous() && each.numel() == shape.rows * shape.cols && each.scalar_type() == t.scalar_type(),
            what, " and what it becomes must be contiguous, of param's shape and one dtype");
    }
}

// A moment and what it becomes.
struct MomentTensors {
    const MaybeTensor &codes, &scale;
    const Text& scheme;
    const Tensor &new_codes, &new_scale;
};

// Nothing for a scheme that there is not. `codes` and `scale`: the tensors, dense.
std::optional<cpu::Moment> moment(const MomentTensors& given, const Tensor& codes, const MaybeTensor& scale,
                                  cpu::Shape shape) {
    if (codes.scalar_type() != ScalarType::Byte) {
        check_numbers(codes, given.new_codes, shape, "moment");
        return cpu::FloatMoment{dtype_of(codes, "moment"), codes.const_data_ptr(), given.new_codes.mutable_data_ptr()};
    }
    const auto s = named_scheme(given.scheme.view(), shape.rows, shape.cols);
    if (!s || !scale) return std::nullopt;
    for (const Tensor& t : {codes, given.new_codes}) {
        check_bytes(t, shape.rows, cpu::packed_cols(shape.cols, s->format.bits), "moment");
    }
    for (const Tensor& t : {*scale, given.new_scale}) check_scale(t, shape, *s, false);
    return cpu::CodedMoment{*s, static_cast<const uint8_t*>(codes.const_data_ptr()), scale->const_data_ptr(),
                            static_cast<uint8_t*>(given.new_codes.mutable_data_ptr()),
                            given.new_scale.mutable_data_ptr()};
}

// Adds the master, and what it becomes, to a weight.
void add_master(const Tensor& master, const Tensor& new_master, cpu::Shape shape, cpu::Weight& weight) {
    check_numbers(master, new_master, shape, "master");
    const bool residual = master.scalar_type() == ScalarType::Char;
    STD_TORCH_CHECK(residual ? weight.param.dtype == Dtype::kBFloat16 : master.scalar_type() == ScalarType::Float,
                    "master must be float32, or int8 beside a bfloat16 param");
    weight.kind = residual ? cpu::Weight::kResidual : cpu::Weight::kFloat32;
    weight.master = master.const_data_ptr(), weight.new_master = new_master.mutable_data_ptr();
}

bool optimizer_step(const Tensor& given_param, const Tensor& given_grad, const MaybeTensor& given_master,
                    const MaybeTensor& first, const MaybeTensor& first_scale, const MaybeTensor& second,
                    const MaybeTensor& second_scale, const Text& rule_name, const std::vector<double>& factors,
                    const Text& first_scheme, const Text& second_scheme, const Text& rounding,
                    const Text& param_rounding, const MaybeTensor& rng, int64_t stream, int64_t offset, MaybeInt pitch,
                    const Tensor& new_param, const Tensor& new_master, const Tensor& new_first,
                    const Tensor& new_first_scale, const Tensor& new_second, const Tensor& new_second_scale) {
    const RuleRow* row = find_rule(rule_name.view());
    if (row == nullptr || factors.size() != row->factors) return false;
    const Tensor param = in_rows(given_param), grad = in_rows(given_grad);
    const cpu::Shape shape = shape_of(param, "param");
    results_of(grad, "grad", shape);
    STD_TORCH_CHECK(new_param.scalar_type() == param.scalar_type(), "new_param must have param's dtype");

    const auto random = random_of(rounding, shape.cols, rng, stream, offset, pitch),
               param_random = random_of(param_rounding, shape.cols, rng, stream + 1, offset, pitch);
    if (!random || !param_random) return false;
    const auto bits = [](const Random& r) { return r.rounding == kStochastic ? std::optional(r.rng) : std::nullopt; };

    cpu::Weight weight{values_of(param, "param"), results_of(new_param, "new_param", shape)};
    weight.rng = bits(*param_random);
    const MaybeTensor master = dense(given_master);
    if (master) add_master(*master, new_master, shape, weight);
    STD_TORCH_CHECK(!weight.rng || (!master && weight.param.dtype == Dtype::kBFloat16),
                    "param_rounding is stochastic for a bfloat16 param without master alone");

    const MomentTensors given[] = {{first, first_scale, first_scheme, new_first, new_first_scale},
                                   {second, second_scale, second_scheme, new_second, new_second_scale}};
    MaybeTensor codes[kMaxMoments], scales[kMaxMoments];
    cpu::Moment moments[kMaxMoments];
    for (int k = 0; k < row->moments; ++k) {
        if (!given[k].codes) return false;
        codes[k] = dense(given[k].codes), scales[k] = dense(given[k].scale);
        const auto made = moment(given[k], *codes[k], scales[k], shape);
        if (!made) return false;
        moments[k] = *made;
    }
    StepRule rule{row->id, {}};
    for (size_t i = 0; i < factors.size(); ++i) rule.factors[i] = static_cast<float>(factors[i]);
    cpu::optimizer_step(rule, shape, weight, values_of(grad, "grad"), moments, row->moments, bits(*random));
    return true;
}

bool square_sums(const Tensor& given, const Tensor& given_exponents, int64_t axis, const Tensor& sums) {
    const Tensor x = in_rows(given), exponents = dense(given_exponents);
    const cpu::Shape shape = shape_of(x, "x");
    const int64_t count = axis == 0 ? shape.rows : shape.cols;
    STD_TORCH_CHECK(exponents.scalar_type() == ScalarType::Int && exponents.numel() == count,
                    "exponents must be int32, one for each row or column");
    STD_TORCH_CHECK(sums.scalar_type() == ScalarType::Long && sums.is_contiguous() && sums.numel() == count,
                    "sums must be int64, contiguous, one for each row or column");
    const auto run = axis == 0 ? cpu::row_square_sums : cpu::column_square_sums;
    run(values_of(x, "x"), shape, static_cast<const int32_t*>(exponents.const_data_ptr()),
        static_cast<int64_t*>(sums.mutable_data_ptr()));
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_KERNEL(optimizer_step, &lowbit::optimizer_step, CPU)
LOWBIT_KERNEL(square_sums, &lowbit::square_sums, CPU)
