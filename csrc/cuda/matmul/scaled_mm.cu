// scaled_mm: which tensor-core kernel computes a product. lowbit/backends/cuda.py states the same limits as reasons.
#include <cstring>

#include "cuda/matmul/kernel.cuh"

namespace lowbit {
namespace cuda {
namespace {

const char* make_side(const MmOperand& from, int64_t k, Side* side) {
    side->bits = from.coded ? from.scheme.format.bits : 16;
    side->scales = from.scales;
    if (from.coded) {
        const char* error = make_blocks(from.scheme, from.codes.rows, k, &side->blocks);
        if (error != nullptr) return error;
    }
    const uintptr_t base = reinterpret_cast<uintptr_t>(from.codes.data);
    int align = 16;
    while (align > 1 && (base % align != 0 || from.codes.pitch % align != 0)) align /= 2;
    side->rows = {from.codes.data, from.codes.pitch, (k * side->bits + 7) / 8, from.codes.rows, align};
    return nullptr;
}

bool is_integer(const Side& s) { return s.bits <= 8 && s.blocks.codec.format.kind == kKindInteger; }
bool is_blocked(const Side& s) { return s.bits <= 8 && s.blocks.block_cols > 1; }
bool is_format(const Side& s, int index) { return s.bits == 8 && s.blocks.codec.format == kFormats[index].params; }
bool is_fp8(const Side& s) { return is_format(s, kIndex_fp8_e4m3) || is_format(s, kIndex_fp8_e5m2); }

// What the bf16 kernel cannot take exactly, or its steps of 16 along K cannot follow.
const char* refuse(const Side& s) {
    if (s.bits == 16) return nullptr;
    if (s.blocks.rule.affine != 0)
        return "scaled_mm on CUDA: affine operands have no kernel; use the reference backend";
    if (s.blocks.codec.format.kind == kKindCodebook) return "scaled_mm on CUDA: codebook values are not exact in bf16";
    if (is_blocked(s) && s.blocks.cols % 16 != 0) return "scaled_mm on CUDA: blocks along K must be multiples of 16";
    return nullptr;
}

// Compute capabilities 9.x and 10.x run fp8 mma.sync as exact fp16 products; see MmaFp8.
bool fp8_is_exact(int* error) {
    int device = 0, major = 0;
    *error = cudaGetDevice(&device);
    if (*error == cudaSuccess) *error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9 || major == 10;
}

}  // namespace

const char* launch_scaled_mm(const MmOperand& a, const MmOperand& b, const MmEpilogue& epilogue, int64_t k,
                             void* stream) {
    MmArgs args = {};
    args.m = a.codes.rows;
    args.n = b.codes.rows;
    args.k = k;
    args.epilogue = epilogue;
    const char* refused = make_side(a, k, &args.a);
    if (refused == nullptr) refused = make_side(b, k, &args.b);
    if (refused == nullptr) refused = refuse(args.a);
    if (refused == nullptr) refused = refuse(args.b);
    if (refused != nullptr) return refused;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    const bool blocked = is_blocked(args.a) || is_blocked(args.b);
    if (is_integer(args.a) && is_integer(args.b) && !blocked) {
        // 2^31 / (128 * 128) terms cannot overflow int32.
        if (k > 131071) return "scaled_mm on CUDA: integer products take at most K = 131071; split the product along K";
        return launch_mm_int8(args, on);
    }
    if (is_fp8(args.a) && is_fp8(args.b) && !blocked) {
        int error = 0;
        const bool exact = fp8_is_exact(&error);
        if (error != cudaSuccess) return cudaGetErrorString(static_cast<cudaError_t>(error));
        if (exact) return launch_mm_fp8(args, on);
    }
    return launch_mm_bf16(args, blocked, on);
}

}  // namespace cuda
}  // namespace lowbit
