// lowbit._native: what Python asks of the native code without torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/codec/codec.h"
#include "cpu/isa.h"
#include "format_table.h"

namespace py = pybind11;
using namespace lowbit;

namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;

py::list format_table() {
    py::list rows;
    for (const FormatRow& f : kFormats) {
        const FormatParams& p = f.params;
        py::dict row;
        row["name"] = f.name;
        row["params"] = std::vector<int>{p.kind,     p.bits,     p.exponent, p.mantissa, p.bias, p.is_signed,
                                         p.max_code, p.inf_code, p.nan_code, p.qmin,     p.qmax, p.codebook};
        row["values"] = std::vector<uint32_t>(f.values, f.values + (1 << p.bits));
        row["thresholds"] = std::vector<uint32_t>(f.thresholds, f.thresholds + f.num_thresholds);
        row["weights"] =
            f.weights ? std::vector<uint32_t>(f.weights, f.weights + f.num_thresholds + 1) : std::vector<uint32_t>{};
        row["zero_code"] = f.zero_code;
        rows.append(row);
    }
    return rows;
}

const FormatParams& format_of(const std::string& name) {
    std::string known;
    for (const FormatRow& f : kFormats) {
        if (name == f.name) return f.params;
        known += (known.empty() ? "" : ", ") + std::string(f.name);
    }
    throw std::invalid_argument("unknown format '" + name + "'; expected one of " + known);
}

cpu::Shape shape_of(const py::array& a) {
    const int64_t cols = a.ndim() ? a.shape(a.ndim() - 1) : 1;
    return {cols ? a.size() / cols : 0, cols};
}

std::vector<py::ssize_t> with_cols(const py::array& a, int64_t cols) {
    std::vector<py::ssize_t> shape(a.shape(), a.shape() + a.ndim());
    if (shape.empty()) throw std::invalid_argument("needs at least one axis, got a scalar");
    shape.back() = cols;
    return shape;
}

Bytes encode(const py::array& x, const std::string& format, bool saturate) {
    const FormatParams& f = format_of(format);
    if (f.kind == kKindExponent) throw std::invalid_argument(format + " holds scales and encodes no elements");
    const bool half = x.dtype().equal(py::dtype("float16"));
    if (!half && !x.dtype().equal(py::dtype("float32"))) {
        throw std::invalid_argument("x must be float32 or float16, got " + py::str(x.dtype()).cast<std::string>());
    }
    const py::array dense = py::array::ensure(x, py::array::c_style);
    Bytes codes(std::vector<py::ssize_t>(x.shape(), x.shape() + x.ndim()));
    const cpu::Shape shape = shape_of(dense);
    cpu::encode({dense.data(), half ? Dtype::kFloat16 : Dtype::kFloat32, shape.cols}, shape, f, kNearest, saturate, {},
                codes.mutable_data());
    return codes;
}

py::array_t<float> decode(const Bytes& codes, const std::string& format) {
    py::array_t<float> values(std::vector<py::ssize_t>(codes.shape(), codes.shape() + codes.ndim()));
    const cpu::Shape shape = shape_of(codes);
    cpu::decode(codes.data(), shape, format_of(format), {values.mutable_data(), Dtype::kFloat32, shape.cols});
    return values;
}

void check_bits(int bits) {
    if (bits < 1 || bits > 8) throw std::invalid_argument("bits must be 1 to 8, got " + std::to_string(bits));
}

Bytes pack(const Bytes& codes, int bits) {
    check_bits(bits);
    const cpu::Shape shape = shape_of(codes);
    Bytes packed(with_cols(codes, cpu::packed_cols(shape.cols, bits)));
    cpu::pack(codes.data(), shape, bits, packed.mutable_data());
    return packed;
}

Bytes unpack(const Bytes& packed, int bits, int64_t cols) {
    check_bits(bits);
    Bytes codes(with_cols(packed, cols));
    const cpu::Shape shape = shape_of(codes);
    if (packed.shape(packed.ndim() - 1) != cpu::packed_cols(cols, bits)) {
        throw std::invalid_argument(std::to_string(cols) + " codes of " + std::to_string(bits) + " bits take " +
                                    std::to_string(cpu::packed_cols(cols, bits)) + " bytes a row, got " +
                                    std::to_string(packed.shape(packed.ndim() - 1)));
    }
    cpu::unpack(packed.data(), shape, bits, codes.mutable_data());
    return codes;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Processor features, the format table as C++ has it, and NumPy codecs; needs no torch.";
    m.def("cpu_features", &cpu::cpu_features, "Names of the processor features that kernels ask for, those present.");
    m.def("isas", &cpu::isas, "Instruction sets available here, scalar first.");
    m.def("isa", [] { return std::string(cpu::isa_name(cpu::current_isa())); }, "The instruction set in use.");
    m.def("force_isa", &cpu::force_isa, py::arg("name"),
          "Use the named instruction set in this module from now on; '' lifts that. Raises ValueError if it is not "
          "here.");
    m.attr("fingerprint") = kFingerprint;
    m.def("format_table", &format_table, "The rows of the generated format table, as dictionaries.");
    m.def("encode", &encode, py::arg("x"), py::arg("format"), py::arg("saturate") = true,
          "Codes (uint8, one a byte) of a float32 or float16 array, to nearest even. Raises ValueError.");
    m.def("decode", &decode, py::arg("codes"), py::arg("format"),
          "float32 values of codes, one a byte. Raises ValueError.");
    m.def("pack", &pack, py::arg("codes"), py::arg("bits"),
          "Rows of codes as little-endian bit streams, whole bytes a row.");
    m.def("unpack", &unpack, py::arg("packed"), py::arg("bits"), py::arg("cols"),
          "The codes of packed rows, one a byte.");
}
