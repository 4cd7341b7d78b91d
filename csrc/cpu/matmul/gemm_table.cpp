// The values of every code of a format, in the shapes that decoders look them up in.
#include <cmath>
#include <deque>
#include <mutex>

#include "common/numerics.h"
#include "cpu/matmul/matmul.h"
#include "cpu/row_kernels.h"
#include "format_table.h"

namespace lowbit::cpu::mm {
namespace {

void fill_half(Table& table, const FormatParams& f) {
    const bool same_ends = f.exponent == 5 && f.inf_code >= 0;  // Inf and NaN where fp16 has them
    const bool inside = f.exponent < 5 && f.inf_code < 0;
    const bool finite = 15 - f.bias < 128;  // half_unit
    if (f.kind != kKindFloat || !f.is_signed || !(same_ends || inside) || !finite) return;
    table.half_shift = 5 - f.exponent;
    table.half_unit = std::ldexp(1.0f, 15 - f.bias);
    table.half_nan = static_cast<uint8_t>(inside && f.nan_code >= 0 ? f.nan_code : 0);
}

void fill(Table& table, const FormatParams& format) {
    table.bits = format.bits;
    table.integer = format.kind == kKindInteger;
    table.is_signed = format.is_signed != 0;
    // Kernels take 8-bit values that are exact in bf16 to be symmetric in their top bit; those of a codebook need not
    // be.
    table.exact_bf16 = format.kind != kKindCodebook;
    fill_half(table, format);
    const Decoder decoder(format);
    for (uint32_t code = 0; code < 256; ++code) {
        // Codes past the format's own are never asked for; they repeat, so that no table holds anything undefined.
        const uint32_t bits = decoder.table[code & ((1u << format.bits) - 1)];
        table.f32[code] = float_of(bits);
        table.exact_bf16 = table.exact_bf16 && (bits & 0xffff) == 0;
        table.short_bf16 = table.short_bf16 && (bits & 0x000fffff) == 0;
        const uint32_t field = (bits & kMagnitude) >> 23;
        table.moderate = table.moderate && (field == 0 || field == 255 || (field >= 127 - 20 && field <= 127 + 40));
        if (code < 128) {
            table.low[code] = static_cast<uint8_t>(bits >> 16);
            table.high[code] = static_cast<uint8_t>(bits >> 24);
        }
    }
}

struct Entry {
    FormatParams format;
    Table table;
};

}  // namespace

const Table& table_of(const FormatParams& format) {
    thread_local const Entry* last = nullptr;
    if (last != nullptr && last->format == format) return last->table;
    static std::mutex mutex;
    static auto* entries = new std::deque<Entry>;  // never destroyed: threads may outlive static objects
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Entry& entry : *entries) {
        if (entry.format == format) return (last = &entry)->table;
    }
    Entry& made = entries->emplace_back();
    made.format = format;
    fill(made.table, format);
    return (last = &made)->table;
}

}  // namespace lowbit::cpu::mm
