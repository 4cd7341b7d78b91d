// Products of E4M3 and E5M2 codes straight from memory. MmaFp8 says what the instruction is on each architecture.
#include "cuda/matmul/kernel.cuh"

namespace lowbit {
namespace cuda {

const char* launch_mm_fp8(const MmArgs& args, cudaStream_t stream) {
    const bool a52 = args.a.blocks.codec.format.mantissa == 2, b52 = args.b.blocks.codec.format.mantissa == 2;
    if (a52 && b52) return launch_mm<mm_kernel<MmaFp8<true, true>, false, false>, false>(args, stream);
    if (a52) return launch_mm<mm_kernel<MmaFp8<true, false>, false, false>, false>(args, stream);
    if (b52) return launch_mm<mm_kernel<MmaFp8<false, true>, false, false>, false>(args, stream);
    return launch_mm<mm_kernel<MmaFp8<false, false>, false, false>, false>(args, stream);
}

}  // namespace cuda
}  // namespace lowbit
