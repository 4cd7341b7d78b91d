#include "cpu/conv/conv.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "common/scales.h"
#include "cpu/arena.h"
#include "cpu/conv/depthwise.h"
#include "cpu/matmul/gemv.h"
#include "cpu/matmul/load.h"
#include "cpu/row_kernels.h"
#include "cpu/threads.h"

namespace lowbit::cpu {
namespace {

using mm::Element;
using mm::Operand;
using mm::Patches;
using mm::Window;

// Patches that are quantized one by one, and results that become codes, are made so many bytes at a time.
constexpr int64_t kPatchBytes = int64_t{1} << 20;
constexpr int64_t kResultBytes = int64_t{4} << 20;
constexpr int64_t kLeastRows = 128, kMostRows = 512;  // that a thread takes at a time
constexpr int64_t kKeptBytes = int64_t{32} << 20;     // memory that a thread keeps

int64_t element_bytes(Element dtype) { return dtype == Element::f32 ? 4 : dtype == Element::codes ? 1 : 2; }

Element element_of(Dtype dtype) {
    return dtype == Dtype::kFloat32 ? Element::f32 : dtype == Dtype::kBFloat16 ? Element::bf16 : Element::f16;
}

// Rows [begin, begin + count) of the weight.
Operand some_rows(Operand b, int64_t begin, int64_t count) {
    const int64_t block = begin / b.block_rows;
    b.data = static_cast<const uint8_t*>(b.data) + begin * b.row_stride;
    b.rows = count;
    b.scale = static_cast<const char*>(b.scale) + block * b.scale_row_stride * scale_bytes(b.scale_format);
    if (b.zero_point != nullptr) b.zero_point += block * b.zero_row_stride;
    if (b.global_scale != nullptr) b.global_scale += begin * b.global_scale_row_stride;
    return b;
}

class Convolution {
  public:
    Convolution(const Values& x, const Window& window, const PixelInput* input, const mm::Problem& problem)
        : window_(window), input_(input), p_(problem), patches_{window, nullptr, nullptr, 1} {
        each_patch_ = input != nullptr && !input->once;
        p_.depth = window.depth();
        if (input != nullptr && input->once) {
            quantize_pixels(x);
        } else {
            p_.a.dtype = element_of(x.dtype);
            p_.a.rows = window.rows();
            patches_.bytes = element_bytes(p_.a.dtype);
            patches_.data = static_cast<const uint8_t*>(x.data);
            patches_.padding = padding(0);
        }
        if (each_patch_) {
            if (input->scheme.global_scale == kGlobalScaleTensor)
                global_scale(x, pixels_shape(), input->scheme, &global_scale_);
        } else if (is_depthwise(window_, p_)) {
            depthwise_.emplace(patches_, p_);
        }
    }

    // Rows [first, first + count) of the window, to contiguous rows of all groups' columns.
    void run(int64_t first, int64_t count, void* out, Element dtype) {
        if (depthwise_) return depthwise_->run(first, count, out, dtype);
        if (each_patch_) return quantize_patches(first, count, static_cast<uint8_t*>(out), dtype);
        // Each thread takes rows of its own where there are enough: nothing is waited for between blocks of them. Sums
        // of floats could depend on how many rows are multiplied together.
        const int64_t threads = num_threads();
        const int64_t each = std::clamp(mm::ceil_div(count, 4 * threads), kLeastRows, kMostRows);
        const int64_t pieces = mm::ceil_div(count, each), row_bytes = p_.b.rows * element_bytes(dtype);
        if (threads == 1 || pieces < threads || !mm::is_integer_product(p_)) {
            return multiply_rows(first, count, static_cast<uint8_t*>(out), dtype);
        }
        parallel_for(pieces, 1, [&](int64_t begin, int64_t end) {
            const int64_t row = begin * each, rows = std::min(end * each, count) - row;
            multiply_rows(first + row, rows, static_cast<uint8_t*>(out) + row * row_bytes, dtype);
        });
    }

  private:
    void multiply_rows(int64_t first, int64_t count, uint8_t* out, Element dtype) const {
        for (int64_t g = 0; g < window_.groups; ++g) {
            Operand a = p_.a;
            a.rows = count;
            Patches patches = patches_;
            patches.group = g;
            patches.first = first;
            if (window_.is_pointwise()) {
                const int64_t at = first * window_.channels + g * window_.group_channels();
                a.data = patches_.data + at * patches_.bytes;
                a.row_stride = window_.channels;
            } else if (window_.groups == 1 && count <= mm::kGemvRows) {
                lay_out(patches, a);
            } else {
                a.patches = &patches;
            }
            multiply_group(g, a, out, dtype);
        }
    }

