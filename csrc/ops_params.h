// Formats and schemes as the ops take them: by name. Python says what a name stands for, once
// (lowbit/backends/dispatch.py), since a list costs more to pass than a small op takes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "common/params.h"

namespace lowbit {

// Nothing for a name that is none, or of which kernels know nothing.
std::optional<FormatParams> named_format(std::string_view name);
// Blocks that span an axis get its length here.
std::optional<SchemeParams> named_scheme(std::string_view name, int64_t rows, int64_t cols);

// A scheme of the integers of Scheme.params().
SchemeParams scheme_of(const int64_t* numbers, int64_t rows, int64_t cols);

}  // namespace lowbit
