// How a product by register tiles is cut, and where its parts lie in memory.
#pragma once

#include <algorithm>

#include "cpu/arena.h"
#include "cpu/matmul/plan.h"

namespace lowbit::cpu::mm {

// Hands out parts of a piece of memory; from null, it only finds how much is needed.
class Parts {
  public:
    explicit Parts(uint8_t* base) : base_(base) {}
    template <class T>
    void take(T*& pointer, int64_t count) {
        pointer = reinterpret_cast<T*>(base_ + used_);
        used_ += (static_cast<size_t>(count) * sizeof(T) + 2 * kSlack - 1) / kSlack * kSlack;
    }
    size_t used() const { return used_; }

  private:
    uint8_t* base_;
    size_t used_ = 0;
};

struct Chunk {
    int64_t begin, end;  // of K
    int64_t first;       // its first segment
    int count;           // its segments
    int64_t dwords;
};

// Cuts rows into register tiles of about the same size: the first `longer` of them are a unit longer.
struct RowTiles {
    int64_t unit, units, count, size, longer;
    RowTiles(int64_t rows, const Plan& plan, const Kernels& kernels, int64_t max_rows)
        : unit(plan.matrix ? kernels.matrix_side
               : rows == 1 ? 1
                           : 2),
          units(ceil_div(rows, unit)),
          count(ceil_div(units, plan.matrix ? 2 : max_rows / 2)),
          size(units / count),
          longer(units % count) {}
    int64_t begin(int64_t tile) const { return unit * (tile * size + std::min(tile, longer)); }
    int64_t padded() const { return unit * units; }
};

// How K is cut.
struct Cuts {
    Chunk* chunks;
    Segment* segments;
    int64_t num_chunks = 0, num_segments = 0;

    Cuts(const Plan& plan, int64_t depth, Arena& arena) {
        const int64_t whole = ceil_div(ceil_div(depth, elements_per_dword(plan.kind)), kTileDepth);
        int64_t blocks = 1;
        if (plan.a_block > 0) blocks += ceil_div(depth, plan.a_block);
        if (plan.b_block > 0) blocks += ceil_div(depth, plan.b_block);
        // Blocks are padded; and two chunks that follow each other would not fit into one.
        const int64_t most = plan.scaled ? 2 * (whole + ceil_div(blocks * plan.unit, kTileDepth)) + 1 : whole;
        place(Parts(arena.reserve(place(Parts(nullptr), most, blocks + most))), most, blocks + most);
        for (int64_t k = 0; k < depth;) {
            const int count = cut_chunk(plan, k, depth, segments + num_segments);
            const Segment& last = segments[num_segments + count - 1];
            chunks[num_chunks++] = {k, last.begin + last.length, num_segments, count, last.dword + last.dwords};
            num_segments += count;
            k = last.begin + last.length;
        }
    }

  private:
    size_t place(Parts parts, int64_t most_chunks, int64_t most_segments) {
        parts.take(chunks, most_chunks);
        parts.take(segments, most_segments);
        return parts.used();
    }
};

}  // namespace lowbit::cpu::mm