    Shape pixels_shape() const { return {window_.pixels(), window_.channels}; }

    const uint8_t* padding(uint8_t zero) {
        thread_local Arena arena;
        const auto bytes = static_cast<size_t>(window_.kernel[2] * window_.channels * 4 + mm::kSlack);
        uint8_t* made = arena.reserve(bytes);
        std::memset(made, zero, bytes);
        return made;
    }

    // x as codes, with one scale.
    void quantize_pixels(const Values& x) {
        thread_local Arena kept;
        const Shape shape{window_.pixels() / window_.size[2], window_.size[2] * window_.channels};  // long rows
        SchemeParams s = input_->scheme;
        s.block_rows = shape.rows;
        s.block_cols = shape.cols;
        const int64_t bytes = shape.rows * shape.cols + mm::kSlack;
        uint8_t* codes = (bytes > kKeptBytes ? large_ : kept).reserve(static_cast<size_t>(bytes));
        const Values rows{x.data, x.dtype, shape.cols};
        Scales scales = input_->given;
        if (input_->are_codes) {
            std::memcpy(codes, x.data, static_cast<size_t>(shape.rows * shape.cols));
        } else if (scales.scale != nullptr) {
            quantize_static(rows, shape, s, scales, kNearest, {}, codes);
        } else {
            if (s.global_scale) global_scale(rows, shape, s, &global_scale_);
            scales = {scale_, s.affine ? &zero_point_ : nullptr, s.global_scale ? &global_scale_ : nullptr};
            quantize(rows, shape, s, {scale_, s.affine ? &zero_point_ : nullptr, scales.global_scale}, kNearest, {},
                     codes);
        }
        const float zero = 0;
        SchemeParams one = s;
        one.block_rows = one.block_cols = 1;
        uint8_t code;
        quantize_static({&zero, Dtype::kFloat32, 1}, {1, 1}, one, scales, kNearest, {}, &code);
        p_.a = operand_of(s, {window_.rows(), p_.depth}, codes, scales);
        p_.a.block_rows = window_.rows();
        p_.a.block_cols = p_.depth;
        patches_.data = codes;
        patches_.padding = padding(code);
    }

    void lay_out(const Patches& patches, Operand& a) const {
        thread_local Arena arena;
        uint8_t* rows = arena.reserve(static_cast<size_t>(a.rows * p_.depth * patches.bytes + mm::kSlack));
        for (int64_t r = 0; r < a.rows; ++r) {
            patches.fetch(r, 0, p_.depth, rows + r * p_.depth * patches.bytes);
        }
        a.data = rows;
        a.row_stride = p_.depth;
    }

    void multiply_group(int64_t group, const Operand& a, uint8_t* out, Element dtype) const {
        const int64_t cols = p_.b.rows / window_.groups, begin = group * cols;
        mm::Problem part = p_;
        part.a = a;
        if (window_.groups > 1) {
            part.b = some_rows(p_.b, begin, cols);
            part.out_stride = p_.b.rows;
            if (p_.bias != nullptr) {
                part.bias = static_cast<const char*>(p_.bias) + begin * p_.bias_stride * element_bytes(p_.bias_dtype);
            }
        }
        part.out = out + begin * element_bytes(dtype);
        part.out_dtype = dtype;
        mm::multiply(part);
    }

