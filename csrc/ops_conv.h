// The op conv on CPU tensors, into a tensor that is given: checks, then cpu/conv/conv.h.
#pragma once

#include <vector>

#include "ops_matmul.h"

namespace lowbit {

// As the op's arguments of these names: a number for each axis of x [N, *S, C], two of `padding`.
struct Geometry {
    const std::vector<int64_t>&kernel, &stride, &padding, &dilation;
    int64_t groups;
};
mm::Window window_of(const Tensor& x, const Geometry& geometry);

// How x is quantized: `once`, by one scale, or each patch by itself.
struct PixelRounding {
    Rounded rounded;
    bool once;
};
// `find(rows, cols)` is the scheme in a matrix of that shape, or nothing.
template <class Find>
std::optional<PixelRounding> pixel_rounding(const mm::Window& w, const Find& find, const MaybeTensor& scale,
                                            const MaybeTensor& zero_point, const MaybeTensor& global_scale) {
    constexpr int64_t any = int64_t{1} << 40;  // longer than every axis, as only blocks that span one become
    const std::optional<SchemeParams> whole = find(any, any);
    if (!whole) return std::nullopt;
    const bool once = whole->block_rows == any && whole->block_cols == any;
    const cpu::Shape shape = once ? cpu::Shape{w.pixels(), w.channels} : cpu::Shape{w.rows() * w.groups, w.depth()};
    return PixelRounding{{*find(shape.rows, shape.cols), scale, zero_point, global_scale}, once};
}

// Whether `conv` takes such scales: the groups' own, and of x one for the tensor or some for each patch.
bool serves(const mm::Window& window, const std::optional<PixelRounding>& input, const Coded& weight);

// out [N, *S', O] contiguous. `output`: how the result becomes codes; its scales are given.
void conv(const Tensor& x, const mm::Window& window, const std::optional<PixelRounding>& input, const Coded& weight,
          const MaybeTensor& bias, const std::optional<Rounded>& output, const Tensor& out);

}  // namespace lowbit
