// Starting a kernel: the one place where the launch syntax and dynamic shared memory stand, so that tests can start
// kernels on the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lowbit {
namespace cuda {

// nullptr, or what CUDA says against it.
template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 threads, size_t shared, cudaStream_t stream,
                   const Args&... args) {
    kernel<<<grid, threads, shared, stream>>>(args...);
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The shared memory that `launch` gave the kernel.
__device__ __forceinline__ uint8_t* dynamic_shared() {
    extern __shared__ __align__(16) uint8_t shared[];
    return shared;
}

}  // namespace cuda
}  // namespace lowbit
