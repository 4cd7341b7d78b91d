#include "cpu/conv/depthwise.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/matmul/load.h"
#include "cpu/threads.h"

namespace lowbit::cpu {
namespace {

using mm::Element;
using mm::Operand;

constexpr int64_t kMostTaps = 1024;
constexpr int64_t kSumBytes = 32 << 10;  // sums of some pixels, which stay in the nearest cache

// Whether scales wait for the epilogue, so that sums are those of integers alone.
bool has_integer_sums(const mm::Problem& p) {
    return mm::is_integer_product(p) && p.a.block_cols >= p.depth && p.b.block_cols >= p.depth;
}

int64_t whole_vectors(int64_t channels) { return mm::ceil_div(channels, mm::kMaxLanes) * mm::kMaxLanes; }

// One row of b's codes, one a byte.
void row_codes(const Operand& b, int64_t row, int64_t count, uint8_t* out) {
    const auto* from = static_cast<const uint8_t*>(b.data) + row * b.row_stride;
    if (b.table->bits < 8) return mm::kernels_in_use().unpack(from, out, count, b.table->bits);
    for (int64_t k = 0; k < count; ++k) out[k] = from[k * b.col_stride];
}

}  // namespace

bool is_depthwise(const mm::Window& window, const mm::Problem& problem) {
    if (window.group_channels() != 1 || problem.b.rows != window.channels || problem.depth > kMostTaps) return false;
    return !mm::is_integer_product(problem) || has_integer_sums(problem);
}

Depthwise::Depthwise(const mm::Patches& patches, const mm::Problem& problem)
    : p_(problem),
      window_(patches.window),
      integers_(has_integer_sums(problem)),
      stride_(whole_vectors(patches.window.channels)),
      pixels_(patches.data),
      padding_(patches.padding) {
    thread_local Arena arena;
    const int64_t taps = window_.taps();
    weights_ = reinterpret_cast<uint32_t*>(arena.reserve(static_cast<size_t>((taps + 3) * stride_ * 4)));
    start_ = reinterpret_cast<int32_t*>(weights_ + taps * stride_);
    scales_ = reinterpret_cast<float*>(start_ + stride_);
    bias_ = scales_ + stride_;
    std::memset(weights_, 0, static_cast<size_t>((taps + 3) * stride_ * 4));
    put_weights(patches);
    if (!integers_) put_floats(patches);
}

void Depthwise::put_weights(const mm::Patches& patches) {
    const Operand &a = p_.a, &b = p_.b;
    const int64_t taps = patches.window.taps();
    const int zero_of_x = a.has_codes() ? mm::zero_at(a, 0, 0) : 0;
    std::vector<uint8_t> codes(static_cast<size_t>(taps + mm::kSlack));
    for (int64_t c = 0; c < window_.channels; ++c) {
        row_codes(b, c, taps, codes.data());
        int32_t sum = 0;
        for (int64_t t = 0; t < taps; ++t) {
            const float value = b.table->f32[codes[t]] - static_cast<float>(mm::zero_at(b, c, t));
            if (integers_) {
                const auto weight = static_cast<int32_t>(value);
                reinterpret_cast<int32_t*>(weights_)[t * stride_ + c] = weight;
                sum += weight;
            } else {
                reinterpret_cast<float*>(weights_)[t * stride_ + c] = value * mm::scale_at(b, c, t);
            }
        }
        start_[c] = -zero_of_x * sum;
        scales_[c] = integers_ ? mm::scale_at(b, c, 0) : 1.0f;
        if (p_.bias != nullptr) bias_[c] = mm::float_at(p_.bias, p_.bias_dtype, c * p_.bias_stride);
    }
}

// Pixels as fp32, with room behind them for whole vectors.
void Depthwise::put_floats(const mm::Patches& patches) {
    const Operand& a = p_.a;
    if (a.dtype == Element::f32 && window_.channels % mm::kMaxLanes == 0) return;
    thread_local Arena arena;
    const mm::Kernels& kernels = mm::kernels_in_use();
    const int64_t count = window_.pixels() * window_.channels, zeros = window_.kernel[2] * window_.channels;
    auto* floats = reinterpret_cast<float*>(
        arena.reserve(static_cast<size_t>(count + zeros) * 4 + 2 * mm::kMaxLanes * 4 + 2 * mm::kSlack));
    const float scale = mm::scale_at(a, 0, 0);
    const auto zero = static_cast<float>(a.has_codes() ? mm::zero_at(a, 0, 0) : 0);
    constexpr int64_t kPiece = 4096;
    parallel_for(mm::ceil_div(count, kPiece), 8, [&](int64_t begin, int64_t end) {
        const int64_t from = begin * kPiece, length = std::min(end * kPiece, count) - from;
        const uint8_t* source = patches.data + from * patches.bytes;
        if (!a.has_codes()) return kernels.widen(source, a.dtype, floats + from, length);
        for (int64_t i = 0; i < length; ++i) floats[from + i] = (a.table->f32[source[i]] - zero) * scale;
    });
    float* none = floats + count + mm::kMaxLanes;
    std::memset(none, 0, static_cast<size_t>(zeros + mm::kMaxLanes) * 4);
    pixels_ = reinterpret_cast<const uint8_t*>(floats);
    padding_ = reinterpret_cast<const uint8_t*>(none);
}

void Depthwise::run(int64_t first, int64_t count, void* out, Element dtype) const {
    const mm::Kernels& kernels = mm::kernels_in_use();
    const int64_t taps = window_.taps(), channels = window_.channels, size = dtype == Element::f32 ? 4 : 2;
    const int64_t each = std::max<int64_t>(kSumBytes / (stride_ * 4), 4);
    const mm::Patches patches{window_, pixels_, padding_, integers_ ? 1 : 4, 0, first};
    const float a_scale = integers_ ? mm::scale_at(p_.a, 0, 0) : 1.0f;
    parallel_for(mm::ceil_div(count, each), 1, [&](int64_t begin, int64_t end) {
        thread_local Arena arena;
        const int64_t sum_bytes = each * stride_ * 4, pointers = each * taps * 8;
        uint8_t* sums = arena.reserve(static_cast<size_t>(sum_bytes + pointers + each * 4) + mm::kSlack);
        auto** places = reinterpret_cast<const uint8_t**>(sums + sum_bytes);
        auto* a_scales = reinterpret_cast<float*>(sums + sum_bytes + pointers);
        std::fill_n(a_scales, each, a_scale);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i * each, rows = std::min(each, count - row);
            patches.locate(row, rows, places);
            const mm::Depthwise work{places, rows,   taps, channels, weights_, integers_ ? start_ : nullptr,
                                     sums,   stride_};
            (!integers_              ? kernels.depthwise_f32
             : p_.a.table->is_signed ? kernels.depthwise_s8
                                     : kernels.depthwise_u8)(work);
            mm::Rows done;
            done.row.sum = sums;
            done.row.sum_kind = integers_ ? 1 : 0;
            done.row.scaled = integers_;
            done.row.b_scale = scales_;
            done.row.bias = p_.bias == nullptr ? nullptr : bias_;
            done.row.out = static_cast<uint8_t*>(out) + row * channels * size;
            done.row.out_dtype = dtype;
            done.row.cols = channels;
            done.count = rows;
            done.sum_stride = stride_ * 4;
            done.out_stride = channels * size;
            done.a_scales = a_scales;
            kernels.finish_rows(done);
        }
    });
}

}  // namespace lowbit::cpu
