// What BF16 dot products add (Cooper Lake, Zen 4 on). vdpbf16ps flushes subnormals, whatever MXCSR says; the error
// bound of scaled_mm has an absolute term for that (docs/numerics.md section 9).
#include <immintrin.h>

#include "cpu/mm_kernels.h"

namespace lowbit::cpu::mm {
namespace {

#include "cpu/mm_avx512.inl"

struct DotBf16 {
    using Acc = VecF;
    static constexpr Kind kind = Kind::bf16;
    static VecF dot(VecF acc, VecI a, VecI b) { return (VecF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
};

void tile(Kind kind, bool scaled, int rows, const Tile& t) {
    if (kind != Kind::bf16) return kernels_avx512vnni().tile(kind, scaled, rows, t);
    run_tile<DotBf16>(kind, scaled, rows, t);
}

void dots(Kind kind, bool scaled, int rows, const Tile& t) {
    if (kind != Kind::bf16) return kernels_avx512vnni().dots(kind, scaled, rows, t);
    run_dots<DotBf16>(kind, scaled, rows, t);
}

Kernels make() {
    Kernels k = kernels_avx512vnni();
    k.has_bf16 = true;
    k.tile = tile;
    k.dots = dots;
    return k;
}

}  // namespace

const Kernels& kernels_avx512bf16() {
    static const Kernels table = make();
    return table;
}

}  // namespace lowbit::cpu::mm
