// Rows of a product that are patches of an image: fetched from where its pixels lie, never laid out all at once.
#pragma once

#include <cstdint>

namespace lowbit::cpu::mm {

// A convolution over three spatial axes (of which the first may be 1), on pixels [batch, size, channels].
struct Window {
    int64_t batch = 1, channels = 1, groups = 1;
    int64_t size[3], out[3], kernel[3], stride[3], dilation[3];
    int64_t before[3];  // zeros before the first pixel of each axis

    int64_t pixels() const { return batch * size[0] * size[1] * size[2]; }
    int64_t rows() const { return batch * out[0] * out[1] * out[2]; }
    int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
    int64_t depth() const { return group_channels() * taps(); }  // of a group's patch
    int64_t group_channels() const { return channels / groups; }
    // Whether patches are the pixels themselves.
    bool is_pointwise() const;
};

// The patches of one group: a row holds the group's channels of the first tap, then those of the next one.
struct Patches {
    const Window& window;
    const uint8_t* data;     // of the first pixel's first channel
    const uint8_t* padding;  // zeros: all channels of as many pixels as the kernel is wide
    int64_t bytes;           // of an element: 1, 2 or 4
    int64_t group = 0;
    int64_t first = 0;  // the row of the window that is row 0 here

    // Elements [begin, end) of a row.
    void fetch(int64_t row, int64_t begin, int64_t end, uint8_t* out) const;
    // Where the group's channels of each tap of some rows begin: [count, taps].
    void locate(int64_t row, int64_t count, const uint8_t** taps) const;

  private:
    struct Place {
        int64_t image, at[3];  // of the first tap, which may lie before the first pixel
    };
    Place place_of(int64_t row) const;
    const uint8_t* pixel(const Place& place, int64_t d, int64_t h, int64_t w) const;
    const uint8_t* line(const Place& place, int64_t d, int64_t h) const;
};

}  // namespace lowbit::cpu::mm
