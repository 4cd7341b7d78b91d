// The CPU kernels of optimizers: checks, then cpu/optim.
#include <vector>

#include "cpu/optim/adamw.h"
#include "ops_params.h"
#include "ops_random.h"

namespace lowbit {
namespace {

using entry::Text;
using MaybeInt = std::optional<int64_t>;

cpu::Moment moment(const Tensor& codes, const Tensor& scale, const Tensor& new_codes, const Tensor& new_scale,
                   cpu::Shape shape, const SchemeParams& s) {
    for (const Tensor& t : {codes, new_codes}) {
        check_bytes(t, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "moment");
    }
    for (const Tensor& t : {scale, new_scale}) check_scale(t, shape, s, false);
    return {s, static_cast<const uint8_t*>(codes.const_data_ptr()), scale.const_data_ptr(),
            static_cast<uint8_t*>(new_codes.mutable_data_ptr()), new_scale.mutable_data_ptr()};
}

bool optimizer_step(const Tensor& given_param, const Tensor& given_grad, const MaybeTensor&, const MaybeTensor& first,
                    const MaybeTensor& first_scale, const MaybeTensor& second, const MaybeTensor& second_scale,
                    const Text& rule, const std::vector<double>& given_factors, const Text& scheme,
                    const Text& rms_scheme, const Text& rounding, const Text&, const MaybeTensor& rng, int64_t stream,
                    int64_t offset, MaybeInt pitch, const Tensor& new_param, const Tensor&, const Tensor& new_first,
                    const Tensor& new_first_scale, const Tensor& new_second, const Tensor& new_second_scale) {
    const Tensor param = in_rows(given_param), grad = in_rows(given_grad);
    const cpu::Shape shape = shape_of(param, "param");
    STD_TORCH_CHECK(new_param.scalar_type() == param.scalar_type(), "new_param must have param's dtype");
    if (rule.view() != "adamw" || given_factors.size() != 7) return false;
    const auto s = named_scheme(scheme.view(), shape.rows, shape.cols),
               rms_s = named_scheme(rms_scheme.view(), shape.rows, shape.cols);
    if (!s || !rms_s) return false;
    const auto random = random_of(rounding, s->format, shape.cols, rng, stream, offset, pitch);
    if (!random) return false;
    const Tensor avg = dense(*first), avg_scale = dense(*first_scale), rms = dense(*second),
                 rms_scale = dense(*second_scale);
    results_of(grad, "grad", shape);
    const auto at = [&](size_t i) { return static_cast<float>(given_factors[i]); };
    cpu::adamw(values_of(param, "param"), values_of(grad, "grad"), shape,
               moment(avg, avg_scale, new_first, new_first_scale, shape, *s),
               moment(rms, rms_scale, new_second, new_second_scale, shape, *rms_s),
               {at(0), at(1), at(2), at(3), at(4), at(5), at(6)}, random->rounding, random->rng,
               results_of(new_param, "new_param", shape));
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_KERNEL(optimizer_step, &lowbit::optimizer_step, CPU)
