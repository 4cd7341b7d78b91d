// CPU kernels of lowbit_native::* for optimizers.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "cpu/optim/adamw.h"
#include "ops_params.h"
#include "ops_tensors.h"

namespace {

using namespace lowbit;

cpu::Moment moment(const Tensor& codes, const Tensor& scale, const Tensor& new_codes, const Tensor& new_scale,
                   cpu::Shape shape, const SchemeParams& s) {
    for (const Tensor& t : {codes, new_codes}) {
        check_bytes(t, shape.rows, cpu::packed_cols(shape.cols, s.format.bits), "moment");
    }
    for (const Tensor& t : {scale, new_scale}) check_scale(t, shape, s, false);
    return {s, static_cast<const uint8_t*>(codes.const_data_ptr()), scale.const_data_ptr(),
            static_cast<uint8_t*>(new_codes.mutable_data_ptr()), new_scale.mutable_data_ptr()};
}

void adamw(Tensor param, Tensor grad, Tensor avg, Tensor avg_scale, Tensor rms, Tensor rms_scale, Tensor new_param,
           Tensor new_avg, Tensor new_avg_scale, Tensor new_rms, Tensor new_rms_scale, int64_t scheme,
           int64_t rms_scheme, std::vector<double> factors, const MaybeTensor& rng, std::vector<int64_t> place) {
    const cpu::Shape shape = shape_of(param, "param");
    STD_TORCH_CHECK(new_param.scalar_type() == param.scalar_type(), "new_param must have param's dtype");
    STD_TORCH_CHECK(factors.size() == kAdamWFactors, "adamw needs ", kAdamWFactors, " factors, got ", factors.size());
    float f[kAdamWFactors];
    for (int i = 0; i < kAdamWFactors; ++i) f[i] = static_cast<float>(factors[static_cast<size_t>(i)]);
    const SchemeParams s = kept_scheme(scheme, shape.rows, shape.cols),
                       rms_s = kept_scheme(rms_scheme, shape.rows, shape.cols);
    results_of(grad, "grad", shape);
    const Random random = random_of(rng, place);
    cpu::adamw(values_of(param, "param"), values_of(grad, "grad"), shape,
               moment(avg, avg_scale, new_avg, new_avg_scale, shape, s),
               moment(rms, rms_scale, new_rms, new_rms_scale, shape, rms_s), {f[0], f[1], f[2], f[3], f[4], f[5], f[6]},
               random.rounding, random.rng, results_of(new_param, "new_param", shape));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) { m.impl("adamw", TORCH_BOX(&adamw)); }
