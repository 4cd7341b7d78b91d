// Few rows of a where codes are looked up one by one; included in an unnamed namespace after gemm_body.inl. Integers
// with one scale a row are left to the tiles.

constexpr int kTile = 4;

inline VecI permute(VecI v, VecI lanes) { return __builtin_shuffle(v, lanes); }

#include "cpu/matmul/gemv_body.inl"

template <int kBits>
struct Codes : ByF32 {
    static constexpr int kVectors = kBits == 8 ? 1 : kBits == 4 ? 2 : 4;
    static constexpr int kElements = kWidth * kVectors, kBytes = kElements * kBits / 8;
    using Raw = const uint8_t*;
    const float* table;
    explicit Codes(const Table* t) : table(t->f32) {}
    Raw fetch(const uint8_t* from) const { return from; }
    VecF at(Raw raw, int vector) const {
        VecF v;
        for (int l = 0; l < kWidth; ++l) {
            const int bit = (kVectors * l + vector) * kBits, byte = bit / 8;
            const int two = raw[byte] | (bit % 8 + kBits > 8 ? raw[byte + 1] << 8 : 0);
            v[l] = table[two >> (bit % 8) & ((1 << kBits) - 1)];
        }
        return v;
    }
};

constexpr GemvKernels make() {
    GemvKernels k = gemv_kernels();
    k.codes4 = gemv_unit<Codes<4>>();
    k.bytes = gemv_unit<Codes<8>>();
    k.fp16 = gemv_unit<Codes<8>, false>();
    k.codes6 = gemv_unit<Codes<6>, false>();
    return k;
}
constexpr GemvKernels kTable = make();
