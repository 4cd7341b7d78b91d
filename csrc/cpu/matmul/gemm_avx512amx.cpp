// What AMX adds (Sapphire Rapids on): register tiles of 16 x 16 sums over 16 dwords of depth, for bf16 and for bytes.
// The panels are the vector kernels' own: rows of a and of b are tiles of 64 bytes as they lie.
// tdpbf16ps flushes subnormals as vdpbf16ps does.
#include <immintrin.h>

#include "cpu/matmul/gemm_kernels.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lowbit::cpu::mm {
namespace {

#include "cpu/matmul/gemm_avx512.inl"

constexpr int64_t kSide = 16;  // rows of a tile, and dwords of its row
constexpr int64_t kARow = kTileStride * 4, kBRow = kNr * 4;

// What add_sums needs to know of the arithmetic.
struct SumsBf16 {
    using Acc = VecF;
    static constexpr Kind kind = Kind::bf16;
};
struct SumsS8U8 {
    using Acc = VecI;
    static constexpr Kind kind = Kind::s8u8;
};

// Tile registers: 0 to 3 sums, 4 and 5 a, 6 and 7 b. All are 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

const TileConfig kConfig;

void enter() { _tile_loadconfig(&kConfig); }

void leave() { _tile_release(); }

template <bool kBytes, bool kBoth>
inline void multiply_add(const Tile& t) {
    const uint32_t *a = t.a, *b = t.b;
    for (int64_t d = 0; d < t.depth; d += kSide, a += kSide, b += kSide * kNr) {
        _tile_loadd(6, b, kBRow);
        _tile_loadd(7, b + kSide, kBRow);
        _tile_loadd(4, a, kARow);
        if constexpr (kBytes) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (kBoth) {
            _tile_loadd(5, a + kSide * kTileStride, kARow);
            if constexpr (kBytes) {
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            } else {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
}

template <bool kBoth>
inline void store_sums(uint32_t* to, int64_t stride) {
    const int64_t bytes = stride * 4;
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + kSide, bytes);
    if constexpr (kBoth) {
        _tile_stored(2, to + kSide * stride, bytes);
        _tile_stored(3, to + kSide * stride + kSide, bytes);
    }
}

inline void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// bf16 without segments: the sums go on from c.
template <bool kBoth>
void resume(const Tile& t) {
    auto* c = static_cast<uint32_t*>(t.c);
    const int64_t bytes = t.c_stride * 4;
    if (t.fresh) {
        clear();
    } else {
        _tile_loadd(0, c, bytes);
        _tile_loadd(1, c + kSide, bytes);
        if constexpr (kBoth) {
            _tile_loadd(2, c + kSide * t.c_stride, bytes);
            _tile_loadd(3, c + kSide * t.c_stride + kSide, bytes);
        }
    }
    multiply_add<false, kBoth>(t);
    store_sums<kBoth>(c, t.c_stride);
}

template <class Sums, bool kScaled, bool kBoth>
void segment(const Tile& t) {
    alignas(64) uint32_t sums[2 * kSide * kNr];
    clear();
    multiply_add<Sums::kind == Kind::s8u8, kBoth>(t);
    store_sums<kBoth>(sums, kNr);
    for (int r = 0; r < (kBoth ? 2 : 1) * kSide; ++r) {
        typename Sums::Acc sum[1][kVectors];
        for (int v = 0; v < kVectors; ++v) {
            sum[0][v] = load<typename Sums::Acc>(sums + r * kNr + v * kWidth);
            if constexpr (Sums::kind == Kind::s8u8) {
                if (t.start != nullptr) sum[0][v] += t.start[r];
            }
        }
        add_sums<Sums, kScaled>(t, r, sum);
    }
}

template <bool kBoth>
void run_bf16(bool scaled, const Tile& t) {
    scaled ? segment<SumsBf16, true, kBoth>(t) : resume<kBoth>(t);
}

template <bool kBoth>
void run_bytes(bool scaled, const Tile& t) {
    scaled ? segment<SumsS8U8, true, kBoth>(t) : segment<SumsS8U8, false, kBoth>(t);
}

void tile_bf16(bool scaled, int rows, const Tile& t) {
    rows > kSide ? run_bf16<true>(scaled, t) : run_bf16<false>(scaled, t);
}

void tile_bytes(bool scaled, int rows, const Tile& t) {
    rows > kSide ? run_bytes<true>(scaled, t) : run_bytes<false>(scaled, t);
}

}  // namespace

bool allow_amx() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
#else
    return false;
#endif
}

void add_avx512amx(Kernels& kernels) {
    kernels.tile[static_cast<int>(Kind::bf16)] = tile_bf16;
    kernels.tile[static_cast<int>(Kind::s8u8)] = tile_bytes;
    kernels.matrix_side = kSide;
    kernels.enter = enter;
    kernels.leave = leave;
}

}  // namespace lowbit::cpu::mm
