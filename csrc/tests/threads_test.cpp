// parallel_for on threads of its own: every index once, whatever the grain, and with threads that come late; what a
// body throws on any of them reaches the caller.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/threads.h"

using namespace lowbit::cpu;

namespace {

int threads = 1;

// Each index of [begin, end) by a thread; with more than two the first sleeps, so that others finish its share.
void run(int64_t begin, int64_t end, int64_t, Body body, void* context) {
    std::vector<std::thread> pool;
    for (int64_t i = begin; i < end; ++i) {
        pool.emplace_back([=] {
            if (i == 0 && threads > 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            body(i, i + 1, context);
        });
    }
    for (std::thread& thread : pool) thread.join();
}

bool covers(int64_t count, int64_t grain) {
    std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
    std::atomic<int64_t> small{0};
    for (auto& times : seen) times = 0;
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        if (end - begin < grain) ++small;
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
    });
    for (auto& times : seen) {
        if (times != 1) return false;
    }
    return small <= threads;  // the ends of shares alone
}

bool throws_at(int64_t index) {
    try {
        parallel_for(64, 1, [&](int64_t begin, int64_t end) {
            if (begin <= index && index < end) throw std::out_of_range("index");
        });
    } catch (const std::out_of_range&) {
        return true;
    }
    return false;
}

}  // namespace

int main() {
    set_parallel_for(run, [] { return threads; });
    int failures = 0, cases = 0;
    for (threads = 1; threads <= 7; threads += 2) {
        for (int64_t count : {0, 1, 2, 5, 6, 7, 15, 16, 17, 100, 1000, 4096}) {
            for (int64_t grain : {0, 1, 3, 16, 64, 5000}) {
                ++cases;
                if (covers(count, grain)) continue;
                ++failures;
                std::printf("%d threads, %d in pieces of %d: not each once\n", threads, static_cast<int>(count),
                            static_cast<int>(grain));
            }
        }
        for (int64_t index : {0, 31, 63}) {
            ++cases;
            if (throws_at(index)) continue;
            ++failures;
            std::printf("%d threads: what is thrown at %d is lost\n", threads, static_cast<int>(index));
        }
    }
    std::printf("%d ways to share, %d failures\n", cases, failures);
    return failures > 0;
}
