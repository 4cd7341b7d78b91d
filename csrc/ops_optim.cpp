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

StepRule step_rule(const RuleRow& row, const std::vector<double>& factors) {
    StepRule rule{row.id, {}};
    for (size_t i = 0; i < factors.size(); ++i) rule.factors[i] = static_cast<float>(factors[i]);
    return rule;
}

// A tensor of param's shape beside the new one: contiguous, of the same dtype.
void check_numbers(const Tensor& t, const Tensor& made, cpu::Shape shape) {
    for (const Tensor& each : {t, made}) {
        require(each.is_contiguous() && each.numel() == shape.rows * shape.cols &&
                each.scalar_type() == t.scalar_type());
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
        check_numbers(codes, given.new_codes, shape);
        return cpu::FloatMoment{dtype_of(codes), codes.const_data_ptr(), given.new_codes.mutable_data_ptr()};
    }
    const auto s = named_scheme(given.scheme.view(), shape.rows, shape.cols);
    if (!s || !scale) return std::nullopt;
    for (const Tensor& t : {codes, given.new_codes}) {
        check_bytes(t, shape.rows, cpu::packed_cols(shape.cols, s->format.bits));
    }
    for (const Tensor& t : {*scale, given.new_scale}) check_scale(t, shape, *s, false);
    return cpu::CodedMoment{*s, static_cast<const uint8_t*>(codes.const_data_ptr()), scale->const_data_ptr(),
                            static_cast<uint8_t*>(given.new_codes.mutable_data_ptr()),
                            given.new_scale.mutable_data_ptr()};
}

// Adds the master, and what it becomes, to a weight.
void add_master(const Tensor& master, const Tensor& new_master, cpu::Shape shape, cpu::Weight& weight) {
    check_numbers(master, new_master, shape);
    const bool residual = master.scalar_type() == ScalarType::Char;
    require(residual ? weight.param.dtype == Dtype::kBFloat16 : master.scalar_type() == ScalarType::Float);
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
    const cpu::Shape shape = shape_of(param);
    results_of(grad, shape);
    require(new_param.scalar_type() == param.scalar_type());

    const auto random = random_of(rounding, shape.cols, rng, stream, offset, pitch),
               param_random = random_of(param_rounding, shape.cols, rng, stream + 1, offset, pitch);
    if (!random || !param_random) return false;

    cpu::Weight weight{values_of(param), results_of(new_param, shape)};
    weight.rng = param_random->bits();
    const MaybeTensor master = dense(given_master);
    if (master) add_master(*master, new_master, shape, weight);
    require(!weight.rng || (!master && weight.param.dtype == Dtype::kBFloat16));

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
    cpu::optimizer_steps(step_rule(*row, factors),
                         {{shape, weight, values_of(grad), {moments[0], moments[1]}, random->bits()}}, row->moments, 0,
                         nullptr);
    return true;
}

// -- many tensors, in place -----------------------------------------------------------------------------------------
using Tensors = std::vector<Tensor>;

// A moment of every tensor.
struct MomentsTensors {
    const Tensors &codes, &scale;
    const Text& scheme;
};

// Bytes that a step reads, or replaces.
struct Span {
    const char *begin, *end;
    bool written;
};

// Whether something that is replaced meets what another tensor has.
bool meet(std::vector<Span>& spans) {
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    const char *end = nullptr, *end_written = nullptr;
    for (const Span& span : spans) {
        if (span.begin < (span.written ? end : end_written)) return true;
        end = std::max(end, span.end);
        if (span.written) end_written = std::max(end_written, span.end);
    }
    return false;
}

// What a step of many tensors is made of, one after another; copies live as long as this.
class Steps {
  public:
    explicit Steps(size_t count) { tensors.reserve(count), spans_.reserve(4 * count); }

    std::vector<cpu::StepTensor> tensors;

