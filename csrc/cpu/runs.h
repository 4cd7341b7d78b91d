// Cutting a matrix into runs (pieces of a row that stay in the first-level cache), and what a run needs besides its
// elements: random bits, whole bytes of packed codes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "cpu/codec/codec.h"
#include "cpu/row_kernels.h"
#include "cpu/threads.h"

namespace lowbit::cpu {

// Elements of a run at most; a multiple of 8, so that runs of packed codes begin at whole bytes, and of kAlign.
constexpr int64_t kRun = 2048;
// Elements that are worth a thread of their own.
constexpr int64_t kGrain = 32768;
// Bytes ahead of what is encoded that are fetched, where the next ones follow in memory.
constexpr int64_t kAhead = 2048;
struct Run {
    int64_t row, begin, count;  // columns [begin, begin + count)
};

inline const void* at_run(const Values& x, const Run& run) {
    return advance(x.data, run.row * x.stride + run.begin, x.dtype);
}
inline void* at_run(const Results& x, const Run& run) {
    return advance(x.data, run.row * x.stride + run.begin, x.dtype);
}

// The numbers of a run in fp32, where they lie or in `room`.
inline const float* numbers_at(const RowKernels& kernels, const Values& x, const Run& run, float* room) {
    const void* given = at_run(x, run);
    if (x.dtype == Dtype::kFloat32) return static_cast<const float*>(given);
    kernels.widen(given, x.dtype, run.count, room);
    return room;
}

// A matrix whose rows follow each other in memory is one row, which costs less than many short ones: `strides` are
// those of what is read and written beside codes, random bits among them.
inline Shape joined(Shape shape, std::initializer_list<int64_t> strides, int bits = 8) {
    bool follow = shape.cols * bits % 8 == 0;
    for (int64_t stride : strides) follow &= stride == shape.cols;
    return follow ? Shape{1, shape.rows * shape.cols} : shape;
}

// From row to row of the random bits, for `joined`; without any, as the rows lie.
inline int64_t pitch_of(const Rng& rng, Shape shape, Rounding rounding) {
    return rounding == kStochastic ? static_cast<int64_t>(rng.pitch) : shape.cols;
}

// What one thread works in, kept from call to call.
struct Scratch {
    alignas(64) uint8_t codes[kRun];
    uint16_t noise[kRun + 16];

    // 16 random bits for every element of `run`.
    const uint16_t* noise_at(const RowKernels& kernels, const Rng& rng, const Run& run) {
        const uint64_t first =
            rng.offset + static_cast<uint64_t>(run.row) * rng.pitch + static_cast<uint64_t>(run.begin);
        const int64_t skip = static_cast<int64_t>(first & 7);
        kernels.noise(first >> 3, (skip + run.count + 7) / 8, rng, noise);
        return noise + skip;
    }
    static Scratch& mine() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

// Calls f(scratch, run) over a matrix, on several threads.
template <class F>
void for_runs(Shape shape, const F& f) {
    const int64_t across = (shape.cols + kRun - 1) / kRun;
    const int64_t size = std::max<int64_t>(std::min(shape.cols, kRun), 1);
    parallel_for(shape.rows * across, (kGrain + size - 1) / size, [&](int64_t first, int64_t last) {
        Scratch& scratch = Scratch::mine();
        for (int64_t i = first; i < last; ++i) {
            const int64_t begin = i % across * kRun;
            f(scratch, Run{i / across, begin, std::min(kRun, shape.cols - begin)});
        }
    });
}

inline void pack_run(const RowKernels& kernels, const uint8_t* codes, int64_t count, int bits, uint8_t* packed) {
    if (bits == 8) {
        std::memcpy(packed, codes, static_cast<size_t>(count));
        return;
    }
    const int64_t whole = count / 8, rest = count % 8;
    kernels.pack(codes, whole, bits, packed);
    if (rest == 0) return;
    uint8_t padded[8] = {}, bytes[8];
    std::memcpy(padded, codes + 8 * whole, static_cast<size_t>(rest));
    kernels.pack(padded, 1, bits, bytes);
    std::memcpy(packed + whole * bits, bytes, static_cast<size_t>(packed_cols(rest, bits)));
}

inline void unpack_run(const RowKernels& kernels, const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
    if (bits == 8) {
        std::memcpy(codes, packed, static_cast<size_t>(count));
        return;
    }
    const int64_t whole = count / 8, rest = count % 8;
    kernels.unpack(packed, whole, bits, codes);
    if (rest == 0) return;
    uint8_t bytes[8] = {}, padded[8];
    std::memcpy(bytes, packed + whole * bits, static_cast<size_t>(packed_cols(rest, bits)));
    kernels.unpack(bytes, 1, bits, padded);
    std::memcpy(codes + 8 * whole, padded, static_cast<size_t>(rest));
}

// A maximum that threads share; the order in which they come does not change it.
inline void raise(std::atomic<uint32_t>& shared, uint32_t value) {
    uint32_t now = shared.load(std::memory_order_relaxed);
    while (now < value && !shared.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
    }
}

}  // namespace lowbit::cpu
