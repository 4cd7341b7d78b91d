#include "cpu/matmul/panel.h"

#include <algorithm>
#include <cstring>

#include "cpu/matmul/packed.h"

namespace lowbit::cpu::mm {
namespace {

constexpr int kOneBlock = 62;  // a shift after which every index is 0

bool transposed(const Operand& x) { return x.table->bits == 8 && x.row_stride == 1 && x.col_stride != 1; }

// Whether blocks are what Panel takes; those of f32 begin at multiples of kTileDepth.
bool regular(int64_t block) { return (block & (block - 1)) == 0 && block % kPanelStep == 0; }
static_assert(kTileDepth % kPanelStep == 0, "chunks begin with steps");

}  // namespace

// Whether `kernels.panel` serves.
bool PanelLoader::direct(const Segment& first, const Segment& last) const {
    if (kernels.panel[static_cast<int>(plan.kind)] == nullptr || !b.has_codes()) return false;
    const Table& t = *b.table;
    const int64_t length = last.begin + last.length - first.begin;
    const bool f32 = plan.kind == Kind::f32;
    if (f32 && plan.b_folded && !regular(b.block_cols)) return false;
    // Codes of 6 bits are unpacked, and then are bytes.
    if (t.bits == 6) return f32 && !t.integer && t.exact_bf16 && b.col_stride == 1 && length % kPanelBytes == 0;
    if (t.bits != 4 && !(t.bits == 8 && (t.integer || t.exact_bf16))) return false;
    if (b.col_stride != 1 && !transposed(b)) return false;
    if (length * t.bits % (8 * kPanelBytes) != 0 || first.begin * t.bits % 8 != 0) return false;
    if (f32) return true;
    const bool dense = last.begin - first.begin == last.dword * elements_per_dword(plan.kind);
    if (plan.kind == Kind::bf16)
        return dense && !plan.b_folded && b.zero_point == nullptr && (t.bits == 4 || !t.integer);
    return dense && (t.bits == 8 || b.zero_point == nullptr);
}

const uint32_t* PanelLoader::load(int64_t row, int64_t valid, const Segment* segments, int num_segments,
                                  uint32_t* panel) const {
    const Segment &first = segments[0], &last = segments[num_segments - 1];
    if (b.is_packed()) return load_packed(row, valid, segments, num_segments, panel);
    if (direct(first, last) && (b.col_stride == 1 || valid % 16 == 0)) {
        load_direct(row, valid, first.begin, last.begin + last.length - first.begin, panel);
        return panel;
    }
    const Loader loader{b, kernels, plan, false, raw, levels};
    loader.load(row, valid, segments, num_segments, rows, Sums{});
    for (int64_t r = valid; r < kernels.nr; ++r) {
        std::memset(rows + r * kTileStride, 0, static_cast<size_t>(kTileStride) * 4);
    }
    kernels.transpose(rows, kTileStride, panel, last.dword + last.dwords);
    return panel;
}

// Bytes without padding between segments are used as they are stored, if panels are as wide as tiles.
const uint32_t* PanelLoader::load_packed(int64_t row, int64_t valid, const Segment* segments, int num_segments,
                                         uint32_t* panel) const {
    const int64_t per_dword = 32 / b.table->bits, nr = kernels.nr;
    const uint32_t* base = packed_panel(b, row);
    const Segment& last = segments[num_segments - 1];
    const bool dense = (last.begin - segments[0].begin) / 4 == last.dword && ceil_div(last.length, 4) == last.dwords;
    if (dense && plan.kind == Kind::s8u8 && per_dword == 4 && nr == kPanelRows)
        return base + segments[0].begin / 4 * nr;
    int32_t zeros[kMaxNr] = {};
    for (int i = 0; i < num_segments; ++i) {
        const Segment& s = segments[i];
        for (int64_t n = 0; plan.kind == Kind::s16 && n < valid; ++n) {
            zeros[n] = packed_offset(b) + zero_at(b, row + n, s.begin);
        }
        uint32_t* to = panel + s.dword * nr;
        const int64_t dwords = ceil_div(s.length, elements_per_dword(plan.kind));
        kernels.spread(base + s.begin / per_dword * kPanelRows, ceil_div(s.length, per_dword), b.table->bits, zeros,
                       to);
        std::memset(to + dwords * nr, 0, static_cast<size_t>((s.dwords - dwords) * nr) * 4);
    }
    return panel;
}

void PanelLoader::load_direct(int64_t row, int64_t valid, int64_t begin, int64_t length, uint32_t* panel) const {
    Panel p;
    p.table = b.table;
    p.length = length;
    p.out = panel;
    const uint8_t* base = static_cast<const uint8_t*>(b.data) + row * b.row_stride + begin * b.table->bits / 8;
    int64_t pitch = b.row_stride;
    if (b.col_stride != 1) {
        Loader{b, kernels, plan, false, raw, levels}.fetch_transposed(row, valid, begin, begin + length);
        base = raw;
        pitch = transposed_pitch(length);
    } else if (b.table->bits == 6) {
        pitch = transposed_pitch(length);
        for (int64_t n = 0; n < valid; ++n) kernels.unpack(base + n * b.row_stride, raw + n * pitch, length, 6);
        base = raw;
    }
    for (int64_t n = 0; n < kernels.nr; ++n) p.rows[n] = base + std::min(n, valid - 1) * pitch;
    if (plan.kind == Kind::s8u8) {
        const ByteForm form = byte_form(b, false, 0);
        p.flip = form.flip;
        p.less = static_cast<uint8_t>(-form.shift);
    } else if (plan.kind == Kind::f32) {
        put_levels(row, valid, begin, length, p);
    }
    kernels.panel[static_cast<int>(plan.kind)](p);
}

// Scales and zero points of the blocks of the rows, those of one block side by side.
void PanelLoader::put_levels(int64_t row, int64_t valid, int64_t begin, int64_t length, Panel& p) const {
    if (!plan.b_folded && b.zero_point == nullptr) return;
    const int64_t block = plan.b_folded ? b.block_cols : int64_t{1} << kOneBlock;
    const int64_t from = begin / block, blocks = (begin + length - 1) / block - from + 1, nr = kernels.nr;
    p.shift = __builtin_ctzll(static_cast<unsigned long long>(block));
    p.first = begin - from * block;
    for (int64_t n = 0; n < nr; ++n) {
        const int64_t r = row + std::min(n, valid - 1);
        if (plan.b_folded) block_scales(b, r, from, blocks, reinterpret_cast<float*>(rows) + n * kTileStride);
        if (b.zero_point == nullptr) continue;
        for (int64_t i = 0; i < blocks; ++i) {
            zeros[i * nr + n] = static_cast<float>(zero_at(b, r, std::max(begin, (from + i) * block)));
        }
    }
    if (plan.b_folded) kernels.transpose(rows, kTileStride, reinterpret_cast<uint32_t*>(scales), blocks);
    p.scales = plan.b_folded ? scales : nullptr;
    p.zeros = b.zero_point == nullptr ? nullptr : zeros;
}

void PanelLoader::load_sums(int64_t row, int64_t valid, const Segment* segments, int num_segments,
                            const uint32_t* panel, const Sums& sums) const {
    if (sums.scale != nullptr) {
        const Loader loader{b, kernels, plan, false, raw, levels};
        loader.scale_segments(row, valid, segments, num_segments, sums.scale, sums.stride);
    }
    const int64_t nr = kernels.nr;
    for (int i = 0; i < num_segments; ++i) {
        const Segment& s = segments[i];
        if (sums.sum != nullptr) kernels.sum_panel(panel + s.dword * nr, s.dwords, sums.sum + i * nr);
        for (int64_t n = 0; sums.zero != nullptr && n < nr; ++n) {
            const int zero = zero_at(b, row + std::min(n, valid - 1), s.begin);
            sums.zero[i * nr + n] = byte_form(b, false, zero).zero;
        }
    }
}

}  // namespace lowbit::cpu::mm
