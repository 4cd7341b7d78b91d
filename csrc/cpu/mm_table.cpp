// The values of every code of a format, in the shapes that decoders look them up in.
#include <deque>
#include <mutex>

#include "common/numerics.h"
#include "cpu/mm.h"
#include "format_table.h"

namespace lowbit::cpu::mm {
namespace {

bool same(const FormatParams& a, const FormatParams& b) {
    return a.kind == b.kind && a.bits == b.bits && a.exponent == b.exponent && a.mantissa == b.mantissa &&
           a.bias == b.bias && a.is_signed == b.is_signed && a.max_code == b.max_code && a.inf_code == b.inf_code;
}

const FormatRow* codebook(const FormatParams& format) {
    for (const FormatRow& row : kFormats) {
        if (row.params.kind == format.kind && row.params.bits == format.bits) return &row;
    }
    return nullptr;
}

uint32_t value_bits(const FormatParams& format, uint32_t code) {
    if (format.kind == kKindInteger) return bits_of(decode_integer(code, format));
    if (format.kind == kKindCodebook) return codebook(format)->values[code];
    return decode_float(code, format);
}

void fill(Table& table, const FormatParams& format) {
    table.bits = format.bits;
    table.integer = format.kind == kKindInteger;
    table.is_signed = format.is_signed != 0;
    for (uint32_t code = 0; code < 256; ++code) {
        // Codes past the format's own are never asked for; they repeat, so that no table holds anything undefined.
        const uint32_t bits = value_bits(format, code & ((1u << format.bits) - 1));
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
    if (last != nullptr && same(last->format, format)) return last->table;
    static std::mutex mutex;
    static auto* entries = new std::deque<Entry>;  // never destroyed: threads may outlive static objects
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Entry& entry : *entries) {
        if (same(entry.format, format)) return (last = &entry)->table;
    }
    Entry& made = entries->emplace_back();
    made.format = format;
    fill(made.table, format);
    return (last = &made)->table;
}

}  // namespace lowbit::cpu::mm
