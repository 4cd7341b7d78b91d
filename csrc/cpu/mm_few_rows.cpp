#include "cpu/mm_few_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/numerics.h"
#include "cpu/arena.h"
#include "cpu/mm_load.h"

namespace lowbit::cpu::mm {

FewRows::FewRows(const Problem& p, const FewKernels& few, const FewPlan& plan)
    : p_(p), few_(few), plan_(plan), vector_(4 * few.width), step_(plan.slots * vector_) {
    thread_local Arena arena;
    const int64_t depth = plan.all_steps() * plan.unit->elements, row = plan.all_steps() * step_;
    const int64_t packed = plan.rows * row, rows = plan.lanes ? (p.a.rows + 1) * row : 0;
    const int64_t natural = depth * 4 + kTileDepth * 4 + 2 * kSlack;
    packed_ = arena.reserve(static_cast<size_t>(packed + rows + natural + kRawBytes + 4 * kMaxBlocks));
    natural_ = packed_ + packed + rows;
    uint8_t* raw = natural_ + natural;
    if (!plan.lanes) {
        for (int64_t m = 0; m < plan.rows; ++m) {
            const int64_t first = m / plan.tile * plan.tile, pitch = tile_rows(m) * vector_;
            take_row(m, depth, raw);
            uint8_t* to = packed_ + first * row + (m - first) * vector_;
            plan.unit->arrange(natural_, plan.all_steps(), plan.slots * pitch, pitch, to);
            if (plan.slots == plan.unit->vectors) continue;
            plan.unit->input == FewInput::s16 ? lane_sums<int16_t>(m, to) : lane_sums<int8_t>(m, to);
        }
        return;
    }
    uint8_t* ordered = packed_ + packed;
    for (int64_t m = 0; m < p.a.rows; ++m) {
        take_row(m, depth, raw);
        plan.unit->arrange(natural_, plan.all_steps(), step_, vector_, ordered + m * row);
    }
    std::memset(ordered + p.a.rows * row, 0, static_cast<size_t>(row));
    turn(ordered);
}

int FewRows::lift() const {
    if (plan_.unit->input == FewInput::u8) return p_.a.table->is_signed ? 128 : 0;
    return p_.a.table->is_signed ? 0 : -128;
}

void FewRows::take_row(int64_t m, int64_t depth, uint8_t* raw) {
    if (!plan_.integers) return floats(m, depth, raw);
    plan_.unit->input == FewInput::s16 ? integers<int16_t>(m, depth) : integers<int8_t>(m, depth);
}

// Bytes or words.
template <class T>
void FewRows::integers(int64_t m, int64_t depth) {
    auto* x = reinterpret_cast<T*>(natural_);
    if (m == p_.a.rows) {
        std::fill(x, x + p_.depth, T{1});
        std::fill(x + p_.depth, x + depth, T{0});
        sums_[m] = p_.depth;
        return;
    }
    const auto* codes = static_cast<const uint8_t*>(p_.a.data) + m * p_.a.row_stride;
    if (p_.a.col_stride != 1) {
        uint8_t* gathered = natural_ + 2 * depth + kSlack;
        for (int64_t k = 0; k < p_.depth; ++k) gathered[k] = codes[k * p_.a.col_stride];
        codes = gathered;
    }
    const Kernels& kernels = kernels_in_use();
    const bool is_signed = p_.a.table->is_signed, unsigned_bytes = plan_.unit->input == FewInput::u8;
    if constexpr (sizeof(T) == 1) {
        kernels.decode_bytes(codes, natural_, p_.depth, is_signed == unsigned_bytes ? 128 : 0, 0);
    } else {
        kernels.decode_s16(codes, x, p_.depth, is_signed ? 128 : 0, is_signed ? 0 : 128);
    }
    std::fill(x + p_.depth, x + depth, T{0});  // decoders may have written there
    if (!plan_.exact()) return;
    sums_[m] = unsigned_bytes ? std::accumulate(natural_, natural_ + p_.depth, int64_t{0})
                              : std::accumulate(x, x + p_.depth, int64_t{0});
}

// A step's last slot: less the sum of the elements of each lane, as a word.
template <class T>
void FewRows::lane_sums(int64_t m, uint8_t* out) const {
    const T* x = reinterpret_cast<const T*>(natural_);
    const int64_t stretch = plan_.unit->elements / few_.width, pitch = tile_rows(m) * vector_;
    out += plan_.unit->vectors * pitch;
    for (int64_t s = 0; s < plan_.all_steps(); ++s, out += plan_.slots * pitch) {
        for (int64_t l = 0; l < few_.width; ++l, x += stretch) {
            int sum = 0;
            for (int64_t i = 0; i < stretch; ++i) sum += x[i];
            const uint32_t word = static_cast<uint16_t>(-sum);
            std::memcpy(out + 4 * l, &word, 4);
        }
    }
}

void FewRows::floats(int64_t m, int64_t depth, uint8_t* raw) const {
    auto* x = reinterpret_cast<float*>(natural_);
    Plan plan{};
    plan.kind = Kind::f32;
    plan.a_folded = plan_.a_folded;
    const Loader loader{p_.a, kernels_in_use(), plan, true, raw, reinterpret_cast<float*>(raw + kRawBytes)};
    for (int64_t k = 0; k < p_.depth; k += kTileDepth) {
        const int64_t count = std::min(kTileDepth, p_.depth - k);
        const Segment segment{k, count, 0, count};
        loader.load(m, 1, &segment, 1, reinterpret_cast<uint32_t*>(x + k), Sums{});
    }
    std::fill(x + p_.depth, x + depth, 0.0f);
    if (plan_.unit->input == FewInput::bf16) {
        for (int64_t k = 0; k < depth; ++k) {
            const auto high = static_cast<uint16_t>(bits_of(x[k]) >> 16);
            std::memcpy(natural_ + 2 * k, &high, 2);
        }
    }
}

// The dwords of a step, block after block where sums are scaled block by block.
void FewRows::order_step() {
    const int64_t width = few_.width, step = plan_.unit->vectors * width;
    const bool apart = plan_.per_step > 1 && plan_.unit->input != FewInput::f32;
    const int64_t blocks = apart ? plan_.per_step : 1, each = width / blocks;
    for (int64_t i = 0; i < kLaneDepth; ++i) {
        const int64_t d = i % step, block = d / (step / blocks), v = d / each % plan_.unit->vectors;
        const int64_t from = apart ? v * width + block * each + d % each : d;
        const int64_t place = i - d + from;
        places_[i] = static_cast<int32_t>(place / width * few_.lane_cols * width + place % width);
        if (i < step) order_[from] = static_cast<int32_t>(d);
    }
}

// Rows to lanes.
void FewRows::turn(const uint8_t* ordered) {
    order_step();
    const int64_t width = few_.width, row = plan_.all_steps() * step_;
    for (int64_t m = 0; m < plan_.rows; m += width) {
        const uint8_t* rows[kFewRows];
        for (int64_t i = 0; i < width; ++i) rows[i] = ordered + std::min(m + i, p_.a.rows) * row;
        const int64_t first = m / (2 * width) * (2 * width), pitch = tile_rows(m) * 4;
        uint8_t* to = packed_ + first * row + (m - first) * 4;
        for (int64_t at = 0; at < row; at += step_, to += step_ / 4 * pitch) {
            for (int64_t v = 0; v < plan_.unit->vectors; ++v) {
                few_.turn(rows, at + v * vector_, to, pitch, order_ + v * width);
            }
        }
    }
}

}  // namespace lowbit::cpu::mm