    // Adds a tensor; false for one that is not served.
    bool add(const Tensor& param, const Tensor& grad, int64_t cols) {
        const int64_t count = param.numel();
        if (count == 0 || cols <= 0 || count % cols != 0 || !param.is_contiguous() || grad.numel() != count ||
            !is_float(param.scalar_type()) || !is_float(grad.scalar_type())) {
            return false;
        }
        add_span(param, true);
        if (grad.is_contiguous()) {
            add_span(grad, false);
            made_.push_back(grad);
        } else {
            made_.push_back(torch::stable::contiguous(grad));
        }
        const Dtype dtype = dtype_of(param);
        cpu::StepTensor made{{count / cols, cols},
                             {{param.const_data_ptr(), dtype, cols}, {param.mutable_data_ptr(), dtype, cols}},
                             {made_.back().const_data_ptr(), dtype_of(grad), cols}};
        tensors.push_back(std::move(made));
        return true;
    }
    bool add_master(const Tensor& master) {
        cpu::Weight& weight = tensors.back().weight;
        const bool residual = master.scalar_type() == ScalarType::Char;
        const bool fits = residual ? weight.param.dtype == Dtype::kBFloat16
                                   : master.scalar_type() == ScalarType::Float && weight.param.dtype != Dtype::kFloat32;
        if (!fits || !is_of(master, count())) return false;
        add_span(master, true);
        weight.kind = residual ? cpu::Weight::kResidual : cpu::Weight::kFloat32;
        weight.master = master.const_data_ptr(), weight.new_master = master.mutable_data_ptr();
        return true;
    }
    bool add_moment(int k, const MomentsTensors& all, size_t i) {
        const cpu::Shape shape = tensors.back().shape;
        const Tensor& codes = all.codes[i];
        const std::string_view name = all.scheme.view();
        add_span(codes, true);
        if (name == "fp32" || name == "bf16") {
            if (codes.scalar_type() != (name == "fp32" ? ScalarType::Float : ScalarType::BFloat16)) return false;
            if (!is_of(codes, count())) return false;
            tensors.back().moments[k] =
                cpu::FloatMoment{dtype_of(codes), codes.const_data_ptr(), codes.mutable_data_ptr()};
            return true;
        }
        const auto s = named_scheme(name, shape.rows, shape.cols);
        if (!s || i >= all.scale.size()) return false;
        const Tensor& scale = all.scale[i];
        const cpu::Shape blocks = scale_shape(shape, *s);
        if (codes.scalar_type() != ScalarType::Byte || scale.scalar_type() != scale_type(*s) ||
            !is_of(codes, shape.rows * cpu::packed_cols(shape.cols, s->format.bits)) ||
            !is_of(scale, blocks.rows * blocks.cols)) {
            return false;
        }
        add_span(scale, true);
        tensors.back().moments[k] =
            cpu::CodedMoment{*s, static_cast<const uint8_t*>(codes.const_data_ptr()), scale.const_data_ptr(),
                             static_cast<uint8_t*>(codes.mutable_data_ptr()), scale.mutable_data_ptr()};
        return true;
    }
    bool apart() { return !meet(spans_); }

  private:
    Tensors made_;  // gradients, dense
    std::vector<Span> spans_;

    int64_t count() const { return tensors.back().shape.rows * tensors.back().shape.cols; }
    static bool is_of(const Tensor& t, int64_t count) { return t.is_contiguous() && t.numel() == count; }
    void add_span(const Tensor& t, bool written) {
        const auto* begin = static_cast<const char*>(t.const_data_ptr());
        spans_.push_back({begin, begin + t.numel() * static_cast<int64_t>(t.element_size()), written});
    }
};

