// A run of elements at a time, whole blocks of all moments, in the first-level cache: what the weight and the moments
// are kept in becomes what the step takes; the step; then scales, codes and what else is kept. Memory is read and
// written once.
#include "cpu/optim/step.h"

#include <atomic>
#include <deque>
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

// Where one thread keeps a moment of the piece at work, in whole cache lines: vectors across two cost twice.
struct alignas(64) MomentWork {
    float numbers[kRun];
    uint8_t codes[kRun];
    float value[kRun + kAlign], divisor[kRun + kAlign], inverse[kRun + kAlign], each[kRun];
    uint32_t high[kRun + kAlign];
    bool plain;  // make_scales()
};
struct alignas(64) Work {
    float weight[kRun], grad[kRun];
    uint16_t shorter[kRun];  // of masters
    MomentWork moments[kMaxMoments];
};

// What a moment is kept in. The step takes row(); what it leaves is kept by make_scales() and then write(): apart, so
// that one moment's divisions overlap the other's. `noise`: 16 random bits an element, or null. `ahead`: elements that
// are prefetched.
class Storage {
  public:
    virtual ~Storage() = default;
    virtual MomentRow row(const RowKernels& kernels, const Piece& piece, const Piece& next, MomentWork& w) const = 0;
    virtual void make_scales(const RowKernels&, const Piece&, MomentWork&) const {}
    virtual void write(const RowKernels& kernels, const Piece& piece, const uint16_t* noise, const void* ahead,
                       MomentWork& w) const = 0;
    // Whether what write() has left is finite: of codes their scales.
    virtual bool finite(const RowKernels& kernels, const Piece& piece, const MomentWork& w) const = 0;
};

class Floats : public Storage {
  public:
    Floats(const FloatMoment& moment, Shape shape, bool looks) : moment_(moment), cols_(shape.cols), looks_(looks) {}

    MomentRow row(const RowKernels& kernels, const Piece& piece, const Piece&, MomentWork& w) const override {
        const void* from = advance(moment_.numbers, at(piece.run), moment_.dtype);
        if (moment_.dtype == Dtype::kFloat32) {
            void* to = advance(moment_.new_numbers, at(piece.run), moment_.dtype);
            return {nullptr, static_cast<const float*>(from), static_cast<float*>(to)};
        }
        kernels.widen(from, moment_.dtype, piece.run.count, w.numbers);
        return {nullptr, w.numbers, w.numbers};
    }
    void write(const RowKernels& kernels, const Piece& piece, const uint16_t* noise, const void*,
               MomentWork& w) const override {
        if (moment_.dtype == Dtype::kFloat32) return;
        kernels.narrow(w.numbers, moment_.dtype, piece.run.count, noise,
                       advance(moment_.new_numbers, at(piece.run), moment_.dtype));
    }
    bool finite(const RowKernels& kernels, const Piece& piece, const MomentWork&) const override {
        if (!looks_) return true;
        const void* numbers = advance(moment_.new_numbers, at(piece.run), moment_.dtype);
        uint32_t high = 0;
        kernels.block_stats(numbers, moment_.dtype, piece.run.count, piece.run.count, false, &high, nullptr);
        return high < kInf;
    }

  private:
    const FloatMoment& moment_;
    const int64_t cols_;
    const bool looks_;

    int64_t at(const Run& run) const { return run.row * cols_ + run.begin; }
};

// What the codes of one moment of all tensors share.
struct Coding {
    Coding(const SchemeParams& scheme, bool stochastic)
        : decoder(scheme.format), encoder(make_encoder(scheme.format, true, stochastic)), rule(scale_rule(scheme)) {}
    const Decoder decoder;
    const Encoder encoder;
    const ScaleRule rule;
};

