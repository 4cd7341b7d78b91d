"""Device functions: 16 random bits per element from Philox4x32-10, by the element's global index.

Element ``i = offset + row * pitch + col`` uses the little-endian uint16 ``i & 7`` of the 16 bytes that Philox returns
for the counter ``(b lo, b hi, step, stream)``, ``b = i >> 3``, and the key ``(seed lo, seed hi)``. ``rng_ptr`` points
to int64 ``[seed, step]``.

Source: docs/numerics.md section 7; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import triton
import triton.language as tl


@triton.jit
def each(rows, cols, rng_ptr, stream_id, offset, pitch):
    """Random bits for any rows [R] and cols [C]: int32 [R, C], one Philox block per element."""
    index = (offset.to(tl.int64) + rows.to(tl.int64) * pitch.to(tl.int64))[:, None] + cols.to(tl.int64)[None, :]
    index = index.to(tl.uint64)
    low, high = _words(index >> 3)
    w0, w1, w2, w3 = _philox(rng_ptr, low, high, stream_id)
    lane = (index & 7).to(tl.int32)
    word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
    return ((word >> ((lane & 1) * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def eights(rows, first, rng_ptr, stream_id, offset, pitch, R: tl.constexpr, C: tl.constexpr):
    """``each`` for cols ``first .. first + C``, with one Philox block per eight elements.

    ``first``, ``offset``, ``pitch`` and ``C`` must be multiples of 8.
    """
    start = offset.to(tl.int64).to(tl.uint64) >> 3
    along = (first >> 3) + tl.arange(0, C // 8)
    row = rows.to(tl.uint64) * (pitch.to(tl.int64).to(tl.uint64) >> 3)
    # The index wraps at 2**64, so the index divided by 8 wraps at 2**61.
    low, high = _words(((start + row)[:, None] + along.to(tl.uint64)[None, :]) & 0x1FFFFFFFFFFFFFFF)
    w0, w1, w2, w3 = _philox(rng_ptr, low, high, stream_id)
    # [R, C/8, 2, 2]: the last two axes count words 0..3; a third, innermost axis splits a word into halves.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, [R, C]).to(tl.int32)


@triton.jit
def draw(rows, cols, begin, rng_ptr, stream_id, offset, pitch, ROUNDING: tl.constexpr):
    """Random bits of a tile whose columns begin at ``begin``.

    ROUNDING: 0 to nearest (no random bits), 1 stochastic, 2 stochastic with the conditions of ``eights``.
    """
    if ROUNDING == 0:
        return 0
    elif ROUNDING == 1:
        return each(rows, cols, rng_ptr, stream_id, offset, pitch)
    else:
        return eights(rows, begin, rng_ptr, stream_id, offset, pitch, rows.shape[0], cols.shape[0])


@triton.jit
def _words(index):
    return (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)


@triton.jit
def _philox(rng_ptr, low, high, stream_id):
    seed, step = tl.load(rng_ptr).to(tl.uint64), tl.load(rng_ptr + 1).to(tl.uint32)
    return tl.philox(seed, low, high, step, stream_id.to(tl.uint32))