// `places`: of each tensor the columns of its rows, then stream, offset and pitch of its random bits.
std::optional<Tensor> optimizer_steps(const Tensors& params, const Tensors& grads, const Tensors& masters,
                                      const Tensors& first, const Tensors& first_scale, const Tensors& second,
                                      const Tensors& second_scale, const std::vector<int64_t>& places,
                                      const Text& rule_name, const std::vector<double>& factors,
                                      const Text& first_scheme, const Text& second_scheme, const Text& rounding,
                                      const Text& param_rounding, const MaybeTensor& rng, int64_t look) {
    const RuleRow* row = find_rule(rule_name.view());
    if (row == nullptr || factors.size() != row->factors || params.empty()) return std::nullopt;
    const MomentsTensors given[] = {{first, first_scale, first_scheme}, {second, second_scale, second_scheme}};
    const size_t count = params.size();
    if (grads.size() != count || places.size() != 4 * count) return std::nullopt;
    for (int k = 0; k < kMaxMoments; ++k)
        if (given[k].codes.size() != (k < row->moments ? count : 0)) return std::nullopt;
    const bool mastered = !masters.empty(), noisy = param_rounding.view() == "stochastic";
    if (mastered && (masters.size() != count || noisy)) return std::nullopt;

    Steps steps(count);
    for (size_t i = 0; i < count; ++i) {
        const int64_t* place = &places[4 * i];
        if (!steps.add(params[i], grads[i], place[0])) return std::nullopt;
        if (mastered && !steps.add_master(masters[i])) return std::nullopt;
        for (int k = 0; k < row->moments; ++k)
            if (!steps.add_moment(k, given[k], i)) return std::nullopt;
        const auto random = random_of(rounding, place[0], rng, place[1], place[2], place[3]),
                   param_random = random_of(param_rounding, place[0], rng, place[1] + 1, place[2], place[3]);
        cpu::StepTensor& step = steps.tensors.back();
        if (!random || !param_random || (noisy && step.weight.param.dtype != Dtype::kBFloat16)) return std::nullopt;
        step.rng = random->bits(), step.weight.rng = param_random->bits();
    }
    if (!steps.apart()) return std::nullopt;
    const Tensor finite = new_tensor({static_cast<int64_t>(count)}, ScalarType::Byte);
    cpu::optimizer_steps(step_rule(*row, factors), steps.tensors, row->moments, look,
                         static_cast<uint8_t*>(finite.mutable_data_ptr()));
    return finite;
}

template <class... T>
void run_steps(StableIValue* stack, uint64_t inputs, std::optional<Tensor> (*kernel)(T...)) {
    const auto serve = [&](auto& arguments) {
        const std::optional<Tensor> finite = std::apply(kernel, arguments);
        if (finite) stack[0] = torch::stable::detail::from(*finite);
        return finite.has_value();
    };
    const auto answered = [&] {  // a tensor; none where Python raised
        const auto made = torch::stable::detail::to<Tensors>(stack[0]);
        if (!made.empty()) stack[0] = torch::stable::detail::from(made[0]);
        return !made.empty();
    };
    entry::serve_or_pass_on<entry::Arguments<T...>>("lowbit_table::optimizer_steps_", stack, inputs, serve, answered);
}

void steps_entry(StableIValue* stack, uint64_t inputs, uint64_t) { run_steps(stack, inputs, &optimizer_steps); }

bool square_sums(const Tensor& given, const Tensor& given_exponents, int64_t axis, const Tensor& sums) {
    const Tensor x = in_rows(given), exponents = dense(given_exponents);
    const cpu::Shape shape = shape_of(x);
    const int64_t count = axis == 0 ? shape.rows : shape.cols;
    require(exponents.scalar_type() == ScalarType::Int && exponents.numel() == count);
    require(sums.scalar_type() == ScalarType::Long && sums.is_contiguous() && sums.numel() == count);
    const auto run = axis == 0 ? cpu::row_square_sums : cpu::column_square_sums;
    run(values_of(x), shape, static_cast<const int32_t*>(exponents.const_data_ptr()),
        static_cast<int64_t*>(sums.mutable_data_ptr()));
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_KERNEL(optimizer_step, &lowbit::optimizer_step, CPU)
LOWBIT_KERNEL(square_sums, &lowbit::square_sums, CPU)

// The schema is lowbit/backends/steps.py's.
STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
    m.impl("optimizer_steps_", &lowbit::steps_entry);
    lowbit::entry::served_ops().emplace_back("optimizer_steps_");
}
