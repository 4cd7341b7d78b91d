// A run of elements at a time, whole blocks of both moments: codes to numbers, the step and maxima; then scales, and
// codes again, all in the first-level cache. Memory is read and written once.
#include "cpu/optim/adamw.h"

#include <numeric>
#include <stdexcept>
#include <vector>

#include "common/scales.h"
#include "cpu/runs.h"

namespace lowbit::cpu {
namespace {

// A run, and which of its row's it is: all but a row's last are of the same whole blocks. Counted up, since dividing
// by the width of a block, for each of them, once took a tenth of the time.
struct Piece {
    Run run;
    int64_t index;
};
class Pieces {
  public:
    Pieces(Shape shape, int64_t width) : shape_(shape), width_(width), across_((shape.cols + width - 1) / width) {}
    int64_t count() const { return shape_.rows * across_; }
    int64_t width() const { return width_; }
    Piece first(int64_t i) const { return piece(i / across_, i % across_); }
    Piece after(const Piece& p) const {
        return p.index + 1 < across_ ? piece(p.run.row, p.index + 1) : piece(p.run.row + 1, 0);
    }

  private:
    const Shape shape_;
    const int64_t width_, across_;
    Piece piece(int64_t row, int64_t index) const {
        const int64_t begin = index * width_;
        return {{row, begin, std::min(width_, shape_.cols - begin)}, index};
    }
};

// What a moment needs besides the piece at work.
class Kept {
  public:
    Kept(const Moment& moment, Shape shape, int64_t piece, bool stochastic)
        : moment_(moment),
          width_(moment.scheme.block_cols),
          across_((shape.cols + width_ - 1) / width_),
          blocks_((piece + width_ - 1) / width_),
          row_bytes_(packed_cols(shape.cols, moment.scheme.format.bits)),
          decoder_(moment.scheme.format),
          encoder_(make_encoder(moment.scheme.format, true, stochastic)),
          rule_(scale_rule(moment.scheme)) {
        const bool fits = moment.scheme.block_rows == 1 && width_ <= kMaxMomentBlock;
        if (!fits || rule_.both_ends || moment.scheme.global_scale) {
            throw std::invalid_argument("moments have blocks of one row, at most 2048 columns, and plain scales");
        }
    }

    // Elements of whole blocks, and of whole bytes of packed codes.
    static int64_t unit(const SchemeParams& s) {
        return std::lcm(int64_t{s.block_cols}, int64_t{s.format.bits < 8 ? 8 : 1});
    }

    // One thread's memory, in whole cache lines: vectors across two cost twice.
    struct alignas(64) Numbers {
        float numbers[kRun];
        uint8_t codes[kRun];
        float value[kRun + kAlign], divisor[kRun + kAlign], inverse[kRun + kAlign], each[kRun];
        uint32_t high[kRun + kAlign];
        bool plain;  // make_scales()
    };

    // What the step takes of a piece; `next`: the one after it.
    MomentRow moment_row(const RowKernels& kernels, const Piece& piece, const Piece& next, Numbers& s) const {
        const int bits = moment_.scheme.format.bits;
        const Run& run = piece.run;
        const int64_t first = first_block(piece), count = blocks(piece);
        kernels.read_scales(static_cast<const uint8_t*>(moment_.scale) + first * scale_bytes(rule_.scale_format),
                            nullptr, count, rule_, nullptr, {s.value, s.divisor, nullptr, nullptr});
        const uint8_t* codes = moment_.codes + at(run);
        if (bits < 8) unpack_run(kernels, codes, run.count, bits, s.codes);
        std::fill_n(s.high, count, 0u);
        return {
            decoder_, bits < 8 ? s.codes : codes,  factors(run, Factors::kBlocks, s.value, false, s), width_, s.numbers,
            s.high,   moment_.codes + at(next.run)};
    }

