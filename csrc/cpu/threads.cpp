#include "cpu/threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowbit::cpu {
namespace {

ParallelFor run_parallel = nullptr;
int (*count_threads)() = nullptr;

// One call's work. Each thread has a share of its own, the same in every call, so that what it reads is in its caches;
// it takes it in pieces, large ones first, and then helps the others, so that none waits for one that runs slower.
class Shares {
  public:
    Shares(int64_t count, int64_t grain, int64_t threads, Body body, void* context)
        : each_((count + threads - 1) / threads),
          least_(std::max(grain, each_ / 16)),
          count_(count),
          body_(body),
          context_(context),
          shares_(static_cast<size_t>(threads)) {
        for (int64_t i = 0; i < threads; ++i) shares_[i].taken = i * each_;
    }

    void work(int64_t thread) {
        const FloatEnvironment environment;
        const int64_t threads = static_cast<int64_t>(shares_.size());
        try {
            for (int64_t i = 0; i < threads; ++i) finish((thread + i) % threads);
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex_);
            error_ = std::current_exception();
        }
    }

    // Throws on the calling thread what a body threw on any.
    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

  private:
    struct alignas(64) Share {
        std::atomic<int64_t> taken;
    };

    void finish(int64_t index) {
        std::atomic<int64_t>& taken = shares_[index].taken;
        const int64_t last = std::min((index + 1) * each_, count_);
        int64_t begin = taken.load(std::memory_order_relaxed);
        while (begin < last) {
            const int64_t end = std::min(begin + std::max(least_, (last - begin) / 2), last);
            if (!taken.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            body_(begin, end, context_);
            begin = taken.load(std::memory_order_relaxed);
        }
    }

    const int64_t each_, least_, count_;
    const Body body_;
    void* const context_;
    std::vector<Share> shares_;
    std::mutex mutex_;
    std::exception_ptr error_;
};

}  // namespace

void set_parallel_for(ParallelFor run, int (*threads)()) {
    run_parallel = run;
    count_threads = threads;
}

int num_threads() { return count_threads ? std::max(count_threads(), 1) : 1; }

void parallel_for(int64_t count, int64_t grain, Body body, void* context) {
    if (count <= 0) return;
    grain = std::max<int64_t>(grain, 1);
    const int64_t most = (count + grain - 1) / grain;
    const int64_t threads = most > 1 && run_parallel ? std::min<int64_t>(num_threads(), most) : 1;
    if (threads == 1) {
        const FloatEnvironment environment;
        return body(0, count, context);
    }
    Shares shares(count, grain, threads, body, context);
    auto work = [](int64_t thread, int64_t last, void* opaque) {
        for (; thread < last; ++thread) static_cast<Shares*>(opaque)->work(thread);
    };
    run_parallel(0, threads, 1, work, &shares);
    shares.rethrow();
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
