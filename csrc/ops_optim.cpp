// The CPU kernels of optimizers: checks, then cpu/optim.
#include <cmath>

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

// As lowbit/ops/optim.py has them: in double precision, and each rounded once.
AdamWFactors factors_of(int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay) {
    const auto steps = static_cast<double>(step);
    const double exact[] = {1 - lr * weight_decay,
                            1 - beta1,
                            beta2,
                            1 - beta2,
                            std::pow(1 - std::pow(beta2, steps), -0.5),
                            eps,
                            lr / (1 - std::pow(beta1, steps))};
    const auto at = [&](int i) { return static_cast<float>(exact[i]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
}

bool adamw(const Tensor& given_param, const Tensor& given_grad, const Tensor& exp_avg, const Tensor& exp_avg_scale,
           const Tensor& exp_avg_sq_root, const Tensor& exp_avg_sq_root_scale, const Text& scheme,
           const Text& rms_scheme, const Text& rounding, int64_t step, const MaybeTensor& rng, int64_t stream,
           int64_t offset, MaybeInt pitch, double lr, double beta1, double beta2, double eps, double weight_decay,
           const Tensor& new_param, const Tensor& new_exp_avg, const Tensor& new_exp_avg_scale,
           const Tensor& new_exp_avg_sq_root, const Tensor& new_exp_avg_sq_root_scale) {
    const Tensor param = in_rows(given_param), grad = in_rows(given_grad);
    const cpu::Shape shape = shape_of(param, "param");
    STD_TORCH_CHECK(new_param.scalar_type() == param.scalar_type(), "new_param must have param's dtype");
    const auto s = named_scheme(scheme.view(), shape.rows, shape.cols),
               rms_s = named_scheme(rms_scheme.view(), shape.rows, shape.cols);
    if (!s || !rms_s) return false;
    const auto random = random_of(rounding, s->format, shape.cols, rng, stream, offset, pitch);
    if (!random) return false;
    const Tensor avg = dense(exp_avg), avg_scale = dense(exp_avg_scale), rms = dense(exp_avg_sq_root),
                 rms_scale = dense(exp_avg_sq_root_scale);
    results_of(grad, "grad", shape);
    cpu::adamw(values_of(param, "param"), values_of(grad, "grad"), shape,
               moment(avg, avg_scale, new_exp_avg, new_exp_avg_scale, shape, *s),
               moment(rms, rms_scale, new_exp_avg_sq_root, new_exp_avg_sq_root_scale, shape, *rms_s),
               factors_of(step, lr, beta1, beta2, eps, weight_decay), random->rounding, random->rng,
               results_of(new_param, "new_param", shape));
    return true;
}

}  // namespace
}  // namespace lowbit

LOWBIT_KERNEL(adamw, &lowbit::adamw, CPU)
