#include "cpu/threads.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowbit::cpu {
namespace {

ParallelFor run_parallel = nullptr;
int (*count_threads)() = nullptr;

}  // namespace

void set_parallel_for(ParallelFor run, int (*threads)()) {
    run_parallel = run;
    count_threads = threads;
}

int num_threads() { return count_threads ? std::max(count_threads(), 1) : 1; }

void parallel_for(int64_t count, int64_t grain, Chunk chunk, void* context) {
    struct Task {
        Chunk chunk;
        void* context;
    } task{chunk, context};
    auto guarded = [](int64_t begin, int64_t end, void* opaque) {
        const FloatEnvironment environment;
        const Task* t = static_cast<const Task*>(opaque);
        t->chunk(begin, end, t->context);
    };
    if (count <= 0) return;
    if (!run_parallel || count <= grain) return guarded(0, count, &task);
    run_parallel(0, count, std::max<int64_t>(grain, 1), guarded, &task);
}

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
}
FloatEnvironment::~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FloatEnvironment::FloatEnvironment() : saved_(0) {}
FloatEnvironment::~FloatEnvironment() = default;
#endif

}  // namespace lowbit::cpu
