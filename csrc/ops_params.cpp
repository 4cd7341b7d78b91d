#include "ops_params.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

namespace lowbit {
namespace {

using Ints = std::vector<int64_t>;

// What names stand for, once Python was asked. Never destroyed: threads may outlive static objects.
struct Names {
    const char* ask;  // the op that answers the integers of a name, or none
    size_t count;
    std::shared_mutex mutex;
    std::map<std::string, Ints, std::less<>> known;  // elements stay where they are

    const int64_t* find(std::string_view name) {
        {
            const std::shared_lock<std::shared_mutex> lock(mutex);
            const auto at = known.find(name);
            if (at != known.end()) return at->second.data();
        }
        StableIValue stack[] = {torch::stable::detail::from(std::string(name))};
        TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(ask, "", stack, TORCH_ABI_VERSION));
        Ints numbers = torch::stable::detail::to<Ints>(stack[0]);
        if (numbers.size() != count) return nullptr;
        const std::unique_lock<std::shared_mutex> lock(mutex);
        return known.emplace(name, std::move(numbers)).first->second.data();
    }
};

}  // namespace

std::optional<FormatParams> named_format(std::string_view name) {
    static auto* formats = new Names{"lowbit_table::format_params", kFormatParams, {}, {}};
    const int64_t* numbers = formats->find(name);
    return numbers == nullptr ? std::nullopt : std::optional(format_params(numbers));
}

std::optional<SchemeParams> named_scheme(std::string_view name, int64_t rows, int64_t cols) {
    static auto* schemes = new Names{"lowbit_table::scheme_params", kSchemeParams, {}, {}};
    const int64_t* numbers = schemes->find(name);
    return numbers == nullptr ? std::nullopt : std::optional(scheme_of(numbers, rows, cols));
}

SchemeParams scheme_of(const int64_t* numbers, int64_t rows, int64_t cols) {
    SchemeParams scheme = scheme_params(numbers);
    if (scheme.block_rows == 0) scheme.block_rows = std::max<int64_t>(rows, 1);
    if (scheme.block_cols == 0) scheme.block_cols = std::max<int64_t>(cols, 1);
    return scheme;
}

}  // namespace lowbit
