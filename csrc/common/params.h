// What kernels know of a format, a scheme and a random stream: plain integers, in the order in which Python sends them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define LOWBIT_HD __host__ __device__ __forceinline__
#else
// Internal linkage: the same function compiled with other instructions must never stand in for this one.
#define LOWBIT_HD static inline
#endif

namespace lowbit {

// Format.params() of lowbit/formats.py.
struct FormatParams {
    int32_t kind;  // kKindFloat, kKindInteger, kKindCodebook, kKindExponent of the generated header
    int32_t bits;
    int32_t exponent;
    int32_t mantissa;
    int32_t bias;
    int32_t is_signed;
    int32_t max_code;
    int32_t inf_code;  // -1: none
    int32_t nan_code;  // -1: none
    int32_t qmin;
    int32_t qmax;
    int32_t codebook;  // position among the codebooks of FORMATS; -1: none
};
constexpr int kFormatParams = 12;
static_assert(sizeof(FormatParams) == kFormatParams * sizeof(int32_t), "format_params() fills every field");

static inline bool operator==(const FormatParams& a, const FormatParams& b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
}

// ids of SCALE_FORMATS in lowbit/scaling.py.
enum ScaleFormat : int32_t { kScaleFp32 = 0, kScaleBf16 = 1, kScaleFp16 = 2, kScaleE8m0 = 3, kScaleE4m3 = 4 };

// SCALE_ROUNDINGS of lowbit/scaling.py: how E8M0 and E4M3 scales are rounded.
enum ScaleRounding : int32_t { kScaleNearest = 0, kScaleFloor = 1, kScaleCeil = 2 };

// GLOBAL_SCALE_SPANS of lowbit/scaling.py: what one global scale above the blocks' scales spans.
enum GlobalScaleSpan : int32_t { kGlobalScaleNone = 0, kGlobalScaleTensor = 1, kGlobalScaleRow = 2 };

// Scheme.params() of lowbit/scaling.py.
struct SchemeParams {
    FormatParams format;
    int64_t block_rows;
    int64_t block_cols;
    int32_t scale_format;
    int32_t scale_rounding;
    int32_t affine;        // a zero point in every block
    int32_t global_scale;  // GlobalScaleSpan
    int32_t full;          // signed integers: the element of largest magnitude takes the least code
};
constexpr int kSchemeParams = kFormatParams + 7;

// How many global scales a scheme has on a matrix of so many rows.
static inline int64_t global_scale_count(const SchemeParams& s, int64_t rows) {
    return s.global_scale == kGlobalScaleRow ? rows : 1;
}

enum Rounding : int32_t { kNearest = 0, kStochastic = 1 };

// What stochastic rounding depends on: docs/numerics.md section 7. `key` is where a device's kernels read seed and
// step.
struct Rng {
    uint64_t seed;
    uint32_t step;
    uint32_t stream;
    uint64_t offset;
    uint64_t pitch;
    const int64_t* key;
};

enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline FormatParams format_params(const int64_t* p) {
    auto at = [p](int i) { return static_cast<int32_t>(p[i]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11)};
}

inline SchemeParams scheme_params(const int64_t* p) {
    const int64_t* rest = p + kFormatParams;
    auto at = [rest](int i) { return static_cast<int32_t>(rest[i]); };
    return {format_params(p), rest[0], rest[1], at(2), at(3), at(4), at(5), at(6)};
}

// Of a host's [seed, step], or of a device's (`key`), and [stream, offset, pitch].
inline Rng rng_params(const int64_t* seed_step, const int64_t* place) {
    return {static_cast<uint64_t>(seed_step[0]), static_cast<uint32_t>(seed_step[1]), static_cast<uint32_t>(place[0]),
            static_cast<uint64_t>(place[1]),     static_cast<uint64_t>(place[2]),     nullptr};
}
inline Rng device_rng_params(const int64_t* key, const int64_t* place) {
    const int64_t none[] = {0, 0};
    Rng rng = rng_params(none, place);
    rng.key = key;
    return rng;
}

}  // namespace lowbit
