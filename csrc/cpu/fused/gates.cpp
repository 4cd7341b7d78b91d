// swiglu and rotary: threads over runs and rows.
#include <vector>

#include "cpu/fused/fused.h"
#include "cpu/runs.h"

namespace lowbit::cpu {

void swiglu(Activation activation, const Values& gate, const Values& up, Shape given, const Results& out) {
    const RowKernels& kernels = row_kernels();
    const Shape shape = joined(given, {gate.stride, up.stride, out.stride});
    for_runs(shape, [&](Scratch&, const Run& run) {
        float rooms[2][kRun], y[kRun];
        const float *g = numbers_at(kernels, gate, run, rooms[0]), *u = numbers_at(kernels, up, run, rooms[1]);
        kernels.gated(activation, g, u, run.count, y);
        kernels.narrow(y, out.dtype, run.count, nullptr, at_run(out, run));
    });
}

void swiglu_backward(Activation activation, const Values& grad, const Values& gate, const Values& up, Shape given,
                     const Results& grad_gate, const Results& grad_up) {
    const RowKernels& kernels = row_kernels();
    const Shape shape = joined(given, {grad.stride, gate.stride, up.stride, grad_gate.stride, grad_up.stride});
    for_runs(shape, [&](Scratch&, const Run& run) {
        float rooms[3][kRun], of_gate[kRun], of_up[kRun];
        kernels.gated_gradient(activation, numbers_at(kernels, grad, run, rooms[0]),
                               numbers_at(kernels, gate, run, rooms[1]), numbers_at(kernels, up, run, rooms[2]),
                               run.count, of_gate, of_up);
        kernels.narrow(of_gate, grad_gate.dtype, run.count, nullptr, at_run(grad_gate, run));
        kernels.narrow(of_up, grad_up.dtype, run.count, nullptr, at_run(grad_up, run));
    });
}

void rotary(const Lines& x, const Lines& cos, const Lines& sin, const int64_t (&sizes)[3], int64_t cols, int64_t pairs,
            bool interleaved, void* out) {
    const RowKernels& kernels = row_kernels();
    const int64_t rows = sizes[0] * sizes[1] * sizes[2];
    parallel_for(rows, (kGrain + cols - 1) / cols, [&](int64_t first, int64_t last) {
        std::vector<float> room(static_cast<size_t>(4 * cols));
        float *y = room.data(), *x_room = y + cols, *cos_room = x_room + cols, *sin_room = cos_room + cols;
        for (int64_t row = first; row < last; ++row) {
            const int64_t place[] = {row / (sizes[1] * sizes[2]), row / sizes[2] % sizes[1], row % sizes[2]};
            const auto line = [&](const Lines& lines, int64_t count, float* wide) {
                int64_t begin = 0;
                for (int k = 0; k < 3; ++k) begin += place[k] * lines.strides[k];
                return numbers_at(kernels, Values{lines.data, lines.dtype, 0}, Run{0, begin, count}, wide);
            };
            const float* turned = line(x, cols, x_room);
            kernels.rotate(turned, line(cos, pairs, cos_room), line(sin, pairs, sin_room), pairs, interleaved, y);
            std::copy(turned + 2 * pairs, turned + cols, y + 2 * pairs);
            kernels.narrow(y, x.dtype, cols, nullptr, advance(out, row * cols, x.dtype));
        }
    });
}

}  // namespace lowbit::cpu
