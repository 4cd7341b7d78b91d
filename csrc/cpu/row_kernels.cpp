#include "cpu/row_kernels.h"

#include <algorithm>
#include <stdexcept>

#include "common/numerics.h"
#include "format_table.h"

namespace lowbit::cpu {

Encoder make_encoder(const FormatParams& f, bool saturate, bool stochastic) {
    constexpr uint32_t kCoarse = 0x2f800000u, kHuge = 0x5f000000u;  // 2^-32, 2^63
    Encoder e{f, saturate, stochastic};
    if (f.kind == kKindCodebook) {
        e.book = &book_index(f, stochastic);
        e.nan_code = e.canonical = static_cast<uint32_t>(e.book->row->zero_code);
        e.limit = e.book->row->values[f.max_code];
        e.vector = e.book->few() || !e.book->cells.empty();
        // Stochastic rounding tells the least number from the entry 0.
        e.coarse = !stochastic;
        for (uint32_t cut : e.book->cuts) e.coarse &= (cut & kMagnitude) >= kCoarse;
    } else if (f.kind == kKindFloat) {
        e.nan_code = e.canonical = static_cast<uint32_t>(f.nan_code >= 0 ? f.nan_code : f.max_code);
        // Where overflow is not the largest code it is the next one, which is the next value of the unbounded grid.
        e.limit = grid_value(overflow_code(f, saturate), grid_of(f));
        // Vector code rounds by adding 2^(23 - mantissa) units of the grid, which must be finite.
        e.vector = static_cast<int>(e.limit >> 23) + 23 - f.mantissa <= 254;
        // Stochastic: it multiplies with 2^16 over the least value. And 2^-16 of that is the first to round up.
        const uint32_t least = grid_value(1, grid_of(f));
        if (stochastic) e.vector &= least >= 16u << 23;
        e.coarse = least >= kCoarse + (16u << 23) && e.limit < kHuge;
        const uint32_t emin = static_cast<uint32_t>(128 - f.bias), mantissa = static_cast<uint32_t>(f.mantissa);
        e.looked_up = (e.limit >> 23) - emin < 16;
        for (uint32_t j = 0; j < 16; ++j) {
            const uint32_t field = emin + j;
            e.magic[field & 15u] = (field + 23 - mantissa) << 23;
            e.base[field & 15u] = e.magic[field & 15u] - (j << mantissa);
        }
    }
    return e;
}

Decoder::Decoder(const FormatParams& f) : format(f), table(own_) {
    const FormatRow* row = find_format(f);
    if (!row && f.kind != kKindFloat) throw std::invalid_argument("this build knows no such format; rebuild lowbit");
    if (row && f.bits >= 4) {
        table = row->values;
        return;
    }
    // At least the 16 entries that vector code looks up; codes past the format's own repeat it.
    const uint32_t mask = (1u << f.bits) - 1;
    for (uint32_t code = 0; code < std::max(16u, mask + 1); ++code) {
        own_[code] = row ? row->values[code & mask] : decode_float(code & mask, f);
    }
}

const RowKernels& row_kernels() {
    static constexpr const RowKernels& (*kTables[])() = {
#define LOWBIT_ROW_KERNELS(name, ...) row_kernels_##name,
        LOWBIT_ISAS(LOWBIT_ROW_KERNELS)
#undef LOWBIT_ROW_KERNELS
    };
    return kTables[static_cast<int>(current_isa())]();
}

}  // namespace lowbit::cpu
