// As much of CUDA as csrc/cuda uses, for the host: kernels run as they stand, one thread block at a time, each thread a
// fiber, so that their indexing and arithmetic can be tested without a GPU. Shared memory is static: one block
// runs at a time. Barriers and warp operations switch fibers; a deadlock is an error, not a hang.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 {
    uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor };

namespace emulator {

struct Fiber {
    ucontext_t context;  // only to start on its own stack; then _setjmp and _longjmp switch, without system calls
    jmp_buf state;
    bool started;
    std::vector<char> stack;
    dim3 thread;
    bool done;
    uint64_t slot[16];  // what this lane offers in the current warp operation
};

// The block of threads that is running.
struct Block {
    std::vector<Fiber> fibers;
    std::function<void()> body;
    jmp_buf scheduler;
    unsigned current = 0, waiting = 0;
    uint64_t turn = 0;                                                             // of the block's barrier
    std::map<std::pair<unsigned, unsigned>, std::pair<unsigned, uint64_t>> warps;  // (warp, mask): waiting, turn
    uint64_t progress = 0;
};

extern Block block;
extern dim3 grid_size, block_size, block_index;
extern int compute_capability_major;
extern uint8_t dynamic_shared[1 << 17];

inline void yield() {
    if (_setjmp(block.fibers[block.current].state) == 0) _longjmp(block.scheduler, 1);
}

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated CUDA: %s\n", what);
    std::abort();
}

// Waits until all threads of the block, or all of a warp's mask, are here.
inline void meet(unsigned& waiting, uint64_t& turn, unsigned of) {
    const uint64_t mine = turn;
    if (++waiting == of) {
        waiting = 0;
        ++turn;
        ++block.progress;
    }
    while (turn == mine) yield();
}
inline void meet_block() { meet(block.waiting, block.turn, static_cast<unsigned>(block.fibers.size())); }
inline void meet_warp(unsigned mask) {
    auto& state = block.warps[{block.current / 32, mask}];
    meet(state.first, state.second, static_cast<unsigned>(__builtin_popcount(mask)));
}

inline Fiber& self() { return block.fibers[block.current]; }
inline Fiber& lane(unsigned index) { return block.fibers[block.current / 32 * 32 + index]; }
inline unsigned my_lane() { return block.current % 32; }

// Every lane of the mask offers words; `read` runs while all offers stand.
template <class Read>
auto exchange(std::initializer_list<uint64_t> offer, Read read, unsigned mask = ~0u) {
    std::copy(offer.begin(), offer.end(), self().slot);
    meet_warp(mask);
    auto result = read();
    meet_warp(mask);
    return result;
}

void run_block(unsigned threads, const dim3& shape);

template <class... Params, class... Args>
void run(void (*kernel)(Params...), dim3 grid, dim3 threads, const Args&... args) {
    grid_size = grid;
    block_size = threads;
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            block_index = dim3(x, y);
            block.body = [&] { kernel(args...); };
            run_block(threads.x * threads.y, threads);
        }
    }
}

}  // namespace emulator

#define threadIdx (emulator::self().thread)
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

inline void __syncthreads() { emulator::meet_block(); }
[[noreturn]] inline void __trap() { emulator::fail("trap"); }

inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, unsigned mask) {
    return emulator::exchange(
        {value}, [&] { return static_cast<uint32_t>(emulator::lane(emulator::my_lane() ^ mask).slot[0]); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
    return emulator::exchange({value}, [] {
        unsigned lanes = 0;
        for (unsigned i = 0; i < 32; ++i) lanes |= static_cast<unsigned>(emulator::lane(i).slot[0] != 0) << i;
        return lanes;
    });
}

inline uint32_t __reduce_max_sync(unsigned mask, uint32_t value) {
    auto largest = [mask] {
        uint32_t found = 0;
        for (unsigned i = 0; i < 32; ++i) {
            if (mask >> i & 1u) found = std::max(found, static_cast<uint32_t>(emulator::lane(i).slot[0]));
        }
        return found;
    };
    return emulator::exchange({value}, largest, mask);
}
inline unsigned __match_all_sync(unsigned mask, unsigned long long value, int* same) {
    auto compare = [mask, value] {
        bool equal = true;
        for (unsigned i = 0; i < 32; ++i)
            equal = equal && ((mask >> i & 1u) == 0 || emulator::lane(i).slot[0] == value);
        return equal;
    };
    *same = emulator::exchange({value}, compare, mask);
    return *same != 0 ? mask : 0;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t atomicMax(uint32_t* to, uint32_t value) {
    const uint32_t old = *to;
    *to = std::max(old, value);
    return old;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = emulator::compute_capability_major;
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
    return cudaSuccess;
}
