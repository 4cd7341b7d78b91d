// quantize, quantize_static, dequantize, fake_quantize and its gradient: scales and elements of a matrix.
//
// Where blocks are small, a tile holds whole ones, and one thread reads it twice, the second time from cache: once for
// the scales, once for the codes. Blocks too large for that (or too few to share out) take two passes over memory,
// whose maxima do not depend on their order.
#include <vector>

#include "common/scales.h"
#include "cpu/codec/codec.h"
#include "cpu/quantize/tiles.h"
#include "cpu/quantize/worker.h"
#include "cpu/row_kernels.h"
#include "cpu/runs.h"

namespace lowbit::cpu {
namespace {

constexpr int64_t kCached = 1 << 18;  // elements of a block that surely stay in the second-level cache

// -- scales -----------------------------------------------------------------------------------------------------------

// The global scale above a row of blocks, or null.
const float* global_scale_at(const Job& job, const float* global_scale, int64_t block_row) {
    return global_scale != nullptr && job.scheme.global_scale == kGlobalScaleRow ? global_scale + block_row
                                                                                 : global_scale;
}

void run_with_scales(const Job& job, const Scales& from) {
    const Blocks& b = job.blocks;
    const int bytes = scale_bytes(job.rule.scale_format);
    plain_tiles(b).run<Worker>(false, [&](Worker& worker, const Tile& t, const Tile&) {
        const int64_t first = t.block_row * b.across + t.block, count = t.blocks(b.width);
        const void* zero_points = job.rule.affine ? static_cast<const uint8_t*>(from.zero_point) + first : nullptr;
        ScaleRow room = worker.room(count);
        if (!job.encoder) room.inverse = nullptr;
        worker.given_scales(job.kernels.read_scales(static_cast<const uint8_t*>(from.scale) + first * bytes,
                                                    zero_points, count, job.rule,
                                                    global_scale_at(job, from.global_scale, t.block_row), room));
        worker.apply(job, t, nullptr);
    });
}

// Blocks that a tile holds whole: scales and codes at once.
void run_in_cache(const Job& job, const Tiles& tiles, const NewScales& to) {
    const Blocks& b = job.blocks;
    const int bytes = scale_bytes(job.rule.scale_format);
    tiles.run<Worker>(false, [&](Worker& worker, const Tile& t, const Tile& next) {
        const int64_t first = t.block_row * b.across + t.block, count = t.blocks(b.width);
        const Stats& stats = worker.measure(job, t);
        worker.made_scales(job.kernels.make_scales(
            stats.high.data(), stats.low.data(), count, job.rule, global_scale_at(job, to.global_scale, t.block_row),
            to.scale ? static_cast<uint8_t*>(to.scale) + first * bytes : nullptr,
            to.zero_point ? static_cast<uint8_t*>(to.zero_point) + first : nullptr, worker.room(count)));
        worker.apply(job, t, &next);
    });
}

// The maxima of all blocks, by index.
struct Maxima {
    explicit Maxima(size_t count) : high(count), low(count) {
        for (size_t i = 0; i < count; ++i) high[i] = low[i] = 0;
    }
    std::vector<std::atomic<uint32_t>> high, low;
};

// In one pass over memory, whatever their size; `both`: not the amax alone.
Maxima measure_all(const RowKernels& kernels, const Values& x, const Blocks& b, bool both) {
    Maxima found(static_cast<size_t>(b.down * b.across));
    // Whole blocks across if they are narrow enough, else pieces of one block.
    const bool whole = b.width <= kRun;
    const int64_t pieces = whole ? 1 : (b.width + kRun - 1) / kRun;
    const int64_t width = whole ? kRun / b.width * b.width : kRun;
    const int64_t columns = whole ? (b.cols + width - 1) / width : b.across * pieces;
    const int64_t height = std::min(b.height, std::max<int64_t>(kGrain / width, 1)),
                  down = (b.height + height - 1) / height;
    parallel_for(b.down * down * columns, 1, [&](int64_t first, int64_t last) {
        Stats stats;
        for (int64_t i = first; i < last; ++i) {
            const int64_t strip = i / columns, column = i % columns, top = strip / down * b.height;
            const int64_t row = top + strip % down * height, bottom = std::min({row + height, top + b.height, b.rows});
            const int64_t block_end = whole ? b.cols : std::min((column / pieces + 1) * b.width, b.cols);
            const int64_t begin = whole ? column * width : column / pieces * b.width + column % pieces * kRun;
            const int64_t end = std::min(begin + width, block_end);
            if (row >= bottom || begin >= end) continue;
            stats.of(kernels, x, b, {row, bottom - row, begin, end, 0, 0, begin / b.width}, both);
            const size_t at = static_cast<size_t>(row / b.height * b.across + begin / b.width);
            for (size_t j = 0; j < static_cast<size_t>((end - begin + b.width - 1) / b.width); ++j) {
                raise(found.high[at + j], stats.high[j]);
                raise(found.low[at + j], stats.low[j]);
            }
        }
    });
    return found;
}

// Large blocks: all statistics, then all scales, then all codes.
void run_in_passes(const Job& job, const NewScales& to) {
    const Blocks& b = job.blocks;
    const size_t count = static_cast<size_t>(b.down * b.across);
    const Maxima maxima = measure_all(job.kernels, job.x, b, job.rule.both_ends);
    // Everything by index of the block, as the row kernels want it: a row of blocks at a time where each has a global
    // scale of its own, whose last vector reaches beyond it.
    const bool by_row = job.scheme.global_scale == kGlobalScaleRow;
    const size_t room = count + kAlign;
    std::vector<uint32_t> most(room), least(room);
    std::vector<float> value(room), divisor(room), inverse(room), zero(room);
    for (size_t i = 0; i < count; ++i) most[i] = maxima.high[i], least[i] = maxima.low[i];
    const ScaleRow all{value.data(), divisor.data(), inverse.data(), zero.data()};
    const int64_t each = by_row ? b.across : b.down * b.across;
    const int bytes = scale_bytes(job.rule.scale_format);
    bool plain = true;
    for (int64_t first = 0; first < b.down * b.across; first += each) {
        const ScaleRow room{all.value + first, all.divisor + first, all.inverse + first, all.zero + first};
        plain &= job.kernels.make_scales(&most[first], &least[first], each, job.rule,
                                         global_scale_at(job, to.global_scale, first / each),
                                         to.scale ? static_cast<uint8_t*>(to.scale) + first * bytes : nullptr,
                                         to.zero_point ? static_cast<uint8_t*>(to.zero_point) + first : nullptr, room);
    }
    // Backwards: what came last is still in the third-level cache.
    plain_tiles(b).run<Worker>(true, [&](Worker& worker, const Tile& t, const Tile&) {
        const int64_t first = t.block_row * b.across + t.block, blocks = t.blocks(b.width);
        const ScaleRow room = worker.room(blocks);
        for (auto part : {&ScaleRow::value, &ScaleRow::divisor, &ScaleRow::inverse, &ScaleRow::zero})
            std::copy_n(all.*part + first, blocks, room.*part);
        worker.made_scales(plain);
        worker.apply(job, t, nullptr);
    });
}

void run_dynamic(Job& job, const NewScales& to) {
    const Blocks& b = job.blocks;
    const Tiles tiles(b, b.height, whole_width(b));
    const bool small = tiles.elements() <= kCached || (b.height == 1 && tiles.count() >= 8 * num_threads());
    small ? run_in_cache(job, tiles, to) : run_in_passes(job, to);
}

// With the scales given, or else with those of x.
void run(Job& job, const Scales& scales) {
    scales.scale ? run_with_scales(job, scales) : run_dynamic(job, {nullptr, nullptr, scales.global_scale});
}

// A scheme on a matrix; rows of whole blocks of their own are one row where they follow each other in memory, if
// vectors divide blocks: else each element has a factor, spread over the rows of a tile. `code_bits`: from code to code
// where they are stored.
struct Plane {
    Plane(Shape s, const SchemeParams& p, std::initializer_list<int64_t> strides, int bits, bool any_order = true)
        : shape(s), scheme(p), code_bits(bits) {
        const int64_t width = std::min(p.block_cols, s.cols);
        if (!any_order || p.block_rows > 1 || (width > 1 && width % kAlign != 0) || s.cols % width != 0) return;
        if (p.global_scale == kGlobalScaleRow) return;
        shape = joined(s, strides, code_bits);
        if (shape.rows < s.rows) scheme.block_cols = width;
    }
    Shape shape;
    SchemeParams scheme;
    int code_bits;
};
constexpr int kUnpackedBits = 8;

// Rows of one element have a byte each: the code, and zeros above it. Readers unpack it, since those need not be zeros.
int written_bits(Shape shape, const SchemeParams& scheme) {
    return shape.cols == 1 ? kUnpackedBits : scheme.format.bits;
}

Job job_of(const Plane& on, const float* global_scale) {
    const ScaleRule rule = scale_rule(on.scheme);
    return {
        row_kernels(), on.shape, on.scheme, on.code_bits, {on.shape, on.scheme}, rule, has_inverse(rule, global_scale)};
}

Job encoding(const Values& x, const Plane& on, const float* global_scale, const Encoder& encoder, const Rng& rng) {
    Job job = job_of(on, global_scale);
    job.x = x;
    job.encoder = &encoder;
    job.rng = rng;
    return job;
}

}  // namespace

void block_range(const Values& x, Shape shape, const SchemeParams& scheme, float* low, float* high) {
    const Maxima maxima = measure_all(row_kernels(), x, {shape, scheme}, true);
    for (size_t i = 0; i < maxima.high.size(); ++i) {
        const uint32_t most = maxima.high[i], least = maxima.low[i];
        const bool broken = most >= kInf || least >= kInf;
        high[i] = float_of(broken ? kNan : most);
        low[i] = float_of(broken ? kNan : least == 0 ? 0 : least | kSign);
    }
}

void quantize(const Values& x, Shape shape, const SchemeParams& scheme, const NewScales& scales, Rounding rounding,
              const Rng& rng, uint8_t* codes) {
    const Encoder encoder = make_encoder(scheme.format, true, rounding == kStochastic);
    const Plane on(shape, scheme, {x.stride, pitch_of(rng, shape, rounding)}, written_bits(shape, scheme),
                   !x.has_factors());
    Job job = encoding(x, on, scales.global_scale, encoder, rng);
    job.codes = codes;
    run_dynamic(job, scales);
}

void quantize_static(const Values& x, Shape shape, const SchemeParams& scheme, const Scales& scales, Rounding rounding,
                     const Rng& rng, uint8_t* codes) {
    const Encoder encoder = make_encoder(scheme.format, true, rounding == kStochastic);
    const Plane on(shape, scheme, {x.stride, pitch_of(rng, shape, rounding)}, written_bits(shape, scheme));
    Job job = encoding(x, on, scales.global_scale, encoder, rng);
    job.codes = codes;
    run_with_scales(job, scales);
}

void dequantize(const uint8_t* codes, Shape shape, const SchemeParams& scheme, const Scales& scales,
                const Results& out) {
    const Decoder decoder(scheme.format);
    const Plane on(shape, scheme, {out.stride}, scheme.format.bits);
    Job job = job_of(on, scales.global_scale);
    job.stored = codes;
    job.decoder = &decoder;
    job.out = out;
    run_with_scales(job, scales);
}

void fake_quantize(const Values& x, Shape shape, const SchemeParams& scheme, const Scales& scales, Rounding rounding,
                   const Rng& rng, const Results& out) {
    const Encoder encoder = make_encoder(scheme.format, true, rounding == kStochastic);
    const Decoder decoder(scheme.format);
    const Plane on(shape, scheme, {x.stride, out.stride, pitch_of(rng, shape, rounding)}, kUnpackedBits);
    Job job = encoding(x, on, scales.global_scale, encoder, rng);
    job.decoder = &decoder;
    job.out = out;
    run(job, scales);
}

void fake_quantize_backward(const Values& grad, const Values& x, Shape shape, const SchemeParams& scheme,
                            const Scales& scales, const Results& grad_x, float* grad_scale) {
    const Encoder encoder = make_encoder(scheme.format, true, false);
    const Decoder decoder(scheme.format);
    // Gradients of scales are summed tile by tile, in the order that the matrix itself gives.
    const Plane on(shape, scheme, {x.stride, grad.stride, grad_x.stride}, kUnpackedBits, grad_scale == nullptr);
    Job job = encoding(x, on, scales.global_scale, encoder, {});
    job.grad = grad;
    job.out = grad_x;
    if (!grad_scale) return run(job, scales);
    const Blocks& b = job.blocks;
    const Tiles tiles = plain_tiles(b);
    job.slots = std::min(kRun, b.cols) / b.width + 2;
    const int64_t slots = tiles.count() * job.slots, count = b.down * b.across;
    std::vector<float> slopes(static_cast<size_t>((job.rule.affine ? 2 : 1) * slots));
    job.slopes = slopes.data();
    if (job.rule.affine) job.zero_slopes = job.slopes + slots;
    job.decoder = &decoder;
    run_with_scales(job, scales);
    const auto finish = [&](const float* sums, float* out) {
        parallel_for(count, kGrain, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const int64_t block = i % b.across;
                float sum = 0.0f;
                tiles.touching(i / b.across, block, [&](int64_t tile, int64_t begin) {
                    sum += sums[tile * job.slots + block - begin / b.width];
                });
                out[i] = sum;
            }
        });
    };
    finish(job.slopes, grad_scale);
    if (job.zero_slopes) finish(job.zero_slopes, grad_scale + count);
}

}  // namespace lowbit::cpu
