// Products on the bf16 tensor cores: every float format of at most 8 bits, int8 and int4 are exact in bf16, and so are
// their products in fp32. Scales constant along K wait for the epilogue; others are applied where a block ends.
#include "cuda/matmul/kernel.cuh"

namespace lowbit {
namespace cuda {

const char* launch_mm_bf16(const MmArgs& args, bool blocked, cudaStream_t stream) {
    return blocked ? launch_mm<mm_kernel<MmaBf16, true, true>, true>(args, stream)
                   : launch_mm<mm_kernel<MmaBf16, true, false>, true>(args, stream);
}

}  // namespace cuda
}  // namespace lowbit