    // The scales of the numbers, then their codes: apart, so that one moment's divisions overlap the other's.
    void make_scales(const RowKernels& kernels, const Piece& piece, Numbers& s) const {
        auto* scales = static_cast<uint8_t*>(moment_.new_scale) + first_block(piece) * scale_bytes(rule_.scale_format);
        s.plain = kernels.make_scales(s.high, nullptr, blocks(piece), rule_, nullptr, scales, nullptr,
                                      {s.value, s.divisor, s.inverse, nullptr});
    }
    void encode(const RowKernels& kernels, const Piece& piece, const uint16_t* noise, const void* ahead,
                Numbers& s) const {
        const int bits = moment_.scheme.format.bits;
        const Run& run = piece.run;
        uint8_t* to = moment_.new_codes + at(run);
        uint8_t* codes = bits == 8 ? to : s.codes;
        const auto mode = has_inverse(rule_, nullptr)  ? Factors::kInverse
                          : s.plain && encoder_.coarse ? Factors::kReciprocal
                                                       : Factors::kBlocks;
        kernels.encode(encoder_, s.numbers, Dtype::kFloat32, run.count, factors(run, mode, s.divisor, s.plain, s),
                       noise, ahead, codes);
        for (int64_t b = 0, count = blocks(piece); !s.plain && b < count; ++b) {
            if (!is_nan(bits_of(s.value[b]))) continue;
            const int64_t n = std::min(width_, run.count - b * width_);
            std::fill_n(codes + b * width_, n, static_cast<uint8_t>(encoder_.canonical));
        }
        if (bits < 8) pack_run(kernels, codes, run.count, bits, to);
    }

  private:
    const Moment& moment_;
    const int64_t width_, across_, blocks_, row_bytes_;  // of a block; blocks of a row and a piece; bytes of a row
    const Decoder decoder_;
    const Encoder encoder_;
    const ScaleRule rule_;

    int64_t at(const Run& run) const { return run.row * row_bytes_ + run.begin * moment_.scheme.format.bits / 8; }
    int64_t first_block(const Piece& piece) const { return piece.run.row * across_ + piece.index * blocks_; }
    int64_t blocks(const Piece& piece) const { return std::min(blocks_, across_ - piece.index * blocks_); }

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

void adamw(const Values& param, const Values& grad, Shape matrix, const Moment& avg, const Moment& rms,
           const AdamWFactors& factors, Rounding rounding, const Rng& rng, const Results& new_param) {
    const bool stochastic = rounding == kStochastic;
    Shape shape = matrix;
    const int64_t unit = std::lcm(Kept::unit(avg.scheme), Kept::unit(rms.scheme));
    if (matrix.cols % unit == 0)
        shape = joined(matrix, {param.stride, grad.stride, new_param.stride, pitch_of(rng, matrix, rounding)});
    const Pieces pieces(shape, unit >= shape.cols ? shape.cols : std::max(unit, kRun / unit * unit));
    const int64_t width = pieces.width();
    if (width > kRun) throw std::invalid_argument("blocks of the moments have no common multiple of at most 2048");
    const Kept kept[] = {{avg, shape, width, stochastic}, {rms, shape, width, stochastic}};
    parallel_for(pieces.count(), (kGrain + width - 1) / width, [&](int64_t begin, int64_t end) {
        static thread_local std::vector<Kept::Numbers> numbers(2);
        const RowKernels& kernels = row_kernels();
        Piece piece = pieces.first(begin);
        for (int64_t i = begin; i < end; ++i) {
            const Piece next = i + 1 < end ? pieces.after(piece) : piece;
            const Run &run = piece.run, &later = next.run;
            kernels.adamw(factors, at_run(param, run), param.dtype, at_run(grad, run), grad.dtype, run.count,
                          kept[0].moment_row(kernels, piece, next, numbers[0]),
                          kept[1].moment_row(kernels, piece, next, numbers[1]), at_run(new_param, run),
                          at_run(param, later));
            const uint16_t* noise = stochastic ? Scratch::mine().noise_at(kernels, rng, run) : nullptr;
            for (int k = 0; k < 2; ++k) kept[k].make_scales(kernels, piece, numbers[k]);
            for (int k = 0; k < 2; ++k) kept[k].encode(kernels, piece, noise, at_run(grad, later), numbers[k]);
            piece = next;
        }
    });
}

}  // namespace lowbit::cpu