// Codes with scales, which are made anew from the numbers of each block.
class Codes : public Storage {
  public:
    Codes(const CodedMoment& moment, const Coding& coding, Shape shape, int64_t piece)
        : moment_(moment),
          width_(moment.scheme.block_cols),
          across_((shape.cols + width_ - 1) / width_),
          blocks_((piece + width_ - 1) / width_),
          row_bytes_(packed_cols(shape.cols, moment.scheme.format.bits)),
          decoder_(coding.decoder),
          encoder_(coding.encoder),
          rule_(coding.rule) {
        const bool fits = moment.scheme.block_rows == 1 && width_ <= kMaxMomentBlock;
        if (!fits || rule_.both_ends || moment.scheme.global_scale) {
            throw std::invalid_argument("moments have blocks of one row, at most 2048 columns, and plain scales");
        }
    }

    MomentRow row(const RowKernels& kernels, const Piece& piece, const Piece& next, MomentWork& s) const override {
        const int bits = moment_.scheme.format.bits;
        const Run& run = piece.run;
        const int64_t first = first_block(piece), count = blocks(piece);
        kernels.read_scales(static_cast<const uint8_t*>(moment_.scale) + first * scale_bytes(rule_.scale_format),
                            nullptr, count, rule_, nullptr, {s.value, s.divisor, nullptr, nullptr});
        const uint8_t* codes = moment_.codes + at(run);
        if (bits < 8) unpack_run(kernels, codes, run.count, bits, s.codes);
        std::fill_n(s.high, count, 0u);
        return {&decoder_,
                nullptr,
                s.numbers,
                bits < 8 ? s.codes : codes,
                factors(run, Factors::kBlocks, s.value, false, s),
                width_,
                s.high,
                moment_.codes + at(next.run)};
    }

    void make_scales(const RowKernels& kernels, const Piece& piece, MomentWork& s) const override {
        auto* scales = static_cast<uint8_t*>(moment_.new_scale) + first_block(piece) * scale_bytes(rule_.scale_format);
        s.plain = kernels.make_scales(s.high, nullptr, blocks(piece), rule_, nullptr, scales, nullptr,
                                      {s.value, s.divisor, s.inverse, nullptr});
    }
    void write(const RowKernels& kernels, const Piece& piece, const uint16_t* noise, const void* ahead,
               MomentWork& s) const override {
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
    bool finite(const RowKernels&, const Piece& piece, const MomentWork& s) const override {
        if (s.plain) return true;
        const auto is_finite = [](float scale) { return (bits_of(scale) & kMagnitude) < kInf; };
        return std::all_of(s.value, s.value + blocks(piece), is_finite);
    }

  private:
    const CodedMoment& moment_;
    const int64_t width_, across_, blocks_, row_bytes_;  // of a block; blocks of a row and a piece; bytes of a row
    const Decoder& decoder_;
    const Encoder& encoder_;
    const ScaleRule& rule_;

    int64_t at(const Run& run) const { return run.row * row_bytes_ + run.begin * moment_.scheme.format.bits / 8; }
    int64_t first_block(const Piece& piece) const { return piece.run.row * across_ + piece.index * blocks_; }
    int64_t blocks(const Piece& piece) const { return std::min(blocks_, across_ - piece.index * blocks_); }

    // One for each block; where vectors do not divide blocks, one for each element.
    Factors factors(const Run& run, Factors::Mode mode, const float* by, bool finite, MomentWork& s) const {
        if (width_ % kAlign == 0 || run.count <= width_) {
            const float* each = mode == Factors::kInverse ? s.inverse : mode == Factors::kReciprocal ? s.value : by;
            return {mode, each, nullptr, width_, width_, finite, s.inverse};
        }
        for (int64_t i = 0; i < run.count; ++i) s.each[i] = by[i / width_];
        return {Factors::kEach, s.each};
    }
};

// A moment's storage, in place.
class Kept {
  public:
    void keep(const Moment& moment, const std::optional<Coding>& coding, Shape shape, int64_t width, bool looks) {
        if (const auto* coded = std::get_if<CodedMoment>(&moment)) {
            at_ = &kept_.emplace<Codes>(*coded, *coding, shape, width);
        } else {
            at_ = &kept_.emplace<Floats>(std::get<FloatMoment>(moment), shape, looks);
        }
    }
    const Storage* operator->() const { return at_; }

