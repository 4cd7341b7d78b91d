// Products of integers on the int8 tensor cores, exact in int32 (the launcher's caller bounds K).
#include "cuda/matmul/kernel.cuh"

namespace lowbit {
namespace cuda {

const char* launch_mm_int8(const MmArgs& args, cudaStream_t stream) {
    const bool decode = args.a.bits != 8 || args.b.bits != 8;
    return decode ? launch_mm<mm_kernel<MmaInt8, true, false>, true>(args, stream)
                  : launch_mm<mm_kernel<MmaInt8, false, false>, false>(args, stream);
}

}  // namespace cuda
}  // namespace lowbit
