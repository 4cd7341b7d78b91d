// Formats and schemes as the ops take them: by name or by number. Python hands their integers over once
// (lowbit_native::keep), since a list costs more to pass than a small op takes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/params.h"

namespace lowbit {

// The number of a format or scheme, for as long as the process lives; a name stands for what was given with it last.
int64_t keep(const std::string& name, const std::vector<int64_t>& numbers);

// What keep() was given under a number; throws for a number that it never returned. -1 is no scheme: a float matrix.
FormatParams kept_format(int64_t number);
// Blocks that span an axis get its length here.
SchemeParams kept_scheme(int64_t number, int64_t rows, int64_t cols);

// The same by name; nothing for a name that keep() was never given.
std::optional<FormatParams> named_format(std::string_view name);
std::optional<SchemeParams> named_scheme(std::string_view name, int64_t rows, int64_t cols);

// A scheme of the integers of Scheme.params().
SchemeParams scheme_of(const int64_t* numbers, int64_t rows, int64_t cols);

}  // namespace lowbit
