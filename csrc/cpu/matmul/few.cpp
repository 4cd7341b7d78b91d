#include "cpu/matmul/few.h"

#include <algorithm>
#include <cstring>

#include "cpu/arena.h"
#include "cpu/matmul/gemm_cuts.h"
#include "cpu/matmul/load.h"
#include "cpu/matmul/packed.h"
#include "cpu/threads.h"

namespace lowbit::cpu::mm {
namespace {

// How K falls into segments: all of one length but the last.
struct FewCut {
    bool scaled = false;  // scales change along K
    int64_t length = 0;   // elements of a segment
    int64_t segments = 0;
    int64_t per_dword = 0;  // elements of a stored dword
    int64_t dwords = 0;     // stored ones
};

int64_t block_along(const Operand& x, int64_t depth) { return x.block_cols < depth ? x.block_cols : 0; }

// Whether the segments of docs/numerics.md section 9 have one length, in whole dwords.
bool cut(const Problem& p, FewCut& c) {
    const int64_t blocks[] = {block_along(p.a, p.depth), block_along(p.b, p.depth)};
    c.per_dword = 32 / p.b.table->bits;
    c.dwords = ceil_div(p.depth, c.per_dword);
    c.scaled = blocks[0] > 0 || blocks[1] > 0;
    c.length = c.scaled ? kIntegerSegment : p.depth;
    for (const int64_t block : blocks) {
        if (block > 0) c.length = std::min(c.length, block);
    }
    for (const int64_t block : blocks) {
        if (block > 0 && block % c.length != 0) return false;
    }
    c.segments = ceil_div(p.depth, c.length);
    return c.scaled ? c.length % c.per_dword == 0 : p.depth <= kExactTerms;
}

bool signed_bytes(const Operand& a) {
    return a.has_codes() && a.patches == nullptr && a.table->integer && a.table->is_signed && a.table->bits == 8 &&
           a.zero_point == nullptr && a.col_stride == 1;
}

class FewProduct {
  public:
    FewProduct(const Problem& problem, const Kernels& kernels, const FewCut& cut)
        : p_(problem), kernels_(kernels), cut_(cut), run_(problem.b.table->bits == 8 ? kernels.few8 : kernels.few4) {
        thread_local Arena arena;
        Parts parts(arena.reserve(place(Parts(nullptr))));
        place(parts);
        for (int64_t m = 0; m < p_.a.rows; ++m) take_row(m);
    }

    void run() {
        const int64_t panels = ceil_div(p_.b.rows, kPanelRows);
        const bool small = p_.a.rows * p_.b.rows * p_.depth < kSmallProduct;
        parallel_for(panels, small ? panels : 1, [&](int64_t begin, int64_t end) { Panels(*this).run(begin, end); });
    }

  private:
    int64_t a_dwords() const { return cut_.dwords * (cut_.per_dword / 4); }
    int64_t tile_rows(int64_t m) const { return std::min(kFewTile, p_.a.rows - m / kFewTile * kFewTile); }
    // Where the tile of row m begins, in an array with so many numbers for each row.
    static int64_t tile_at(int64_t m, int64_t each) { return m / kFewTile * kFewTile * each; }

    size_t place(Parts parts) {
        parts.take(a_, p_.a.rows * a_dwords());
        parts.take(starts_, p_.a.rows * cut_.segments);
        parts.take(sums_, p_.a.rows * cut_.segments);
        parts.take(scales_, p_.a.rows * cut_.segments);
        parts.take(bytes_, a_dwords() * 4 + kSlack);
        parts.take(levels_, cut_.segments + kSlack);
        return parts.used();
    }

    void take_row(int64_t m) {
        const int64_t rows = tile_rows(m), r = m % kFewTile, n = a_dwords();
        std::memcpy(bytes_, static_cast<const uint8_t*>(p_.a.data) + m * p_.a.row_stride,
                    static_cast<size_t>(p_.depth));
        std::memset(bytes_ + p_.depth, 0, static_cast<size_t>(n * 4 - p_.depth));
        uint32_t* to = a_ + tile_at(m, n) + r;
        const auto* from = reinterpret_cast<const uint32_t*>(bytes_);
        for (int64_t d = 0; d < n; ++d) to[d * rows] = from[d];
        const int64_t block = block_along(p_.a, p_.depth), at = tile_at(m, cut_.segments) + r;
        if (block > 0) {
            block_scales(p_.a, m, 0, ceil_div(p_.depth, block), levels_);
        } else {
            levels_[0] = scale_at(p_.a, m, 0);
        }
        const int32_t zero = packed_offset(p_.b);
        for (int64_t s = 0; s < cut_.segments; ++s) {
            const int64_t begin = s * cut_.length, length = std::min(cut_.length, p_.depth - begin);
            const int32_t sum = kernels_.sum_bytes(bytes_ + begin, length);
            starts_[at + s * rows] = -zero * sum;
            sums_[at + s * rows] = sum;
            scales_[at + s * rows] = levels_[block > 0 ? begin / block : 0];
        }
    }

    // What one thread does.
    class Panels {
      public:
        explicit Panels(const FewProduct& product) : t_(product) {
            thread_local Arena arena;
            place(Parts(arena.reserve(place(Parts(nullptr)))));
        }

