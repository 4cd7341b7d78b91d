"""Device functions: load patches of images for implicit convolutions.

A row of the left matrix of a convolution is a patch: the pixels under the kernel at one output position, tap by tap,
with the channels of one group adjacent. Images are contiguous ``[N, D, H, W, C]``; missing axes have one pixel.
``image`` is ``(C, channels per group, D, H, W, output positions along D, along H, along W)``.

``WINDOW`` has for D, H, W: kernel sizes, strides, the padding before, dilations, and whether there is any padding.
``MADE``: the format of patches that are quantized as they are read, with scales ``MADE_SCALE`` from floats of
``MADE_DTYPE``; None for codes and floats that are multiplied directly. These are three arguments because in Triton 3.6
a function within a kernel cannot take nested tuples.

Source: docs/numerics.md section 9.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, scales


@triton.jit
def corner(row, image, WINDOW: tl.constexpr):
    """For patches ``row``: the first pixel of the image, and the position of the first tap along each axis."""
    at_w = row % image[7]
    rest = row // image[7]
    at_h = rest % image[6]
    rest = rest // image[6]
    at_d = rest % image[5]
    begin = (rest // image[5]).to(tl.int64) * image[2] * image[3] * image[4]
    return (
        begin,
        at_d * WINDOW[1][0] - WINDOW[2][0],
        at_h * WINDOW[1][1] - WINDOW[2][1],
        at_w * WINDOW[1][2] - WINDOW[2][2],
    )


@triton.jit
def inside(first, offset, size, PADDED: tl.constexpr, ok):
    """``ok`` without positions in the padding along one axis."""
    if PADDED:
        at = first[:, None] + offset[None, :]
        return ok & (at >= 0) & (at < size)
    else:
        return ok


@triton.jit
def find(first, tap, channel, image, ok, WINDOW: tl.constexpr):
    """Element indices [M, K] at taps and channels of patches, and ``ok`` without padding. ``first``: of ``corner``."""
    tap_w = (tap % WINDOW[0][2]) * WINDOW[3][2]
    rest = tap // WINDOW[0][2]
    tap_h = (rest % WINDOW[0][1]) * WINDOW[3][1]
    tap_d = (rest // WINDOW[0][1]) * WINDOW[3][0]
    ok = inside(first[1], tap_d, image[2], WINDOW[4][0], ok)
    ok = inside(first[2], tap_h, image[3], WINDOW[4][1], ok)
    ok = inside(first[3], tap_w, image[4], WINDOW[4][2], ok)
    pixel = first[0] + (first[1].to(tl.int64) * image[3] + first[2]) * image[4] + first[3]
    step = (tap_d.to(tl.int64) * image[3] + tap_h) * image[4] + tap_w
    return (pixel * image[0])[:, None] + (step * image[0] + channel)[None, :], ok


@triton.jit
def load(ptr, first, k, row_ok, k_ok, image, WINDOW: tl.constexpr):
    """Stored elements [M, K] of patches, and their mask; padding and masked elements are 0."""
    if WINDOW[0][0] * WINDOW[0][1] * WINDOW[0][2] == 1:
        tap = tl.zeros_like(k)
        channel = k
    else:
        tap = k // image[1]
        channel = k % image[1]
    at, ok = find(first, tap, channel, image, row_ok[:, None] & k_ok[None, :], WINDOW)
    return tl.load(ptr + at, ok, 0), ok


@triton.jit
def encode(raw, scale, MADE: tl.constexpr, MADE_SCALE: tl.constexpr, MADE_DTYPE: tl.constexpr):
    """Codes (int32) of raw patterns divided by fp32 scales."""
    sign, magnitude = bits.split(raw, MADE_DTYPE)
    sign, magnitude = scales.divide(sign, magnitude, scale.to(tl.int32, bitcast=True), MADE_SCALE)
    return bits.encode(sign, magnitude, 0, 0, MADE, True, False)


@triton.jit
def made_scale(amax, MADE: tl.constexpr, MADE_SCALE: tl.constexpr):
    """fp32 scales of patches from the fp32 bits of their amax."""
    _, scale, _ = scales.make(amax, amax, tl.full([], 1.0, tl.float32), MADE, MADE_SCALE)
    return scale.to(tl.float32, bitcast=True)
