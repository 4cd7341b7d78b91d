// In place of csrc/cuda/start.cuh: kernels run on the host, before `launch` returns.
#pragma once

#include <cuda_runtime.h>

namespace lowbit {
namespace cuda {

template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 threads, size_t, cudaStream_t, const Args&... args) {
    emulator::run(kernel, grid, threads, args...);
    return nullptr;
}

inline uint8_t* dynamic_shared() { return emulator::dynamic_shared; }

}  // namespace cuda
}  // namespace lowbit
