// What lowbit_native has besides kernels (ops_*.cpp, whose schemas lowbit/backends/native_ops.py makes of the table of
// ops), through LibTorch's stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "format_table.h"

namespace {

void parallel_for(int64_t begin, int64_t end, int64_t grain, lowbit::cpu::Body body, void* context) {
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, body, context));
}
int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

void force_isa(std::string name) { lowbit::cpu::force_isa(name); }
std::string isa() { return lowbit::cpu::isa_name(lowbit::cpu::current_isa()); }
std::string fingerprint() { return lowbit::kFingerprint; }
std::vector<std::string> isas() { return lowbit::cpu::isas(); }

}  // namespace

STABLE_TORCH_LIBRARY(lowbit_native, m) {
    lowbit::cpu::set_parallel_for(parallel_for, num_threads);
    m.def("spin(int arithmetic, int operations) -> bool");
    m.def("read(Tensor x) -> int");
    m.def("force_isa(str name) -> ()");
    m.def("isa() -> str");
    m.def("isas() -> str[]");
    m.def("fingerprint() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CompositeExplicitAutograd, m) {
    m.impl("force_isa", TORCH_BOX(&force_isa));
    m.impl("isa", TORCH_BOX(&isa));
    m.impl("isas", TORCH_BOX(&isas));
    m.impl("fingerprint", TORCH_BOX(&fingerprint));
}
