#include "cpu/matmul/gemv_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/numerics.h"
#include "cpu/arena.h"
#include "cpu/matmul/load.h"

namespace lowbit::cpu::mm {

GemvRows::GemvRows(const Problem& p, const GemvKernels& gemv, const GemvPlan& plan)
    : p_(p), gemv_(gemv), plan_(plan), vector_(4 * gemv.width), step_(plan.unit->vectors * vector_) {
    thread_local Arena arena;
    const int64_t depth = plan.all_steps() * plan.unit->elements, row = plan.all_steps() * step_;
    const int64_t packed = plan.rows * row, natural = depth * 4 + kTileDepth * 4 + 2 * kSlack;
    const int64_t blocks = plan.in_totals() ? plan.num_blocks : 0;
    const int64_t scales = 2 * blocks * p.a.rows * 4;
    packed_ = arena.reserve(static_cast<size_t>(packed + scales + natural + kRawBytes + 4 * kMaxBlocks));
    natural_ = packed_ + packed + scales;
    uint8_t* raw = natural_ + natural;
    for (int64_t m = 0; m < plan.rows; ++m) {
        const int64_t first = m / plan.tile * plan.tile, pitch = tile_rows(m) * vector_;
        take_row(m, depth, raw);
        uint8_t* to = packed_ + first * row + (m - first) * vector_;
        plan.unit->arrange(natural_, plan.all_steps(), plan.unit->vectors * pitch, pitch, to);
        if (!plan.in_totals()) continue;
        auto* of_row = reinterpret_cast<float*>(packed_ + packed) + 2 * m * blocks;
        auto* sums = reinterpret_cast<int32_t*>(of_row + blocks);
        plan.unit->input == GemvInput::s16 ? block_sums<int16_t>(sums) : block_sums<int8_t>(sums);
        block_sums_[m] = sums;
        std::fill_n(of_row, blocks, scale_at(p.a, m, 0));
        if (p.a.block_cols < p.depth) block_scales(p.a, m, 0, plan.num_blocks, of_row);
        scales_[m] = of_row;
    }
}

int GemvRows::lift() const { return p_.a.table->is_signed ? 0 : -128; }

void GemvRows::take_row(int64_t m, int64_t depth, uint8_t* raw) {
    if (!plan_.integers) return floats(m, depth, raw);
    plan_.unit->input == GemvInput::s16 ? integers<int16_t>(m, depth) : integers<int8_t>(m, depth);
}

// Bytes or words.
template <class T>
void GemvRows::integers(int64_t m, int64_t depth) {
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
    const bool is_signed = p_.a.table->is_signed;
    if constexpr (sizeof(T) == 1) {
        kernels.decode_bytes(codes, natural_, p_.depth, is_signed ? 0 : 128, 0);
    } else {
        kernels.decode_s16(codes, x, p_.depth, is_signed ? 128 : 0, is_signed ? 0 : 128);
    }
    std::fill(x + p_.depth, x + depth, T{0});  // decoders may have written there
    if (plan_.exact()) sums_[m] = std::accumulate(x, x + p_.depth, int64_t{0});
}

template <class T>
void GemvRows::block_sums(int32_t* out) const {
    const T* x = reinterpret_cast<const T*>(natural_);
    for (int64_t k = 0; k < p_.depth; k += plan_.block) {
        *out++ = std::accumulate(x + k, x + std::min(k + plan_.block, p_.depth), int32_t{0});
    }
}

void GemvRows::floats(int64_t m, int64_t depth, uint8_t* raw) const {
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
    if (plan_.unit->input == GemvInput::bf16) {
        for (int64_t k = 0; k < depth; ++k) {
            const auto high = static_cast<uint16_t>(bits_of(x[k]) >> 16);
            std::memcpy(natural_ + 2 * k, &high, 2);
        }
    }
}

}  // namespace lowbit::cpu::mm
