#include "cpu/codec/book.h"

#include <algorithm>
#include <stdexcept>

#include "common/numerics.h"
#include "format_table.h"

namespace lowbit::cpu {
namespace {

// The largest fp32 below a number that is finite.
uint32_t just_below(uint32_t bits) {
    if ((bits & kMagnitude) == 0) return kSign | 1u;
    return bits & kSign ? bits + 1 : bits - 1;
}

uint32_t place(const BookIndex& index, uint32_t bits) {
    const float v = float_of(bits);
    const auto end =
        std::partition_point(index.cuts.begin(), index.cuts.end(), [v](uint32_t cut) { return float_of(cut) < v; });
    return static_cast<uint32_t>(end - index.cuts.begin());
}

// The cell of 2^shift magnitudes from `first` on, of numbers with this sign; false where it holds several cuts.
bool add_cell(BookIndex& index, uint32_t sign, uint32_t first) {
    const uint32_t size = 1u << index.shift, low = place(index, sign | first);
    const uint32_t high = place(index, sign | (first + size - 1));
    if (sign == 0) {
        if (high - low > 1) return false;
        const uint32_t step = high == low ? size : (index.cuts[low] & kMagnitude) + 1 - first;
        index.cells.push_back((low << index.shift) + size - step);
    } else {
        if (low - high > 1) return false;
        const uint32_t step = high == low ? size : (index.cuts[high] & kMagnitude) - first;
        index.cells.push_back((low << index.shift) + step - 1);
    }
    return true;
}

bool add_cells(BookIndex& index) {
    const uint32_t size = 1u << index.shift;
    uint32_t least = kInf, most = 0;
    for (uint32_t cut : index.cuts) {
        const uint32_t magnitude = cut & kMagnitude;
        if (magnitude > 1) least = std::min(least, magnitude);  // 0 and just below it, the sign tells apart
        most = std::max(most, magnitude);
    }
    index.least = least & ~(size - 1);
    index.most = (most | (size - 1)) + 1;
    index.side = ((index.most - index.least) >> index.shift) + 1;
    index.cells.clear();
    for (uint32_t sign : {0u, kSign}) {
        if (place(index, sign | (sign ? 1u : 0u)) != place(index, sign | index.least)) return false;
        for (uint32_t i = 0; i < index.side; ++i) {
            if (!add_cell(index, sign, index.least + (i << index.shift))) return false;
        }
    }
    return true;
}

BookIndex made(const FormatRow& row, bool stochastic) {
    BookIndex index{&row, {}, {}, {}};
    for (int k = 0; k < row.num_thresholds; ++k)
        index.cuts.push_back(stochastic ? just_below(row.values[k + 1]) : row.thresholds[k]);
    for (int k = 0; k <= row.num_thresholds; ++k)
        index.entries.push_back(uint64_t{row.weights[k]} << 32 | row.values[k]);
    constexpr int kLargest = 22, kLeast = 14;  // of so many cells for each power of two: 2 to 512
    if (index.few()) return index;
    for (index.shift = kLargest; index.shift >= kLeast; --index.shift) {
        if (add_cells(index)) return index;
    }
    index.cells.clear();
    return index;
}

}  // namespace

const BookIndex& book_index(const FormatParams& format, bool stochastic) {
    // Never destroyed: threads may outlive static objects.
    static const auto& all = *new std::vector<BookIndex>([] {
        std::vector<BookIndex> found;
        for (const FormatRow& row : kFormats) {
            if (row.params.kind != kKindCodebook) continue;
            for (bool random : {false, true}) found.push_back(made(row, random));
        }
        return found;
    }());
    for (const BookIndex& index : all) {
        if (index.row->params == format) return *(&index + stochastic);
    }
    throw std::invalid_argument("this build knows no codebook with these parameters; rebuild lowbit");
}

}  // namespace lowbit::cpu
