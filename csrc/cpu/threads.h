// Work on several threads, and the floating environment that every thread needs.
#pragma once

#include <cstdint>

namespace lowbit::cpu {

using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

// Who runs bodies: torch's threads in lowbit_ops, the calling thread alone until this is called.
void set_parallel_for(ParallelFor run, int (*num_threads)());
int num_threads();

// Calls body(begin, end) over disjoint ranges that cover [0, count), of about `grain` at least, in the default floating
// environment. Results must not depend on how the range is cut. Throws what a body throws.
void parallel_for(int64_t count, int64_t grain, Body body, void* context);

template <class F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
    parallel_for(
        count, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); },
        const_cast<F*>(&f));
}

// Rounds to nearest even and honours subnormals within its scope, whatever torch.set_flush_denormal() said.
class FloatEnvironment {
  public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
    uint64_t saved_;
};

}  // namespace lowbit::cpu
