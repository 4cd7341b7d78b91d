#include "cpu/matmul/patches.h"

#include <algorithm>
#include <cstring>

namespace lowbit::cpu::mm {

bool Window::is_pointwise() const {
    for (int i = 0; i < 3; ++i) {
        if (kernel[i] != 1 || stride[i] != 1 || before[i] != 0 || out[i] != size[i]) return false;
    }
    return true;
}

Patches::Place Patches::place_of(int64_t row) const {
    const Window& w = window;
    Place place{};
    int64_t index = row + first;
    for (int i = 2; i >= 0; --i) {
        if (w.out[i] == 1) {
            place.at[i] = -w.before[i];
            continue;
        }
        place.at[i] = index % w.out[i] * w.stride[i] - w.before[i];
        index /= w.out[i];
    }
    place.image = index;
    return place;
}

const uint8_t* Patches::pixel(const Place& place, int64_t d, int64_t h, int64_t w) const {
    const int64_t step[3] = {d, h, w};
    int64_t at = place.image;
    bool inside = true;
    for (int i = 0; i < 3; ++i) {
        const int64_t along = place.at[i] + step[i] * window.dilation[i];
        inside &= along >= 0 && along < window.size[i];
        at = at * window.size[i] + along;
    }
    return (inside ? data + at * window.channels * bytes : padding) + group * window.group_channels() * bytes;
}

void Patches::locate(int64_t row, int64_t count, const uint8_t** taps) const {
    const Window& w = window;
    const int64_t reach = (w.kernel[2] - 1) * w.dilation[2], all = w.taps();
    const uint8_t* outside = padding + group * w.group_channels() * bytes;
    bool was_inside = false;  // along the last axis
    for (int64_t i = 0; i < count; ++i, taps += all) {
        const Place place = place_of(row + i);
        const bool inside = place.at[2] >= 0 && place.at[2] + reach < w.size[2];
        if (was_inside && inside && place.at[2] + w.before[2] > 0) {  // to the right of the row before
            const int64_t step = w.stride[2] * w.channels * bytes;
            for (int64_t t = 0; t < all; ++t) taps[t] = taps[t - all] == outside ? outside : taps[t - all] + step;
            continue;
        }
        was_inside = inside;
        int64_t t = 0;
        for (int64_t d = 0; d < w.kernel[0]; ++d) {
            for (int64_t h = 0; h < w.kernel[1]; ++h) {
                for (int64_t x = 0; x < w.kernel[2]; ++x) taps[t++] = pixel(place, d, h, x);
            }
        }
    }
}

// Where pixel 0 of the last axis begins, for a tap's d and h; null outside.
const uint8_t* Patches::line(const Place& place, int64_t d, int64_t h) const {
    const Window& w = window;
    const int64_t along[2] = {place.at[0] + d * w.dilation[0], place.at[1] + h * w.dilation[1]};
    if (along[0] < 0 || along[0] >= w.size[0] || along[1] < 0 || along[1] >= w.size[1]) return nullptr;
    return data + ((place.image * w.size[0] + along[0]) * w.size[1] + along[1]) * w.size[2] * w.channels * bytes;
}

void Patches::fetch(int64_t row, int64_t begin, int64_t end, uint8_t* out) const {
    const Place place = place_of(row);
    const Window& w = window;
    const int64_t channels = w.group_channels(), wide = w.kernel[2], length = channels * wide;
    const int64_t first_channel = group * channels * bytes;
    // Taps next to each other along the last axis are one run of memory.
    const bool joins = w.groups == 1 && w.dilation[2] == 1 && place.at[2] >= 0 && place.at[2] + wide <= w.size[2];
    int64_t from = begin % length, h = begin / length, d = h / w.kernel[1];
    h -= d * w.kernel[1];
    for (int64_t k = begin; k < end; from = 0) {
        const int64_t count = std::min(length - from, end - k);
        const uint8_t* pixels = line(place, d, h);
        if (joins || pixels == nullptr) {
            const uint8_t* source = pixels == nullptr ? padding : pixels + place.at[2] * channels * bytes;
            std::memcpy(out, source + from * bytes, static_cast<size_t>(count * bytes));
            out += count * bytes;
        } else {
            for (int64_t at = from; at < from + count;) {
                const int64_t tap = at / channels, skip = at % channels,
                              some = std::min(channels - skip, from + count - at);
                const int64_t x = place.at[2] + tap * w.dilation[2];
                const uint8_t* source =
                    x < 0 || x >= w.size[2] ? padding : pixels + x * w.channels * bytes + first_channel;
                std::memcpy(out, source + skip * bytes, static_cast<size_t>(some * bytes));
                out += some * bytes;
                at += some;
            }
        }
        k += count;
        if (++h == w.kernel[1]) {
            h = 0;
            ++d;
        }
    }
}

}  // namespace lowbit::cpu::mm
