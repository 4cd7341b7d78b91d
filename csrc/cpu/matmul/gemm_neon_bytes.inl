// Products of bytes for AArch64; included in an unnamed namespace after gemm_neon.inl and
// few_body.inl.

template <class Dot>
void sum_panel(const uint32_t* panel, int64_t depth, int32_t* sums) {
    const VecI ones = VecI{} + 0x01010101;
    for (int v = 0; v < kVectors; ++v) {
        VecI sum{};
        for (int64_t d = 0; d < depth; ++d) sum = Dot::dot(sum, ones, load<VecI>(panel + d * kNr + v * kWidth));
        store(sums + v * kWidth, sum);
    }
}

template <class Dot>
void add_bytes(Kernels& kernels) {
    kernels.integer = Kind::s8u8;
    kernels.spread = spread_any<true>;
    kernels.sum_panel = sum_panel<Dot>;
    add_kind<Dot>(kernels);
    add_few<FewDotOf<Dot>>(kernels);
}
