// The emulator's state and scheduler, and the launchers of csrc/cuda as C functions for ctypes.
#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace emulator {

Block block;
dim3 grid_size, block_size, block_index;
int compute_capability_major = 9;
alignas(16) uint8_t dynamic_shared[1 << 17];

static void start() {
    block.body();
    self().done = true;
    ++block.progress;
    while (true) yield();
}

static void resume(Fiber& fiber) {
    if (_setjmp(block.scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.state, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

void run_block(unsigned threads, const dim3& shape) {
    constexpr size_t kStack = 64 * 1024;
    block.fibers.resize(threads);
    block.waiting = 0;
    block.warps.clear();
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = block.fibers[i];
        fiber.stack.resize(kStack);
        fiber.thread = dim3(i % shape.x, i / shape.x);
        fiber.done = fiber.started = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, start, 0);
    }
    for (unsigned done = 0; done < threads;) {
        const uint64_t before = block.progress;
        done = 0;
        for (unsigned i = 0; i < threads; ++i) {
            if (!block.fibers[i].done) {
                block.current = i;
                resume(block.fibers[i]);
            }
            done += block.fibers[i].done;
        }
        if (done < threads && block.progress == before) fail("threads wait for one another forever");
    }
}

}  // namespace emulator

namespace lb = lowbit::cuda;

namespace {

struct View {  // of a matrix: data, rows, cols, elements from row to row, and for floats the Dtype
    void* data;
    int64_t rows, cols, pitch, dtype;
};

lb::Matrix matrix(const View& v) { return {v.data, static_cast<lowbit::Dtype>(v.dtype), v.rows, v.cols, v.pitch}; }
lb::Codes codes(const View& v) { return {static_cast<uint8_t*>(v.data), v.rows, v.cols, v.pitch}; }
lb::Scales scales(void* scale, void* zero_point, void* global_scale) {
    return {scale, zero_point, static_cast<const float*>(global_scale)};
}
std::vector<char> scratch(int64_t bytes) { return std::vector<char>(static_cast<size_t>(bytes), '\x55'); }

}  // namespace

#define LOWBIT_C extern "C" __attribute__((visibility("default"))) const char*

LOWBIT_C lowbit_encode(View x, View out, const int64_t* format, int64_t saturate, int64_t rounding,
                       const int64_t* rng) {
    return lb::launch_encode(matrix(x), codes(out), lowbit::format_params(format), saturate != 0,
                             static_cast<int>(rounding), lowbit::device_rng_params(rng, rng + 2), nullptr);
}

LOWBIT_C lowbit_decode(View from, View out, const int64_t* format) {
    return lb::launch_decode(codes(from), matrix(out), lowbit::format_params(format), nullptr);
}

LOWBIT_C lowbit_pack(View from, View out, int64_t bits) {
    return lb::launch_pack(codes(from), codes(out), static_cast<int>(bits), nullptr);
}
LOWBIT_C lowbit_unpack(View from, View out, int64_t bits) {
    return lb::launch_unpack(codes(from), codes(out), static_cast<int>(bits), nullptr);
}

LOWBIT_C lowbit_global_scale(View x, void* out, const int64_t* scheme) {
    const lowbit::SchemeParams params = lowbit::scheme_params(scheme);
    auto memory = scratch(lb::global_scale_scratch(params, matrix(x).rows));
    return lb::launch_global_scale(matrix(x), static_cast<float*>(out), params, memory.data(), nullptr);
}

LOWBIT_C lowbit_block_range(View x, void* low, void* high, const int64_t* scheme) {
    const lowbit::SchemeParams params = lowbit::scheme_params(scheme);
    auto memory = scratch(lb::block_range_scratch(params, x.rows, x.cols));
    return lb::launch_block_range(matrix(x), static_cast<float*>(low), static_cast<float*>(high), params, memory.data(),
                                  nullptr);
}

LOWBIT_C lowbit_quantize(View x, View out, void* scale, void* zero_point, void* global_scale, const int64_t* scheme,
                         int64_t rounding, const int64_t* rng, int64_t dynamic) {
    const lowbit::SchemeParams params = lowbit::scheme_params(scheme);
    const lb::Scales all = scales(scale, zero_point, global_scale);
    if (dynamic == 0) {
        return lb::launch_quantize_static(matrix(x), all, codes(out), params, static_cast<int>(rounding),
                                          lowbit::device_rng_params(rng, rng + 2), nullptr);
    }
    auto memory = scratch(lb::quantize_scratch(params, x.rows, x.cols));
    return lb::launch_quantize(matrix(x), all, codes(out), params, static_cast<int>(rounding), lowbit::device_rng_params(rng, rng + 2),
                               memory.data(), nullptr);
}

LOWBIT_C lowbit_dequantize(View from, View out, void* scale, void* zero_point, void* global_scale, const int64_t* scheme) {
    return lb::launch_dequantize(codes(from), scales(scale, zero_point, global_scale), matrix(out),
                                 lowbit::scheme_params(scheme), nullptr);
}

LOWBIT_C lowbit_fake_quantize(View x, View out, void* scale, void* zero_point, void* global_scale, const int64_t* scheme,
                              int64_t rounding, const int64_t* rng) {
    const lowbit::SchemeParams params = lowbit::scheme_params(scheme);
    auto memory = scratch(scale == nullptr ? lb::quantize_scratch(params, x.rows, x.cols) : 0);
    return lb::launch_fake_quantize(matrix(x), scales(scale, zero_point, global_scale), matrix(out), params,
                                    static_cast<int>(rounding), lowbit::device_rng_params(rng, rng + 2), memory.data(), nullptr);
}

LOWBIT_C lowbit_fake_quantize_backward(View grad, View x, View out, void* scale, void* zero_point, void* global_scale,
                                       void* grad_scale, const int64_t* scheme) {
    const lowbit::SchemeParams params = lowbit::scheme_params(scheme);
    auto memory = scratch(lb::fake_quantize_backward_scratch(params, x.rows, x.cols, scale == nullptr));
    return lb::launch_fake_quantize_backward(matrix(grad), matrix(x), scales(scale, zero_point, global_scale), matrix(out),
                                             static_cast<float*>(grad_scale), params, memory.data(), nullptr);
}

// An empty scheme (null) is a bf16 operand. `major` is the compute capability to pretend.
LOWBIT_C lowbit_scaled_mm(View a, const int64_t* a_scheme, void* a_scale, void* a_global_scale, View b,
                          const int64_t* b_scheme, void* b_scale, void* b_global_scale, View out, View bias, int64_t cols,
                          int major) {
    auto operand = [](const View& v, const int64_t* scheme, void* scale, void* global_scale) {
        lb::MmOperand side = {};
        side.coded = scheme != nullptr;
        side.codes = codes(v);
        if (side.coded) side.scheme = lowbit::scheme_params(scheme);
        if (!side.coded) side.codes.pitch *= 2;  // bytes of bf16
        side.scales = scales(scale, nullptr, global_scale);
        return side;
    };
    emulator::compute_capability_major = static_cast<int>(major);
    const lb::MmEpilogue epilogue = {out.data, static_cast<lowbit::Dtype>(out.dtype), bias.data,
                                     static_cast<lowbit::Dtype>(bias.dtype)};
    return lb::launch_scaled_mm(operand(a, a_scheme, a_scale, a_global_scale), operand(b, b_scheme, b_scale, b_global_scale),
                                epilogue, cols, nullptr);
}
