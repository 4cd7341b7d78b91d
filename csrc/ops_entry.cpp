// What public ops on the CPU share (ops_entry.h): when Python is to choose, its errors, and how many were swallowed.
#include "ops_entry.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace lowbit::entry {
namespace {

std::atomic<int> open_choices{0};
std::atomic<int64_t> swallowed_errors{0};
thread_local std::string refusal;
thread_local bool refusal_of_value = false;

// Counts the `use_backend` and `explain` contexts that are open.
void choose_elsewhere(int64_t change) { open_choices += static_cast<int>(change); }

int64_t swallowed() { return swallowed_errors; }

std::vector<std::string> entries() { return served_ops(); }

void refuse(bool of_value, std::string text) {
    refusal_of_value = of_value;
    refusal = std::move(text);
}

}  // namespace

std::vector<std::string>& served_ops() {
    static std::vector<std::string> names;
    return names;
}

bool is_like(const Tensor& given, const Out& out) {
    return given.scalar_type() == out.dtype && given.is_contiguous() && sizes_of(given) == out.sizes;
}

bool overlap(const Tensor& a, const Tensor& b) {
    if (a.numel() == 0 || b.numel() == 0) return false;
    const auto span = [](const Tensor& t) {
        int64_t last = 0;
        for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
        return (last + 1) * static_cast<int64_t>(t.element_size());
    };
    const auto *first = static_cast<const char*>(a.const_data_ptr()),
               *other = static_cast<const char*>(b.const_data_ptr());
    return other < first + span(a) && first < other + span(b);
}

bool chosen_elsewhere() { return open_choices.load(std::memory_order_relaxed) != 0; }

void count_swallowed() { ++swallowed_errors; }

void throw_refusal() {
    if (refusal_of_value) throw std::invalid_argument(refusal);  // becomes Python's ValueError
    throw std::runtime_error(refusal);
}

}  // namespace lowbit::entry

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_native, m) {
    m.def("choose_elsewhere(int change) -> ()");
    m.def("refuse(bool of_value, str text) -> ()");
    m.def("entries() -> str[]");
    m.def("swallowed() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_native, CompositeExplicitAutograd, m) {
    m.impl("choose_elsewhere", TORCH_BOX(&lowbit::entry::choose_elsewhere));
    m.impl("refuse", TORCH_BOX(&lowbit::entry::refuse));
    m.impl("swallowed", TORCH_BOX(&lowbit::entry::swallowed));
    m.impl("entries", TORCH_BOX(&lowbit::entry::entries));
}