        void run(int64_t begin, int64_t end) {
            const FewCut& cut = t_.cut_;
            Few few;
            few.dwords = cut.dwords;
            few.segment = cut.scaled ? cut.length / cut.per_dword : cut.dwords;
            few.sums = sums_;
            for (int64_t panel = begin; panel < end; ++panel) {
                const int64_t row = panel * kPanelRows, valid = std::min(kPanelRows, t_.p_.b.rows - row);
                few.panel = packed_panel(t_.p_.b, row);
                few.b_scales = cut.scaled ? segment_scales(row) : nullptr;
                few.b_zeros = t_.p_.b.zero_point != nullptr ? segment_zeros(row, valid) : nullptr;
                prepare(row, valid);
                for (int64_t m = 0; m < t_.p_.a.rows; m += kFewTile) {
                    const int64_t rows = t_.tile_rows(m), at = tile_at(m, cut.segments);
                    few.a = t_.a_ + tile_at(m, t_.a_dwords());
                    few.starts = t_.starts_ + at;
                    few.a_sums = t_.sums_ + at;
                    few.a_scales = t_.scales_ + at;
                    t_.run_(cut.scaled, static_cast<int>(rows), few);
                    finish(m, rows, row, valid);
                }
            }
        }

      private:
        size_t place(Parts parts) {
            parts.take(scales_, t_.cut_.segments * kPanelRows);
            parts.take(block_scales_, t_.cut_.segments * kPanelRows);
            parts.take(zeros_, t_.p_.b.zero_point != nullptr ? t_.cut_.segments * kPanelRows : 0);
            parts.take(sums_, kFewTile * kPanelRows);
            parts.take(bias_, kPanelRows);
            return parts.used();
        }

        // b's scales, [segments, kPanelRows].
        const float* segment_scales(int64_t row) {
            const Operand& b = t_.p_.b;
            const FewCut& cut = t_.cut_;
            const int64_t block = block_along(b, t_.p_.depth), blocks = block > 0 ? ceil_div(t_.p_.depth, block) : 1;
            const float* of_blocks = panel_scales(b, row, blocks, t_.kernels_, block_scales_);
            if (block == cut.length) return of_blocks;
            for (int64_t s = 0; s < cut.segments; ++s) {
                const int64_t at = block > 0 ? s * cut.length / block * kPanelRows : 0;
                std::copy_n(of_blocks + at, kPanelRows, scales_ + s * kPanelRows);
            }
            return scales_;
        }

        const int32_t* segment_zeros(int64_t row, int64_t valid) {
            for (int64_t s = 0; s < t_.cut_.segments; ++s) {
                for (int64_t n = 0; n < kPanelRows; ++n) {
                    zeros_[s * kPanelRows + n] = n < valid ? zero_at(t_.p_.b, row + n, s * t_.cut_.length) : 0;
                }
            }
            return zeros_;
        }

        void prepare(int64_t row, int64_t valid) {
            const Problem& p = t_.p_;
            if (!t_.cut_.scaled) col_scale_ = panel_scales(p.b, row, 1, t_.kernels_, block_scales_);
            for (int64_t n = 0; p.bias != nullptr && n < valid; ++n) {
                bias_[n] = float_at(p.bias, p.bias_dtype, (row + n) * p.bias_stride);
            }
        }

        void finish(int64_t m, int64_t count, int64_t row, int64_t valid) const {
            const Problem& p = t_.p_;
            const int64_t size = p.out_dtype == Element::f32 ? 4 : 2;
            const int64_t pitch = p.out_stride > 0 ? p.out_stride : p.b.rows;
            Rows rows;
            rows.row.sum_kind = t_.cut_.scaled ? 0 : 1;
            rows.row.sum = sums_;
            rows.row.scaled = !t_.cut_.scaled;
            rows.row.b_scale = col_scale_;
            rows.row.bias = p.bias == nullptr ? nullptr : bias_;
            rows.row.out = static_cast<uint8_t*>(p.out) + (m * pitch + row) * size;
            rows.row.out_dtype = p.out_dtype;
            rows.row.cols = valid;
            rows.count = count;
            rows.sum_stride = kPanelRows * 4;
            rows.out_stride = pitch * size;
            rows.a_scales = t_.cut_.scaled ? nullptr : t_.scales_ + m;  // one segment: a tile's are its rows'
            t_.kernels_.finish_rows(rows);
        }

        const FewProduct& t_;
        float *scales_, *block_scales_, *bias_;
        const float* col_scale_ = nullptr;
        int32_t *zeros_, *sums_;
    };

    const Problem& p_;
    const Kernels& kernels_;
    const FewCut cut_;
    const RunFew run_;
    uint32_t* a_;              // of each tile of rows: [dwords, rows]
    int32_t *starts_, *sums_;  // of each tile: [segments, rows]
    float *scales_, *levels_;
    uint8_t* bytes_;
};

}  // namespace

bool multiply_few(const Problem& p, const Kernels& kernels) {
    const RunFew run = p.b.table->bits == 8 ? kernels.few8 : kernels.few4;
    FewCut c;
    if (run == nullptr || p.a.rows > kFewScaledRows || !is_integer_product(p) || !signed_bytes(p.a) || !cut(p, c)) {
        return false;
    }
    if (!c.scaled && p.a.rows > kFewRows) return false;
    FewProduct(p, kernels, c).run();
    return true;
}

}  // namespace lowbit::cpu::mm
