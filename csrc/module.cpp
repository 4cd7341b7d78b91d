// lowbit._native: what Python asks of the native code without torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/isa.h"
#include "format_table.h"

namespace py = pybind11;
using namespace lowbit;

namespace {

py::list format_table() {
    py::list rows;
    for (const FormatRow& f : kFormats) {
        const FormatParams& p = f.params;
        py::dict row;
        row["name"] = f.name;
        row["params"] = std::vector<int>{p.kind,     p.bits,     p.exponent, p.mantissa, p.bias, p.is_signed,
                                         p.max_code, p.inf_code, p.nan_code, p.qmin,     p.qmax};
        row["values"] = std::vector<uint32_t>(f.values, f.values + (1 << p.bits));
        row["thresholds"] = std::vector<uint32_t>(f.thresholds, f.thresholds + f.num_thresholds);
        row["zero_code"] = f.zero_code;
        rows.append(row);
    }
    return rows;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Processor features, the format table as C++ has it, and NumPy codecs; needs no torch.";
    m.def("cpu_features", &cpu::cpu_features, "Names of the processor features that kernels ask for, those present.");
    m.def("isas", &cpu::isas, "Instruction sets available here, scalar first.");
    m.def("isa", [] { return std::string(cpu::isa_name(cpu::current_isa())); }, "The instruction set in use.");
    m.def("force_isa", &cpu::force_isa, py::arg("name"),
          "Use the named instruction set in this module from now on; '' lifts that. Raises ValueError if it is not here.");
    m.def("format_table", &format_table, "The rows of the generated format table, as dictionaries.");
}
