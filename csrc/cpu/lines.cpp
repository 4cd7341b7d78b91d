#include "cpu/lines.h"

#include <stdexcept>

#include "common/numerics.h"
#include "cpu/isa.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

bool same(const FormatParams& a, const FormatParams& b) {
    return a.kind == b.kind && a.bits == b.bits && a.exponent == b.exponent && a.mantissa == b.mantissa &&
           a.bias == b.bias && a.is_signed == b.is_signed && a.max_code == b.max_code && a.inf_code == b.inf_code;
}

const FormatRow* find(const FormatParams& format) {
    for (const FormatRow& row : kFormats) {
        if (same(row.params, format)) return &row;
    }
    return nullptr;
}

}  // namespace

Encoder make_encoder(const FormatParams& f, bool saturate, bool stochastic) {
    Encoder e{f, saturate, stochastic, nullptr, 0, 0, 0, kInf, true};
    if (f.kind == kKindCodebook) {
        const FormatRow* row = find(f);
        if (!row) throw std::invalid_argument("this build knows no codebook with these parameters; rebuild lowbit");
        e.thresholds = row->thresholds;
        e.num_thresholds = row->num_thresholds;
        e.nan_code = e.canonical = static_cast<uint32_t>(row->zero_code);
        e.limit = row->values[f.max_code];
    } else if (f.kind == kKindFloat) {
        e.nan_code = e.canonical = static_cast<uint32_t>(f.nan_code >= 0 ? f.nan_code : f.max_code);
        // Where overflow is not the largest code it is the next one, which is the next value of the unbounded grid.
        e.limit = grid_value(overflow_code(f, saturate), grid_of(f));
        // Vector code rounds by adding 2^(23 - mantissa) units of the grid, which must be finite.
        e.vector = static_cast<int>(e.limit >> 23) + 23 - f.mantissa <= 254;
    }
    return e;
}

Decoder::Decoder(const FormatParams& f) : format(f) {
    if (const FormatRow* row = find(f)) {
        table = row->values;
        return;
    }
    if (f.kind != kKindFloat) throw std::invalid_argument("this build knows no such format; rebuild lowbit");
    for (uint32_t code = 0; code < 1u << f.bits; ++code) own_[code] = decode_float(code, f);
    table = own_;
}

const Lines& lines() {
    switch (current_isa()) {
#if defined(__x86_64__)
        case Isa::kAvx512:
            return lines_avx512();
        case Isa::kAvx2:
            return lines_avx2();
#elif defined(__aarch64__)
        case Isa::kNeon:
            return lines_neon();
#endif
        default:
            return lines_scalar();
    }
}

}  // namespace lowbit::cpu
