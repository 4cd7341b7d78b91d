// One element, and eight of them: loads, stores, codes and values. The arithmetic is csrc/common/numerics.h.
//
// Kernels work on octets: eight neighbouring columns of a row that begin at a multiple of eight. Whatever a code's
// width w, an octet's codes fill exactly w bytes, so threads never share a byte of a packed row.
#pragma once

#include <cuda_runtime.h>

#include "common/numerics.h"
#include "cuda/launch.h"
#include "cuda/start.cuh"
#include "format_table.h"

namespace lowbit {
namespace cuda {

constexpr int kThreads = 256;

// The entries of a codebook of at most 16, by value in a kernel's parameters.
struct Codebook {
    uint32_t thresholds[15];
    uint32_t values[16], weights[16];
    int32_t num_thresholds;
    int32_t zero_code;
};

// A format as kernels take it.
struct Codec {
    FormatParams format;
    Codebook book;
};

inline const char* make_codec(const FormatParams& format, Codec* codec) {
    *codec = Codec{format, {}};
    if (format.kind != kKindCodebook) return nullptr;
    const FormatRow* row = find_format(format);
    if (!row || row->num_thresholds > 15) {
        return "lowbit CUDA kernels know codebooks of the format table with at most 16 entries; use the reference "
               "backend";
    }
    for (int i = 0; i < row->num_thresholds; ++i) codec->book.thresholds[i] = row->thresholds[i];
    for (int i = 0; i <= row->num_thresholds; ++i) {
        codec->book.values[i] = row->values[i];
        codec->book.weights[i] = row->weights[i];
    }
    codec->book.num_thresholds = row->num_thresholds;
    codec->book.zero_code = row->zero_code;
    return nullptr;
}

// -- elements ----------------------------------------------------------------------------------------------------

// The code of v = x / scale. The kind is a template argument, since its branches share nothing.
template <int Kind, bool Stochastic>
LOWBIT_HD uint32_t encode_element(float v, const Codec& codec, float zero_point, bool saturate, uint32_t noise) {
    if (Kind == kKindFloat) return encode_float(bits_of(v), codec.format, saturate, Stochastic, noise);
    if (Kind == kKindInteger) return encode_integer(v, codec.format, zero_point, Stochastic, noise);
    return encode_codebook(v, codec.book, Stochastic, noise);
}

// fp32 bits of a code's value.
template <int Kind>
LOWBIT_HD uint32_t decode_element(uint32_t code, const Codec& codec) {
    if (Kind == kKindFloat) return decode_float(code, codec.format);
    if (Kind == kKindInteger) return bits_of(decode_integer(code, codec.format));
    if (Kind == kKindExponent) return e8m0_value(code);
    return codec.book.values[code & 15u];
}

LOWBIT_HD uint32_t decode_any(uint32_t code, const Codec& codec) {
    switch (codec.format.kind) {
        case kKindFloat:
            return decode_element<kKindFloat>(code, codec);
        case kKindInteger:
            return decode_element<kKindInteger>(code, codec);
        case kKindExponent:
            return decode_element<kKindExponent>(code, codec);
        default:
            return decode_element<kKindCodebook>(code, codec);
    }
}

// Whether v = x / scale is encoded without clamping; `largest` is the format's largest value, as fp32 bits.
template <int Kind>
LOWBIT_HD bool in_range(float v, const Codec& codec, float zero_point, uint32_t largest) {
    if (Kind == kKindInteger) return integer_in_range(v, codec.format, zero_point);
    return (bits_of(v) & kMagnitude) <= largest;
}

// What the elements of a block with Inf or NaN become (docs/numerics.md section 5).
template <int Kind>
LOWBIT_HD uint32_t canonical_code(const Codec& codec) {
    if (Kind == kKindInteger) return 0;
    if (Kind == kKindCodebook) return static_cast<uint32_t>(codec.book.zero_code);
    return static_cast<uint32_t>(codec.format.nan_code >= 0 ? codec.format.nan_code : codec.format.max_code);
}

// value * s, one fp32 product after the exact difference from the zero point; NaN becomes the positive canonical one.
LOWBIT_HD uint32_t scale_element(uint32_t value, float zero_point, float s) {
    const uint32_t y = bits_of((float_of(value) - zero_point) * s);
    return is_nan(y) ? kNan : y;
}

// -- octets ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_bits(const void* data, Dtype dtype, int64_t at) {
    if (dtype == Dtype::kFloat32) return static_cast<const uint32_t*>(data)[at];
    const uint16_t half = static_cast<const uint16_t*>(data)[at];
    return dtype == Dtype::kBFloat16 ? widen_bf16(half) : widen_fp16(half);
}

__device__ __forceinline__ void store_bits(void* data, Dtype dtype, int64_t at, uint32_t bits) {
    if (dtype == Dtype::kFloat32) {
        static_cast<uint32_t*>(data)[at] = bits;
    } else {
        static_cast<uint16_t*>(data)[at] = dtype == Dtype::kBFloat16 ? narrow_bf16(bits) : narrow_fp16(bits);
    }
}

// Whether whole octets of the matrix can move as 16-byte words.
inline bool octets_aligned(const Matrix& x) {
    const int64_t size = x.dtype == Dtype::kFloat32 ? 4 : 2;
    return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.pitch * size % 16 == 0;
}

// fp32 bits of `count` (1 to 8) elements from (row, col); zero beyond them.
__device__ __forceinline__ void load_octet(uint32_t (&bits)[8], const Matrix& x, bool aligned, int64_t row, int64_t col,
                                           int count) {
    const int64_t at = row * x.pitch + col;
    if (!aligned || count < 8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) bits[j] = j < count ? load_bits(x.data, x.dtype, at + j) : 0;
    } else if (x.dtype == Dtype::kFloat32) {
        const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(x.data) + at);
        const uint4 low = from[0], high = from[1];
        bits[0] = low.x, bits[1] = low.y, bits[2] = low.z, bits[3] = low.w;
        bits[4] = high.x, bits[5] = high.y, bits[6] = high.z, bits[7] = high.w;
    } else {
        const uint4 packed = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.data) + at);
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint16_t half = static_cast<uint16_t>(words[j / 2] >> (16 * (j & 1)));
            bits[j] = x.dtype == Dtype::kBFloat16 ? widen_bf16(half) : widen_fp16(half);
        }
    }
}

