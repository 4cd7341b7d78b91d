#include "ops_params.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>

namespace lowbit {
namespace {

using Ints = std::vector<int64_t>;

struct Kept {
    std::mutex mutex;
    std::map<Ints, int64_t> numbers;
    std::deque<Ints> lists;  // elements stay where they are
};
Kept& kept() {
    static auto* all = new Kept;  // never destroyed: threads may outlive static objects
    return *all;
}

const Ints& list_of(int64_t number, size_t size, const char* what) {
    Kept& all = kept();
    const std::lock_guard<std::mutex> lock(all.mutex);
    STD_TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(all.lists.size()), "lowbit: there is no ", what,
                    " number ", number, "; lowbit_native::keep() gives numbers");
    const Ints& found = all.lists[static_cast<size_t>(number)];
    STD_TORCH_CHECK(found.size() == size, "lowbit: number ", number, " is no ", what, ", which is ", size,
                    " integers, but ", found.size());
    return found;
}

}  // namespace

int64_t keep(const Ints& numbers) {
    Kept& all = kept();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto [entry, added] = all.numbers.emplace(numbers, static_cast<int64_t>(all.lists.size()));
    if (added) all.lists.push_back(numbers);
    return entry->second;
}

FormatParams kept_format(int64_t number) { return format_params(list_of(number, kFormatParams, "format").data()); }

SchemeParams kept_scheme(int64_t number, int64_t rows, int64_t cols) {
    SchemeParams scheme = scheme_params(list_of(number, kSchemeParams, "scheme").data());
    if (scheme.block_rows == 0) scheme.block_rows = std::max<int64_t>(rows, 1);
    if (scheme.block_cols == 0) scheme.block_cols = std::max<int64_t>(cols, 1);
    return scheme;
}

Rng rng_of(const Ints& numbers) {
    STD_TORCH_CHECK(numbers.empty() || numbers.size() == 5,
                    "lowbit: rng is [seed, step, stream, offset, pitch] or empty, got ", numbers.size(), " integers");
    return numbers.empty() ? Rng{} : rng_params(numbers.data());
}

}  // namespace lowbit
