#include "cpu/probe.h"

#include <algorithm>
#include <atomic>

#include "cpu/matmul/gemm_kernels.h"
#include "cpu/threads.h"

namespace lowbit::cpu {

bool spin(int arithmetic, int64_t operations) {
    const mm::Kernels& kernels = mm::kernels_in_use();
    const mm::Kind kinds[] = {mm::Kind::f32, mm::Kind::bf16, kernels.integer};
    const auto run = kernels.spin[static_cast<int>(kinds[arithmetic])];
    if (run == nullptr) return false;
    constexpr int64_t kShare = 256;  // steps of one call
    const int64_t done = std::max<int64_t>(run(kShare), 1);
    parallel_for((operations + done - 1) / done, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) run(kShare);
    });
    return true;
}

int32_t read(const void* data, int64_t bytes) {
    constexpr int64_t kLine = 256, kGrain = 1 << 16;
    const auto run = mm::kernels_in_use().read_lines;
    const auto* from = static_cast<const char*>(data);
    std::atomic<int32_t> all{0};
    parallel_for(bytes / kLine, kGrain / kLine,
                 [&](int64_t begin, int64_t end) { all ^= run(from + begin * kLine, end - begin); });
    return all;
}

}  // namespace lowbit::cpu