__device__ __forceinline__ void store_octet(const uint32_t (&bits)[8], const Matrix& x, bool aligned, int64_t row,
                                            int64_t col, int count) {
    const int64_t at = row * x.pitch + col;
    if (!aligned || count < 8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) store_bits(x.data, x.dtype, at + j, bits[j]);
        }
    } else if (x.dtype == Dtype::kFloat32) {
        uint4* to = reinterpret_cast<uint4*>(static_cast<uint32_t*>(x.data) + at);
        to[0] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        to[1] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
    } else {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool bf16 = x.dtype == Dtype::kBFloat16;
            const uint32_t low = bf16 ? narrow_bf16(bits[2 * j]) : narrow_fp16(bits[2 * j]);
            const uint32_t high = bf16 ? narrow_bf16(bits[2 * j + 1]) : narrow_fp16(bits[2 * j + 1]);
            words[j] = low | (high << 16);
        }
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(x.data) + at) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Copies those of `count` elements whose bit of `kept` is set, and +0 for the others; Word is as wide as an element.
template <class Word>
__device__ __forceinline__ void select_octet(const Matrix& from, const Matrix& to, bool aligned, int64_t row,
                                             int64_t col, int count, uint32_t kept) {
    const Word* in = static_cast<const Word*>(from.data) + row * from.pitch + col;
    Word* out = static_cast<Word*>(to.data) + row * to.pitch + col;
    if (!aligned || count < 8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) out[j] = ((kept >> j) & 1u) != 0 ? in[j] : Word{0};
        }
        return;
    }
    constexpr int kWords = 2 * sizeof(Word), kEach = 4 / sizeof(Word);  // 32-bit words of an octet; elements of one
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
        const uint4 packed = reinterpret_cast<const uint4*>(in)[i];
        words[4 * i] = packed.x, words[4 * i + 1] = packed.y, words[4 * i + 2] = packed.z, words[4 * i + 3] = packed.w;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const uint32_t ones = static_cast<uint32_t>(static_cast<Word>(~Word{0})) << (j % kEach * 16);
        if (((kept >> j) & 1u) == 0) words[j / kEach] &= ~ones;
    }
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
        reinterpret_cast<uint4*>(out)[i] =
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
}

// Whether an octet's `bits` bytes can move as one word.
inline bool codes_aligned(const Codes& codes, int bits) {
    return (bits == 2 || bits == 4 || bits == 8) && reinterpret_cast<uintptr_t>(codes.data) % bits == 0 &&
           codes.pitch % bits == 0;
}