  private:
    std::variant<std::monostate, Codes, Floats> kept_;
    const Storage* at_ = nullptr;
};

// What the step takes of a weight, and what becomes of the number that it leaves.
class Weights {
  public:
    Weights(const Weight& weight, Shape shape)
        : weight_(weight),
          cols_(shape.cols),
          direct_(weight.kind == Weight::kNone && !weight.rng),
          float32_(weight.kind == Weight::kFloat32) {}

    void open(const RowKernels& kernels, const Run& run, const Run& next, Work& w, StepRow& row) const {
        const void* param = at_run(weight_.param, run);
        row.dtype = direct_ ? weight_.param.dtype : Dtype::kFloat32;
        row.param = row.new_param = w.weight;
        row.ahead = at_run(weight_.param, next);
        if (direct_) {
            row.param = param, row.new_param = at_run(weight_.new_param, run);
        } else if (float32_) {
            // What something else has written to the parameter is its weight; elsewhere the master is.
            const float* master = static_cast<const float*>(weight_.master) + at(run);
            const auto* now = static_cast<const uint16_t*>(param);
            kernels.narrow(master, weight_.param.dtype, run.count, nullptr, w.shorter);
            kernels.widen(param, weight_.param.dtype, run.count, w.weight);
            for (int64_t i = 0; i < run.count; ++i) w.weight[i] = w.shorter[i] == now[i] ? master[i] : w.weight[i];
            row.new_param = static_cast<float*>(weight_.new_master) + at(run);
            row.ahead = static_cast<const float*>(weight_.master) + at(next);
        } else if (weight_.kind == Weight::kResidual) {
            kernels.join24(static_cast<const uint16_t*>(param), static_cast<const int8_t*>(weight_.master) + at(run),
                           run.count, w.weight);
        } else {
            kernels.widen(param, weight_.param.dtype, run.count, w.weight);
        }
    }
    void close(const RowKernels& kernels, const Run& run, const StepRow& row) const {
        if (direct_) return;
        const auto* numbers = static_cast<const float*>(row.new_param);
        void* param = at_run(weight_.new_param, run);
        if (weight_.kind == Weight::kResidual) {
            return kernels.split24(numbers, run.count, static_cast<uint16_t*>(param),
                                   static_cast<int8_t*>(weight_.new_master) + at(run));
        }
        const uint16_t* noise = weight_.rng ? Scratch::mine().noise_at(kernels, *weight_.rng, run) : nullptr;
        kernels.narrow(numbers, weight_.new_param.dtype, run.count, noise, param);
    }

  private:
    const Weight& weight_;
    const int64_t cols_;
    const bool direct_, float32_;  // the step reads and writes the parameter, or the master

    int64_t at(const Run& run) const { return run.row * cols_ + run.begin; }
};

// Elements of whole blocks, and of whole bytes of packed codes.
int64_t unit(const Moment& moment) {
    const auto* coded = std::get_if<CodedMoment>(&moment);
    if (!coded) return 1;
    return std::lcm(coded->scheme.block_cols, int64_t{coded->scheme.format.bits < 8 ? 8 : 1});
}

int64_t pitch_of(const std::optional<Rng>& rng, Shape shape) {
    return pitch_of(rng.value_or(Rng{}), shape, rng ? kStochastic : kNearest);
}

// A tensor's shape in the step: one row where its rows follow each other.
Shape shape_in(const StepTensor& t, int64_t together) {
    if (t.shape.cols % together != 0) return t.shape;
    return joined(t.shape, {t.weight.param.stride, t.grad.stride, t.weight.new_param.stride, pitch_of(t.rng, t.shape),
                            pitch_of(t.weight.rng, t.shape)});
}

int64_t width_of(Shape shape, int64_t together) {
    const int64_t width = together >= shape.cols ? shape.cols : std::max(together, kRun / together * together);
    if (width > kRun) throw std::invalid_argument("blocks of the moments have no common multiple of at most 2048");
    return width;
}

// A tensor at work.
class Job {
  public:
    Job(const StepTensor& tensor, const std::optional<Coding>* codings, int num_moments, int64_t together, bool looks)
        : tensor_(tensor),
          num_moments_(num_moments),
          shape_(shape_in(tensor, together)),
          pieces_(shape_, width_of(shape_, together)),
          weights_(tensor.weight, shape_) {
        for (int k = 0; k < num_moments; ++k)
            kept_[k].keep(tensor.moments[k], codings[k], shape_, pieces_.width(), looks);
    }
    int64_t pieces() const { return pieces_.count(); }
    bool finite() const { return finite_.load(std::memory_order_relaxed); }

