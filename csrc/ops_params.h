// Formats and schemes as the ops take them: by number. A list of integers costs more to pass than a small op takes, so
// each is handed over once (lowbit_native::keep) and known by the number that this returned.
#pragma once

#include <cstdint>
#include <vector>

#include "common/params.h"

namespace lowbit {

// The number of a format or scheme: the same for the same integers, for as long as the process lives.
int64_t keep(const std::vector<int64_t>& numbers);

// What keep() was given under a number; throws for a number that it never returned. -1 is no scheme: a float matrix.
FormatParams kept_format(int64_t number);
// Blocks that span an axis get its length here.
SchemeParams kept_scheme(int64_t number, int64_t rows, int64_t cols);

// Rng of [seed, step, stream, offset, pitch]; all 0 of an empty list, which asks for rounding to nearest.
Rng rng_of(const std::vector<int64_t>& numbers);
inline Rounding rounding_of(const std::vector<int64_t>& rng) { return rng.empty() ? kNearest : kStochastic; }

}  // namespace lowbit