// An octet's codes as a little-endian stream of 8 * bits bits (docs/numerics.md section 8), and back.
LOWBIT_HD uint64_t join_codes(const uint32_t (&codes)[8], int bits) {
    uint64_t stream = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) stream |= static_cast<uint64_t>(codes[j]) << (bits * j);
    return stream;
}

LOWBIT_HD uint32_t code_of(uint64_t stream, int bits, int j) {
    return static_cast<uint32_t>(stream >> (bits * j)) & ((1u << bits) - 1u);
}

// Stores the first `count` codes of an octet at column `col` of a packed row; the rest of the last byte must be zero.
__device__ __forceinline__ void store_codes(uint64_t stream, const Codes& to, bool aligned, int bits, int64_t row,
                                            int64_t col, int count) {
    uint8_t* at = to.data + row * to.pitch + (col >> 3) * bits;
    if (aligned && count == 8) {
        if (bits == 8) {
            *reinterpret_cast<uint64_t*>(at) = stream;
        } else if (bits == 4) {
            *reinterpret_cast<uint32_t*>(at) = static_cast<uint32_t>(stream);
        } else {
            *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(stream);
        }
        return;
    }
    const int bytes = (count * bits + 7) >> 3;
    for (int b = 0; b < bytes; ++b) at[b] = static_cast<uint8_t>(stream >> (8 * b));
}

__device__ __forceinline__ uint64_t load_codes(const Codes& from, bool aligned, int bits, int64_t row, int64_t col,
                                               int count) {
    const uint8_t* at = from.data + row * from.pitch + (col >> 3) * bits;
    if (aligned && count == 8) {
        if (bits == 8) return *reinterpret_cast<const uint64_t*>(at);
        if (bits == 4) return *reinterpret_cast<const uint32_t*>(at);
        return *reinterpret_cast<const uint16_t*>(at);
    }
    const int bytes = (count * bits + 7) >> 3;
    uint64_t stream = 0;
    for (int b = 0; b < bytes; ++b) stream |= static_cast<uint64_t>(at[b]) << (8 * b);
    return stream;
}

// The 16 random bits of eight elements with consecutive indices, which lie in at most two Philox blocks.
LOWBIT_HD void noise_octet(uint32_t (&noise)[8], uint64_t index, const Rng& rng) {
    const uint64_t seed = static_cast<uint64_t>(rng.key[0]);
    const uint32_t step = static_cast<uint32_t>(rng.key[1]);
    const Words a = philox(index >> 3, step, rng.stream, seed);
    const Words b = (index & 7u) != 0 ? philox((index >> 3) + 1, step, rng.stream, seed) : a;
    uint32_t w[8] = {a.w[0], a.w[1], a.w[2], a.w[3], b.w[0], b.w[1], b.w[2], b.w[3]};
    // Shifts the 16 numbers by index & 7 in three steps, so that every register index is a constant.
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = (index & 4u) != 0 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = (index & 2u) != 0 ? w[i + 1] : w[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = (index & 1u) != 0 ? (w[i] >> 16) | (w[i + 1] << 16) : w[i];
#pragma unroll
    for (int j = 0; j < 8; ++j) noise[j] = (w[j / 2] >> (16 * (j & 1))) & 0xffffu;
}

// -- grids -------------------------------------------------------------------------------------------------------

// All octets of a matrix, row by row.
struct Octets {
    uint32_t per_row;
    uint32_t total;
};

inline const char* make_octets(int64_t rows, int64_t cols, Octets* octets) {
    const int64_t per_row = (cols + 7) / 8;
    if (per_row > INT32_MAX || rows > INT32_MAX || per_row * rows > INT32_MAX) {
        return "lowbit CUDA kernels take matrices of at most 2^31 groups of 8 columns; split the tensor by rows";
    }
    *octets = {static_cast<uint32_t>(per_row), static_cast<uint32_t>(per_row * rows)};
    return nullptr;
}

// Blocks of kThreads for that many threads; kernels stride over the rest.
inline unsigned grid_of(uint32_t threads) {
    constexpr uint32_t kMaxBlocks = 1u << 16;
    const uint32_t blocks = threads / kThreads + (threads % kThreads != 0);
    return blocks < kMaxBlocks ? blocks : kMaxBlocks;
}

}  // namespace cuda
}  // namespace lowbit