    void step(const RowKernels& kernels, const StepRule& rule, int64_t begin, int64_t end, Work& w) {
        Piece piece = pieces_.first(begin);
        for (int64_t i = begin; i < end; ++i) {
            const Piece next = i + 1 < end ? pieces_.after(piece) : piece;
            step(kernels, rule, piece, next, w);
            piece = next;
        }
    }

  private:
    const StepTensor& tensor_;
    const int num_moments_;
    const Shape shape_;
    const Pieces pieces_;
    const Weights weights_;
    Kept kept_[kMaxMoments];
    std::atomic<bool> finite_{true};

    void step(const RowKernels& kernels, const StepRule& rule, const Piece& piece, const Piece& next, Work& w) {
        const Values& grad = tensor_.grad;
        const Run &run = piece.run, &later = next.run;
        StepRow row{};
        row.n = run.count;
        weights_.open(kernels, run, later, w, row);
        row.grad = at_run(grad, run), row.grad_dtype = grad.dtype;
        if (grad.dtype != Dtype::kFloat32 && grad.dtype != row.dtype) {
            kernels.widen(row.grad, grad.dtype, run.count, w.grad);
            row.grad = w.grad, row.grad_dtype = Dtype::kFloat32;
        }
        for (int k = 0; k < num_moments_; ++k) row.moments[k] = kept_[k]->row(kernels, piece, next, w.moments[k]);
        kernels.step(rule, row);
        weights_.close(kernels, run, row);
        const uint16_t* noise = tensor_.rng ? Scratch::mine().noise_at(kernels, *tensor_.rng, run) : nullptr;
        for (int k = 0; k < num_moments_; ++k) kept_[k]->make_scales(kernels, piece, w.moments[k]);
        for (int k = 0; k < num_moments_; ++k) {
            kept_[k]->write(kernels, piece, noise, at_run(grad, later), w.moments[k]);
            if (!kept_[k]->finite(kernels, piece, w.moments[k])) finite_.store(false, std::memory_order_relaxed);
        }
    }
};

}  // namespace

void optimizer_steps(const StepRule& rule, const std::vector<StepTensor>& tensors, int num_moments, int64_t look,
                     uint8_t* finite) {
    std::optional<Coding> codings[kMaxMoments];
    for (int k = 0; k < num_moments; ++k) {
        const auto* coded = std::get_if<CodedMoment>(&tensors[0].moments[k]);
        if (coded) codings[k].emplace(coded->scheme, tensors[0].rng.has_value());
    }
    std::deque<Job> jobs;
    std::vector<int64_t> ends;  // pieces up to the end of each job
    int64_t pieces = 0, elements = 0;
    for (const StepTensor& tensor : tensors) {
        int64_t together = 1;
        for (int k = 0; k < num_moments; ++k) together = std::lcm(together, unit(tensor.moments[k]));
        const int64_t count = tensor.shape.rows * tensor.shape.cols;
        jobs.emplace_back(tensor, codings, num_moments, together, count <= look);
        pieces += jobs.back().pieces(), elements += count;
        ends.push_back(pieces);
    }
    const int64_t grain = std::max<int64_t>(kGrain * pieces / std::max<int64_t>(elements, 1), 1);
    parallel_for(pieces, grain, [&](int64_t begin, int64_t end) {
        static thread_local std::vector<Work> work(1);
        const RowKernels& kernels = row_kernels();
        size_t j = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
        for (; begin < end; ++j) {
            const int64_t first = ends[j] - jobs[j].pieces(), stop = std::min(end, ends[j]);
            jobs[j].step(kernels, rule, begin - first, stop - first, work[0]);
            begin = stop;
        }
    });
    for (size_t j = 0; finite && j < jobs.size(); ++j) finite[j] = jobs[j].finite();
}

}  // namespace lowbit::cpu
