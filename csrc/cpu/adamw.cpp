// A run of elements at a time, whole blocks of both moments: codes to numbers, the step and maxima; then scales, and
// codes again, all in the first-level cache. Memory is read and written once.
#include "cpu/adamw.h"

#include <numeric>
#include <stdexcept>
#include <vector>

#include "common/scales.h"
#include "cpu/runs.h"

namespace lowbit::cpu {
namespace {

// What a moment needs besides the run at work.
class Kept {
  public:
    Kept(const Moment& moment, Shape shape, bool stochastic)
        : moment_(moment),
          width_(moment.scheme.block_cols),
          across_((shape.cols + width_ - 1) / width_),
          row_bytes_(packed_cols(shape.cols, moment.scheme.format.bits)),
          decoder_(moment.scheme.format),
          encoder_(make_encoder(moment.scheme.format, true, stochastic)),
          rule_(scale_rule(moment.scheme)) {
        const bool fits = moment.scheme.block_rows == 1 && width_ <= kMaxMomentBlock;
        if (!fits || moment.scheme.affine || moment.scheme.outer) {
            throw std::invalid_argument("moments have blocks of one row, at most 2048 columns, and plain scales");
        }
    }

    // Whole blocks, and whole bytes of packed codes.
    int64_t unit() const { return std::lcm(width_, int64_t{moment_.scheme.format.bits < 8 ? 8 : 1}); }

    // One thread's memory.
    struct Numbers {
        float numbers[kRun];
        uint8_t codes[kRun];
        float value[kRun + kAlign], divisor[kRun + kAlign], inverse[kRun + kAlign], each[kRun];
        uint32_t high[kRun + kAlign];
    };

    // What the step takes of a run; `next`: the run after it.
    MomentLine line_of(const Lines& line, const Run& run, const Run& next, Numbers& s) const {
        const int bits = moment_.scheme.format.bits;
        const int64_t first = run.row * across_ + run.begin / width_;
        line.read_scales(static_cast<const uint8_t*>(moment_.scale) + first * scale_bytes(rule_.scale_format), nullptr,
                         blocks(run), rule_, nullptr, {s.value, s.divisor, s.inverse, nullptr});
        const uint8_t* codes = moment_.codes + at(run);
        if (bits < 8) unpack_run(line, codes, run.count, bits, s.codes);
        std::fill_n(s.high, blocks(run), 0u);
        return {
            decoder_, bits < 8 ? s.codes : codes, factors(run, Factors::kBlocks, s.value, false, s), width_, s.numbers,
            s.high,   moment_.codes + at(next)};
    }

    void encode(const Lines& line, const Run& run, const uint16_t* noise, const void* ahead, Numbers& s) const {
        const int bits = moment_.scheme.format.bits;
        const int64_t first = run.row * across_ + run.begin / width_;
        const bool plain =
            line.make_scales(s.high, nullptr, blocks(run), rule_, nullptr,
                             static_cast<uint8_t*>(moment_.new_scale) + first * scale_bytes(rule_.scale_format),
                             nullptr, {s.value, s.divisor, s.inverse, nullptr});
        uint8_t* to = moment_.new_codes + at(run);
        uint8_t* codes = bits == 8 ? to : s.codes;
        const auto mode = has_inverse(rule_, nullptr) ? Factors::kInverse
                          : plain && encoder_.coarse  ? Factors::kReciprocal
                                                      : Factors::kBlocks;
        line.encode(encoder_, s.numbers, Dtype::kFloat32, run.count, factors(run, mode, s.divisor, plain, s), noise,
                    ahead, codes);
        for (int64_t b = 0; !plain && b < blocks(run); ++b) {
            if (!is_nan(bits_of(s.value[b]))) continue;
            const int64_t n = std::min(width_, run.count - b * width_);
            std::fill_n(codes + b * width_, n, static_cast<uint8_t>(encoder_.canonical));
        }
        if (bits < 8) pack_run(line, codes, run.count, bits, to);
    }

  private:
    const Moment& moment_;
    const int64_t width_, across_, row_bytes_;
    const Decoder decoder_;
    const Encoder encoder_;
    const ScaleRule rule_;

    int64_t at(const Run& run) const { return run.row * row_bytes_ + run.begin * moment_.scheme.format.bits / 8; }
    int64_t blocks(const Run& run) const { return (run.count + width_ - 1) / width_; }

    // One for each block; where vectors do not divide blocks, one for each element.
    Factors factors(const Run& run, Factors::Mode mode, const float* by, bool finite, Numbers& s) const {
        if (width_ % kAlign == 0 || run.count <= width_) {
            const float* each = mode == Factors::kInverse ? s.inverse : mode == Factors::kReciprocal ? s.value : by;
            return {mode, each, nullptr, width_, width_, finite, s.inverse};
        }
        for (int64_t i = 0; i < run.count; ++i) s.each[i] = by[i / width_];
        return {Factors::kEach, s.each};
    }
};

}  // namespace

void adamw(const Values& param, const Values& grad, Shape shape, const Moment& avg, const Moment& rms,
           const AdamWFactors& factors, Rounding rounding, const Rng& rng, const Results& new_param) {
    const bool stochastic = rounding == kStochastic;
    const Kept kept[] = {{avg, shape, stochastic}, {rms, shape, stochastic}};
    const int64_t unit = std::lcm(kept[0].unit(), kept[1].unit());
    const int64_t width = unit >= shape.cols ? shape.cols : std::max(unit, kRun / unit * unit);
    if (width > kRun) throw std::invalid_argument("blocks of the moments have no common multiple of at most 2048");
    const int64_t across = (shape.cols + width - 1) / width;
    parallel_for(shape.rows * across, (kGrain + width - 1) / width, [&](int64_t begin, int64_t end) {
        static thread_local std::vector<Kept::Numbers> numbers(2);
        const Lines& line = lines();
        for (int64_t i = begin; i < end; ++i) {
            const int64_t at = i % across * width;
            const Run run{i / across, at, std::min(width, shape.cols - at)};
            const int64_t after = std::min(i + 1, end - 1);
            const Run next{after / across, after % across * width, 0};
            line.adamw(factors, at_run(param, run), param.dtype, at_run(grad, run), grad.dtype, run.count,
                       kept[0].line_of(line, run, next, numbers[0]), kept[1].line_of(line, run, next, numbers[1]),
                       at_run(new_param, run), at_run(param, next));
            const uint16_t* noise = stochastic ? Scratch::mine().noise_at(line, rng, run) : nullptr;
            for (int k = 0; k < 2; ++k) kept[k].encode(line, run, noise, at_run(grad, next), numbers[k]);
        }
    });
}

}  // namespace lowbit::cpu
