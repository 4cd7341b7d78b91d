// Schemas of the private ops lowbit_native::*, one set for CPU and CUDA, through LibTorch's stable ABI.
//
// Every op writes into tensors it is given and returns nothing. Matrices are [rows, cols] with unit column stride;
// `format` and `scheme` are numbers that keep() gave for Format.params() and Scheme.params(); `rng` is the int64
// tensor [seed, step] of stochastic rounding, `place` its [stream, offset, pitch]; None and empty round to nearest. The
// Python wrappers in lowbit/backends/native.py check and allocate.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "format_table.h"
#include "ops_params.h"

namespace {

void parallel_for(int64_t begin, int64_t end, int64_t grain, lowbit::cpu::Body body, void* context) {
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, body, context));
}
int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

constexpr struct {
    const char *name, *arguments;
} kOps[] = {
    {"encode", "(Tensor x, Tensor(a!) out, int format, bool saturate, Tensor? rng, int[] place)"},
    {"decode", "(Tensor codes, Tensor(a!) out, int format)"},
    {"pack", "(Tensor codes, Tensor(a!) out, int bits)"},
    {"unpack", "(Tensor packed, Tensor(a!) out, int bits)"},
    {"global_scale", "(Tensor x, Tensor(a!) out, int scheme)"},
    {"block_range", "(Tensor x, Tensor(a!) low, Tensor(b!) high, int scheme)"},
    {"quantize",
     "(Tensor x, Tensor? global_scale, Tensor(a!) codes, Tensor(b!) scale, Tensor(c!)? zero_point, int scheme, "
     "Tensor? rng, int[] place)"},
    {"quantize_static",
     "(Tensor x, Tensor scale, Tensor? zero_point, Tensor? global_scale, Tensor(a!) codes, int scheme, Tensor? rng, "
     "int[] place)"},
    {"dequantize",
     "(Tensor codes, Tensor scale, Tensor? zero_point, Tensor? global_scale, Tensor(a!) out, int scheme)"},
    {"fake_quantize",
     "(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? global_scale, Tensor(a!) out, int scheme, Tensor? rng, "
     "int[] place)"},
    {"fake_quantize_backward",
     "(Tensor grad, Tensor x, Tensor? scale, Tensor? zero_point, Tensor? global_scale, Tensor(a!) grad_x, Tensor(b!)? "
     "grad_scale, int scheme)"},
    {"scaled_mm",
     "(Tensor a, int a_scheme, Tensor? a_scale, Tensor? a_zero_point, Tensor? a_global_scale, Tensor b, int b_scheme, "
     "Tensor? "
     "b_scale, Tensor? b_zero_point, Tensor? b_global_scale, Tensor? bias, Tensor(a!) out, int cols)"},
    {"linear",
     "(Tensor x, int input, Tensor? input_scale, Tensor? input_zero_point, Tensor? input_global_scale, Tensor weight, "
     "int scheme, Tensor? scale, Tensor? zero_point, Tensor? global_scale, Tensor? bias, int out_scheme, Tensor? "
     "out_scale, "
     "Tensor? out_zero_point, Tensor(a!) out)"},
    {"conv",
     "(Tensor x, int input, Tensor? input_scale, Tensor? input_zero_point, Tensor? input_global_scale, Tensor "
     "weight, int scheme, Tensor scale, Tensor? zero_point, Tensor? global_scale, Tensor? bias, int out_scheme, "
     "Tensor? "
     "out_scale, Tensor? out_zero_point, Tensor(a!) out, int[] kernel_size, int[] stride, int[] padding, int[] "
     "dilation, "
     "int groups)"},
    {"linear_packed", "(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out)"},
};

int64_t keep(std::string name, std::vector<int64_t> numbers) { return lowbit::keep(name, numbers); }
void force_isa(std::string name) { lowbit::cpu::force_isa(name); }
std::string isa() { return lowbit::cpu::isa_name(lowbit::cpu::current_isa()); }
std::string fingerprint() { return lowbit::kFingerprint; }
std::vector<std::string> isas() { return lowbit::cpu::isas(); }

}  // namespace

STABLE_TORCH_LIBRARY(lowbit_native, m) {
    lowbit::cpu::set_parallel_for(parallel_for, num_threads);
    for (const auto& op : kOps) {
        m.def((std::string(op.name) + op.arguments + " -> ()").c_str());
    }
    m.def(
        "adamw(Tensor param, Tensor grad, Tensor avg, Tensor avg_scale, Tensor rms, Tensor rms_scale, "
        "Tensor(a!) new_param, Tensor(b!) new_avg, Tensor(c!) new_avg_scale, Tensor(d!) new_rms, "
        "Tensor(e!) new_rms_scale, int scheme, int rms_scheme, float[] factors, Tensor? rng, int[] place) -> ()");
    m.def("spin(int arithmetic, int operations) -> bool");
    m.def("read(Tensor x) -> int");
    m.def("keep(str name, int[] numbers) -> int");
    m.def("force_isa(str name) -> ()");
    m.def("isa() -> str");
    m.def("isas() -> str[]");
    m.def("fingerprint() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CompositeExplicitAutograd, m) {
    m.impl("keep", TORCH_BOX(&keep));
    m.impl("force_isa", TORCH_BOX(&force_isa));
    m.impl("isa", TORCH_BOX(&isa));
    m.impl("isas", TORCH_BOX(&isas));
    m.impl("fingerprint", TORCH_BOX(&fingerprint));
}
