#include "ops_params.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace lowbit {
namespace {

using Ints = std::vector<int64_t>;

struct Kept {
    std::shared_mutex mutex;
    std::unordered_map<std::string, int64_t> formats, schemes;  // numbers
    std::deque<Ints> lists;                                     // elements stay where they are
};
Kept& kept() {
    static auto* all = new Kept;  // never destroyed: threads may outlive static objects
    return *all;
}

const Ints& list_of(int64_t number, size_t size, const char* what) {
    Kept& all = kept();
    const std::shared_lock<std::shared_mutex> lock(all.mutex);
    STD_TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(all.lists.size()), "lowbit: there is no ", what,
                    " number ", number, "; lowbit_native::keep() gives numbers");
    const Ints& found = all.lists[static_cast<size_t>(number)];
    STD_TORCH_CHECK(found.size() == size, "lowbit: number ", number, " is no ", what, ", which is ", size,
                    " integers, but ", found.size());
    return found;
}

using Numbers = std::unordered_map<std::string, int64_t>;

const int64_t* list_of(std::string_view name, Numbers Kept::* numbers) {
    Kept& all = kept();
    const std::shared_lock<std::shared_mutex> lock(all.mutex);
    const auto found = (all.*numbers).find(std::string(name));
    return found == (all.*numbers).end() ? nullptr : all.lists[static_cast<size_t>(found->second)].data();
}

}  // namespace

int64_t keep(const std::string& name, const Ints& numbers) {
    Kept& all = kept();
    const std::unique_lock<std::shared_mutex> lock(all.mutex);
    STD_TORCH_CHECK(numbers.size() == kFormatParams || numbers.size() == kSchemeParams, "lowbit: ", numbers.size(),
                    " integers are no format and no scheme");
    Numbers& known = numbers.size() == kFormatParams ? all.formats : all.schemes;
    const auto found = known.find(name);
    if (found != known.end() && all.lists[static_cast<size_t>(found->second)] == numbers) return found->second;
    all.lists.push_back(numbers);
    return known[name] = static_cast<int64_t>(all.lists.size()) - 1;
}

FormatParams kept_format(int64_t number) { return format_params(list_of(number, kFormatParams, "format").data()); }

SchemeParams kept_scheme(int64_t number, int64_t rows, int64_t cols) {
    return scheme_of(list_of(number, kSchemeParams, "scheme").data(), rows, cols);
}

std::optional<FormatParams> named_format(std::string_view name) {
    const int64_t* list = list_of(name, &Kept::formats);
    return list == nullptr ? std::nullopt : std::optional(format_params(list));
}

std::optional<SchemeParams> named_scheme(std::string_view name, int64_t rows, int64_t cols) {
    const int64_t* list = list_of(name, &Kept::schemes);
    return list == nullptr ? std::nullopt : std::optional(scheme_of(list, rows, cols));
}

SchemeParams scheme_of(const int64_t* numbers, int64_t rows, int64_t cols) {
    SchemeParams scheme = scheme_params(numbers);
    if (scheme.block_rows == 0) scheme.block_rows = std::max<int64_t>(rows, 1);
    if (scheme.block_cols == 0) scheme.block_cols = std::max<int64_t>(cols, 1);
    return scheme;
}

}  // namespace lowbit
