// How the op's arguments `rounding`, `rng`, `stream`, `offset` and `pitch` ask CPU kernels to round.
#pragma once

#include "format_table.h"
#include "ops_entry.h"

namespace lowbit {

struct Random {
    Rounding rounding;
    Rng rng;

    // The random bits; nothing where none are drawn.
    std::optional<Rng> bits() const { return rounding == kStochastic ? std::optional(rng) : std::nullopt; }
};

// Nothing for a rounding that there is not. `cols`: the pitch where none is given.
inline std::optional<Random> random_of(const entry::Text& rounding, int64_t cols, const MaybeTensor& rng,
                                       int64_t stream, int64_t offset, std::optional<int64_t> pitch) {
    if (rounding.view() == "nearest") return Random{kNearest, {}};
    if (rounding.view() != "stochastic") return std::nullopt;
    require(rng && rng->scalar_type() == ScalarType::Long && rng->numel() == 2);
    const Tensor key = dense(*rng);
    const int64_t place[] = {stream, offset, pitch.value_or(cols)};
    return Random{kStochastic, rng_params(static_cast<const int64_t*>(key.const_data_ptr()), place)};
}

}  // namespace lowbit