    // Patches of all groups are rows of one matrix, [rows, groups], that is quantized some rows at a time.
    void quantize_patches(int64_t first, int64_t count, uint8_t* out, Element dtype) {
        const int64_t groups = window_.groups, depth = p_.depth, row_bytes = groups * depth * patches_.bytes;
        const int64_t most = std::max<int64_t>(kPatchBytes / row_bytes, 1);
        const SchemeParams& s = input_->scheme;
        const int64_t code_bytes = packed_cols(depth, s.format.bits), across = mm::ceil_div(depth, s.block_cols);
        thread_local Arena floats, codes;
        uint8_t* laid = floats.reserve(static_cast<size_t>(std::min(most, count) * row_bytes));
        const int64_t rows_most = std::min(most, count) * groups;
        const int64_t code_room = mm::ceil_div(rows_most * code_bytes + mm::kSlack, 64) * 64;
        const int64_t scale_room = mm::ceil_div(rows_most * across * scale_bytes(s.scale_format), 64) * 64;
        const int64_t zero_room = mm::ceil_div(rows_most * across, 64) * 64;
        uint8_t* base = codes.reserve(static_cast<size_t>(code_room + scale_room + zero_room + rows_most * 4));
        for (int64_t row = 0; row < count; row += most) {
            const int64_t rows = std::min(most, count - row);
            const Shape shape{rows * groups, depth};
            lay_out_groups(first + row, rows, laid);
            const Values x{laid,
                           p_.a.dtype == Element::f32    ? Dtype::kFloat32
                           : p_.a.dtype == Element::bf16 ? Dtype::kBFloat16
                                                         : Dtype::kFloat16,
                           depth};
            auto* above = s.global_scale == kGlobalScaleTensor
                              ? &global_scale_
                              : reinterpret_cast<float*>(base + code_room + scale_room + zero_room);
            if (s.global_scale == kGlobalScaleRow) global_scale(x, shape, s, above);
            uint8_t* zeros = s.affine ? base + code_room + scale_room : nullptr;
            const Scales scales{base + code_room, zeros, s.global_scale ? above : nullptr};
            quantize(x, shape, s, {base + code_room, zeros, scales.global_scale}, kNearest, {}, base);
            multiply_codes(operand_of(s, shape, base, scales), rows, out + row * p_.b.rows * element_bytes(dtype),
                           dtype);
        }
    }

    void lay_out_groups(int64_t first, int64_t rows, uint8_t* laid) const {
        const int64_t bytes = p_.depth * patches_.bytes;
        parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                for (int64_t g = 0; g < window_.groups; ++g) {
                    Patches patches = patches_;
                    patches.group = g;
                    patches.fetch(first + r, 0, p_.depth, laid + (r * window_.groups + g) * bytes);
                }
            }
        });
    }

    // `all`: the codes of [rows, groups] patches.
    void multiply_codes(const Operand& all, int64_t rows, uint8_t* out, Element dtype) const {
        const int64_t groups = window_.groups;
        for (int64_t g = 0; g < groups; ++g) {
            Operand a = some_rows(all, g, rows);
            a.row_stride *= groups;
            a.scale_row_stride *= groups;
            a.zero_row_stride *= groups;
            a.global_scale_row_stride *= groups;
            multiply_group(g, a, out, dtype);
        }
    }

    const Window& window_;
    const PixelInput* input_;
    mm::Problem p_;
    Patches patches_;
    bool each_patch_ = false;
    std::optional<Depthwise> depthwise_;
    Arena large_;
    // Of x, where they are made of it.
    alignas(8) uint8_t scale_[8] = {};
    uint8_t zero_point_ = 0;
    float global_scale_ = 1;
};

}  // namespace

void conv(const Values& x, const Window& window, const PixelInput* input, mm::Problem problem, const Output* output) {
    Convolution work(x, window, input, problem);
    if (output == nullptr) return work.run(0, window.rows(), problem.out, problem.out_dtype);
    const SchemeParams& s = output->scheme;
    const int64_t cols = problem.b.rows, all = window.rows(), across = mm::ceil_div(cols, s.block_cols);
    const int64_t most = std::max<int64_t>(kResultBytes / (4 * cols) / s.block_rows, 1) * s.block_rows;
    Arena arena;
    void* floats = arena.reserve(static_cast<size_t>(std::min(most, all) * cols * 4));
    for (int64_t row = 0; row < all; row += most) {
        const int64_t rows = std::min(most, all - row), block = row / s.block_rows * across;
        work.run(row, rows, floats, Element::f32);
        const auto* zeros = static_cast<const uint8_t*>(output->scales.zero_point);
        const Scales scales{static_cast<const char*>(output->scales.scale) + block * scale_bytes(s.scale_format),
                            zeros == nullptr ? nullptr : zeros + block, nullptr};
        quantize_static({floats, Dtype::kFloat32, cols}, {rows, cols}, s, scales, kNearest, {},
                        output->codes + row * packed_cols(cols, s.format.bits));
    }
}

}  // namespace lowbit::cpu
