"""Kernels: the block Hadamard transform, in registers. Source: docs/numerics.md section 13."""

import triton
import triton.language as tl

from lowbit.kernels import bits
from lowbit.kernels.spec import GENERAL


@triton.jit
def transform(value, SIZE: tl.constexpr, HALF: tl.constexpr):
    """Replace elements of fp32 [R, C] HALF, 2 HALF, ... apart by sums and differences, in runs of SIZE."""
    R: tl.constexpr = value.shape[0]
    C: tl.constexpr = value.shape[1]
    if HALF >= SIZE:
        return value
    else:
        pairs = tl.permute(tl.reshape(value, [R, C // (2 * HALF), 2, HALF]), [0, 1, 3, 2])
        above, below = tl.split(pairs)
        pairs = tl.permute(tl.join(above + below, above - below), [0, 1, 3, 2])
        return transform(tl.reshape(pairs, [R, C]), SIZE, 2 * HALF)


@triton.jit
def signs_of(place, SIGNS: tl.constexpr):
    """The fixed sign (0 or 1) of each position in a block. ``SIGNS``: four words of 32 bits, highest bit first."""
    word = tl.where(place < 64, tl.where(place < 32, SIGNS[0], SIGNS[1]), tl.where(place < 96, SIGNS[2], SIGNS[3]))
    return ((word >> (31 - place % 32)) & 1).to(tl.int32)


@triton.jit
def turn_rows(sign, magnitude, row, SIGNS: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr, DTYPE: tl.constexpr):
    """The signed transform along the rows of a tile, as (sign, magnitude) of DTYPE. Rows begin at a block of SIZE."""
    sign ^= signs_of(row.to(tl.int32) % SIZE, SIGNS)[:, None]
    value = tl.trans((magnitude | (sign << 31)).to(tl.float32, bitcast=True))
    value = tl.trans(transform(value, SIZE, 1) * FACTOR)
    return bits.split(bits.narrow(value.to(tl.int32, bitcast=True), DTYPE, False), DTYPE)


@triton.jit(do_not_specialize=GENERAL)
def hadamard(
    x_ptr, stride_r, stride_c, out_ptr, out_stride_r, out_stride_c, rows, start, end, tiles_c,
    SIGNS: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Transform columns ``start`` to ``end`` of a matrix in blocks of SIZE; a tile has whole blocks.

    ``SIGNS``: see ``signs_of``, for positions in a block of ``BLOCK``, or None.
    """
    row = (tl.program_id(0) // tiles_c) * R + tl.arange(0, R)
    col = start + (tl.program_id(0) % tiles_c) * C + tl.arange(0, C)
    ok = (row < rows)[:, None] & (col < end)[None, :]
    row, col = row.to(tl.int64), col.to(tl.int64)
    sign, magnitude = bits.split(tl.load(x_ptr + (row * stride_r)[:, None] + (col * stride_c)[None, :], ok, 0), DTYPE)
    if SIGNS is not None:
        sign ^= signs_of(col.to(tl.int32) % BLOCK, SIGNS)[None, :]
    value = transform((magnitude | (sign << 31)).to(tl.float32, bitcast=True), SIZE, 1) * FACTOR
    to = out_ptr + (row * out_stride_r)[:, None] + (col * out_stride_c)[None, :]
    tl.store(to, bits.narrow(value.to(tl.int32, bitcast=True), DTYPE, False), ok)
