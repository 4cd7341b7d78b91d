// Native ops in two parts: checks of what tensors are, which hold for every call with tensors of the same kinds, and
// the work on their memory. torch's dispatcher costs more than a small op takes, so Python has the first part done once
// (lowbit_native::plan_NAME) and then hands over pointers alone (ops_planned.cpp). Plans are addresses to Python, which
// owns them: a number that plan_NAME never gave, or that was forgotten, is an error that nothing catches.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

namespace lowbit {

// The pointers of an op's tensors, in the order of its schema; null for those left out.
using Pointers = void* const*;
using Work = std::function<void(Pointers)>;

// A call without its tensors.
struct Planned {
    static constexpr int kMost = 12;  // tensors that an op takes, at most

    Work work;
    std::array<int, kMost> places{};  // of the tensors that are there, among all those of the schema
    int tensors = 0;
};

namespace planned {

// Collects tensors among arguments of every type.
class Tensors {
  public:
    void add(const torch::stable::Tensor& t) {
        pointers_[static_cast<size_t>(all_)] = const_cast<void*>(t.const_data_ptr());
        places_[static_cast<size_t>(there_++)] = all_++;
    }
    void add(const std::optional<torch::stable::Tensor>& t) { t ? add(*t) : void(++all_); }
    template <class Word>
    void add(const Word&) {}

    Pointers pointers() const { return pointers_.data(); }
    Planned planned(Work work) const { return {std::move(work), places_, there_}; }

  private:
    std::array<void*, Planned::kMost> pointers_{};
    std::array<int, Planned::kMost> places_{};
    int all_ = 0, there_ = 0;
};

template <class T>
constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, torch::stable::Tensor> ||
                           std::is_same_v<std::decay_t<T>, std::optional<torch::stable::Tensor>>;

template <class Plan>
struct Signature;
template <class... Arguments>
struct Signature<Work (*)(Arguments...)> {
    static_assert((is_tensor<Arguments> + ... + 0) <= Planned::kMost, "Planned::kMost is too small");

    template <Work (*plan)(Arguments...)>
    static void run(Arguments... arguments) {
        Tensors tensors;
        (tensors.add(arguments), ...);
        plan(arguments...)(tensors.pointers());
    }
    template <Work (*plan)(Arguments...)>
    static int64_t keep(Arguments... arguments) {
        Tensors tensors;
        (tensors.add(arguments), ...);
        return reinterpret_cast<int64_t>(new Planned(tensors.planned(plan(arguments...))));
    }
};

}  // namespace planned

// Registers NAME and plan_NAME on the CPU for a function that checks the op's arguments and answers the work.
#define LOWBIT_PLANNED(library, name)                                                           \
    (library).impl(#name, TORCH_BOX(&lowbit::planned::Signature<decltype(&name)>::run<&name>)); \
    (library).impl("plan_" #name, TORCH_BOX(&lowbit::planned::Signature<decltype(&name)>::keep<&name>))

}  // namespace lowbit
