// The ops without scales, encode, decode, pack and unpack, and dequantize.
#include "cuda/quantize/quantize.cuh"

namespace lowbit {
namespace cuda {
namespace {

struct EncodeArgs {
    Matrix x;
    bool x_aligned;
    Codes out;
    bool out_aligned;
    Codec codec;
    bool saturate;
    Rng rng;
};

template <int Kind, bool Stochastic>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const __grid_constant__ EncodeArgs args, const Octets octets) {
    const uint32_t cols = static_cast<uint32_t>(args.x.cols);
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < octets.total; i += gridDim.x * kThreads) {
        const uint32_t row = i / octets.per_row, col = 8 * (i - row * octets.per_row);
        const int count = cols - col < 8 ? static_cast<int>(cols - col) : 8;
        uint32_t bits[8], noise[8] = {};
        load_octet(bits, args.x, args.x_aligned, row, col, count);
        if (Stochastic) noise_octet(noise, args.rng.offset + row * args.rng.pitch + col, args.rng);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            bits[j] = encode_element<Kind, Stochastic>(float_of(bits[j]), args.codec, 0.0f, args.saturate, noise[j]);
        }
        store_codes(join_codes(bits, 8), args.out, args.out_aligned, 8, row, col, count);
    }
}

template <int Kind, int Mode>
struct RunEncode {
    static const char* run(const EncodeArgs& args, const Octets& octets, cudaStream_t stream) {
        return launch(encode_kernel<Kind, Mode == kStochastic>, grid_of(octets.total), kThreads, 0, stream, args,
                      octets);
    }
};

struct DecodeArgs {
    Codes codes;
    bool codes_aligned;
    int width;  // bits of a stored code
    Matrix out;
    bool out_aligned;
    Scales scales;  // scale null: bare decode
    Blocks blocks;
};

// Codes become values through a table in shared memory. `Scaled`: minus the zero point, times the scale, NaN canonical.
template <bool Scaled>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ DecodeArgs args, const Octets octets) {
    __shared__ uint32_t table[256];
    const Blocks& b = args.blocks;
    const uint32_t mask = (1u << b.codec.format.bits) - 1;
    table[threadIdx.x] = decode_any(threadIdx.x & mask, b.codec);
    __syncthreads();
    const uint32_t cols = static_cast<uint32_t>(args.out.cols);
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < octets.total; i += gridDim.x * kThreads) {
        const uint32_t row = i / octets.per_row, col = 8 * (i - row * octets.per_row);
        const int count = cols - col < 8 ? static_cast<int>(cols - col) : 8;
        const uint64_t stream = load_codes(args.codes, args.codes_aligned, args.width, row, col, count);
        uint32_t out[8] = {};
        BlockScale scale = {};
        if (Scaled) scale = read_scale(args.scales, b, b.index(row, col));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            out[j] = table[code_of(stream, args.width, j) & mask];
            if (!Scaled || j >= count) continue;
            if (!b.whole_octets && j > 0 && (col + j) % b.cols == 0) {
                scale = read_scale(args.scales, b, b.index(row, col + j));
            }
            out[j] = scale_element(out[j], scale.zero_point, scale.value);
        }
        store_octet(out, args.out, args.out_aligned, row, col, count);
    }
}

// One thread an octet: 8 codes, one a byte, to `bits` bytes, and back.
__global__ void __launch_bounds__(kThreads)
    repack_kernel(const __grid_constant__ Codes from, bool from_aligned, int from_bits,
                  const __grid_constant__ Codes to, bool to_aligned, int to_bits, int bits, const Octets octets) {
    const uint32_t cols = static_cast<uint32_t>(from.cols);
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < octets.total; i += gridDim.x * kThreads) {
        const uint32_t row = i / octets.per_row, col = 8 * (i - row * octets.per_row);
        const int count = cols - col < 8 ? static_cast<int>(cols - col) : 8;
        const uint64_t stream = load_codes(from, from_aligned, from_bits, row, col, count);
        uint32_t codes[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) codes[j] = j < count ? code_of(stream, from_bits, j) & ((1u << bits) - 1) : 0;
        store_codes(join_codes(codes, to_bits), to, to_aligned, to_bits, row, col, count);
    }
}

const char* repack(const Codes& from, int from_bits, const Codes& to, int to_bits, int bits, void* stream) {
    Octets octets;
    const char* error = make_octets(from.rows, from.cols, &octets);
    if (error != nullptr) return error;
    return launch(repack_kernel, grid_of(octets.total), kThreads, 0, static_cast<cudaStream_t>(stream), from,
                  codes_aligned(from, from_bits), from_bits, to, codes_aligned(to, to_bits), to_bits, bits, octets);
}

template <bool Scaled>
const char* decode(const DecodeArgs& args, void* stream) {
    Octets octets;
    const char* error = make_octets(args.out.rows, args.out.cols, &octets);
    if (error != nullptr) return error;
    return launch(decode_kernel<Scaled>, grid_of(octets.total), kThreads, 0, static_cast<cudaStream_t>(stream), args,
                  octets);
}

}  // namespace

const char* launch_encode(const Matrix& x, const Codes& out, const FormatParams& format, bool saturate, int rounding,
                          const Rng& rng, void* stream) {
    EncodeArgs args = {x, octets_aligned(x), out, codes_aligned(out, 8), {}, saturate, rng};
    Octets octets;
    const char* error = make_codec(format, &args.codec);
    if (error == nullptr) error = make_octets(x.rows, x.cols, &octets);
    if (error != nullptr) return error;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    return rounding == kStochastic ? for_kind<RunEncode, kStochastic>(format.kind, args, octets, on)
                                   : for_kind<RunEncode, kNearest>(format.kind, args, octets, on);
}

const char* launch_decode(const Codes& codes, const Matrix& out, const FormatParams& format, void* stream) {
    DecodeArgs args = {codes, codes_aligned(codes, 8), 8, out, octets_aligned(out), {}, {}};
    const char* error = make_codec(format, &args.blocks.codec);
    return error != nullptr ? error : decode<false>(args, stream);
}

const char* launch_dequantize(const Codes& codes, const Scales& scales, const Matrix& out, const SchemeParams& scheme,
                              void* stream) {
    const int bits = scheme.format.bits;
    DecodeArgs args = {codes, codes_aligned(codes, bits), bits, out, octets_aligned(out), scales, {}};
    const char* error = make_blocks(scheme, out.rows, out.cols, &args.blocks);
    return error != nullptr ? error : decode<true>(args, stream);
}

const char* launch_pack(const Codes& codes, const Codes& packed, int bits, void* stream) {
    return repack(codes, 8, packed, bits, bits, stream);
}

const char* launch_unpack(const Codes& packed, const Codes& codes, int bits, void* stream) {
    return repack(packed, bits, codes, 8, bits, stream);
}

}  // namespace cuda
}  // namespace lowbit
