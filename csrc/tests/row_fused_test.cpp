// Norms, gates and rotations of one instruction set against the scalar code: docs/numerics.md section 15.
#include <algorithm>

#include "row_inputs.h"

namespace lowbit::cpu::test {
namespace {

using Floats = std::vector<float>;

Floats random_floats(size_t size) {
    Floats made(size);
    for (float& x : made) x = static_cast<float>(static_cast<int64_t>(random_bits() % 4001) - 2000) / 512.0f;
    return made;
}

// What every kernel makes of runs of n numbers.
std::vector<Floats> made_by(const RowKernels& k, const float* x, const Floats& a, const Floats& b, int64_t n) {
    std::vector<Floats> made(12, Floats(static_cast<size_t>(n)));
    for (Floats& each : made) std::copy(a.begin(), a.begin() + n, each.begin());
    Floats terms(x, x + n);
    made[0].assign(1, k.sum_terms(terms.data(), n));
    k.add_terms(x, n, made[1].data());
    k.add_products(x, b.data(), n, made[2].data());
    k.norm(x, b.data(), 0.7f, n, made[3].data());
    k.norm_gradient(x, b.data(), 0.3f, 0.7f, n, made[4].data());
    k.gated(Activation::kSilu, x, b.data(), n, made[5].data());
    k.gated(Activation::kGeluTanh, x, b.data(), n, made[6].data());
    k.gated_gradient(Activation::kSilu, a.data(), x, b.data(), n, made[7].data(), made[8].data());
    k.gated_gradient(Activation::kGeluTanh, a.data(), x, b.data(), n, made[9].data(), made[10].data());
    k.rotate(x, a.data(), b.data(), n / 2, n % 3 == 0, made[11].data());
    return made;
}

}  // namespace

// All numbers of the input, in runs of every small size and in long ones.
void test_fused(const char* isa, const RowKernels& kernels, const Input& in) {
    Floats wide(static_cast<size_t>(in.count));
    row_kernels_scalar().widen(in.words.data(), in.dtype, in.count, wide.data());
    const Floats a = random_floats(2048), b = random_floats(2048);
    for (int64_t at = 0, n = 1; at < in.count; at += n, n = n < 70 ? n + 1 : std::min<int64_t>(2048, in.count - at)) {
        n = std::min(n, in.count - at);
        const auto got = made_by(kernels, wide.data() + at, a, b, n);
        const auto wanted = made_by(row_kernels_scalar(), wide.data() + at, a, b, n);
        for (size_t kernel = 0; kernel < got.size(); ++kernel) {
            bool same = true;
            for (size_t i = 0; i < got[kernel].size(); ++i) {
                const uint32_t x = bits_of(got[kernel][i]), y = bits_of(wanted[kernel][i]);
                same = same && (x == y || (is_nan(x) && is_nan(y)));
            }
            expect(same, isa, "a kernel of cpu/fused", {}, in.dtype, static_cast<int>(kernel));
        }
    }
}

}  // namespace lowbit::cpu::test
