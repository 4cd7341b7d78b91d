// lowbit_native::spin and read: the limits that benchmarks hold kernels against.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "cpu/probe.h"

namespace {

using torch::stable::Tensor;

bool spin(int64_t arithmetic, int64_t operations) {
    STD_TORCH_CHECK(arithmetic >= 0 && arithmetic < 3, "lowbit: arithmetic is 0 (fp32), 1 (bf16) or 2 (bytes)");
    return lowbit::cpu::spin(static_cast<int>(arithmetic), operations);
}

int64_t read(const Tensor& x) {
    STD_TORCH_CHECK(x.is_contiguous(), "lowbit: x must be contiguous");
    return lowbit::cpu::read(x.const_data_ptr(), x.numel() * x.element_size());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CompositeExplicitAutograd, m) { m.impl("spin", TORCH_BOX(&spin)); }
STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CPU, m) { m.impl("read", TORCH_BOX(&read)); }
