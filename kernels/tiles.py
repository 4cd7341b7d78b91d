"""Device functions: elements and blocks of a program's tile, block maxima, and sub-byte loads and stores.

A tile has ``GR * RP`` rows and ``GC * CP`` columns: ``GR x GC`` whole blocks, each padded to ``RP x CP`` (powers of
two). Along an axis whose blocks are longer than a tile, it is a piece of one block. ``TILE`` is
``spec.Tiling.constexpr()``: ``(GR, RP, rows exact, GC, CP, cols exact)``. An axis is exact if blocks need no padding,
so that tiles are adjacent.

An optimizer step divides one tile into blocks of two schemes. ``CUT`` is ``spec.StepTiles.cut``: ``(block, blocks,
width)``. ``blocks`` and ``width`` are powers of two: at least the blocks per tile row, and the elements per block.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits


@triton.jit
def positions(pid, pieces, block, size, G: tl.constexpr, P: tl.constexpr, EXACT: tl.constexpr):
    """Indices [G * P] along an axis, and their mask. ``pieces``: tiles per block."""
    k = tl.arange(0, G * P)
    if EXACT:
        at = pid * (G * P) + k
        return at, at < size
    else:
        inner = (pid % pieces) * P + (k & (P - 1))
        at = ((pid // pieces) * G + k // P) * block + inner
        return at, (inner < block) & (at < size)


@triton.jit
def blocks(pid_r, pid_c, pieces_r, pieces_c, blocks_r, blocks_c, TILE: tl.constexpr):
    """Linear indices [GR, GC] of a tile's blocks, and their mask."""
    row = (pid_r // pieces_r) * TILE[0] + tl.arange(0, TILE[0])
    col = (pid_c // pieces_c) * TILE[3] + tl.arange(0, TILE[3])
    index = row.to(tl.int64)[:, None] * blocks_c + col[None, :]
    return index, (row < blocks_r)[:, None] & (col < blocks_c)[None, :]


@triton.jit
def block_max(values, TILE: tl.constexpr):
    """Maxima [GR, GC] over each block of a tile of int32."""
    cut = tl.reshape(values, [TILE[0], TILE[1], TILE[3], TILE[4]])
    return tl.max(tl.max(cut, axis=3), axis=1)


@triton.jit
def spread(values, TILE: tl.constexpr):
    """Per-block values [GR, GC] to every element of the tile."""
    wide = tl.broadcast_to(values[:, None, :, None], [TILE[0], TILE[1], TILE[3], TILE[4]])
    return tl.reshape(wide, [TILE[0] * TILE[1], TILE[3] * TILE[4]])


@triton.jit
def extremes(sign, magnitude, BOTH: tl.constexpr, TILE: tl.constexpr):
    """fp32 bits [GR, GC] of each block's max(0, max) and max(0, -min); without BOTH each is its amax.

    Integer maxima order non-negative fp32, rank NaN above Inf, and do not depend on the order of reduction.
    """
    if BOTH:
        return block_max(tl.where(sign == 0, magnitude, 0), TILE), block_max(tl.where(sign != 0, magnitude, 0), TILE)
    else:
        amax = block_max(magnitude, TILE)
        return amax, amax


@triton.jit
def cut_max(values, CUT: tl.constexpr):
    """Maxima [R, blocks] over the blocks of each row of non-negative int32 [R, C]."""
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    if CUT[0] * CUT[1] == C:
        return tl.max(tl.reshape(values, [R, CUT[1], CUT[0]]), axis=2)
    else:
        inner = tl.arange(0, CUT[2])
        col = (tl.arange(0, CUT[1]) * CUT[0])[:, None] + inner[None, :]
        at = (tl.arange(0, R) * C)[:, None, None] + tl.minimum(col, C - 1)[None, :, :]
        ok = (col < C) & (inner < CUT[0])[None, :]
        return tl.max(tl.where(ok[None, :, :], bits.look_up(tl.ravel(values), at), 0), axis=2)


@triton.jit
def cut_spread(values, C: tl.constexpr, CUT: tl.constexpr):
    """Per-block values [R, blocks] to every element of [R, C]."""
    R: tl.constexpr = values.shape[0]
    if CUT[0] * CUT[1] == C:
        return tl.reshape(tl.broadcast_to(values[:, :, None], [R, CUT[1], CUT[0]]), [R, C])
    else:
        at = (tl.arange(0, R) * CUT[1])[:, None] + (tl.arange(0, C) // CUT[0])[None, :]
        return bits.look_up(tl.ravel(values), at)


@triton.jit
def store_codes(ptr, pitch, codes, rows, cols, row_ok, col_ok, begin, bytes_a_row, BITS: tl.constexpr):
    """Store codes [R, C] of the columns from ``begin``. Codes of fewer than 8 bits are packed and need adjacent
    columns; except for 4 bits, ``begin`` and C are multiples of 8.

    Masked codes count as 0, so the last byte of a row is padded with zero bits.
    """
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    base = ptr + (rows.to(tl.int64) * pitch)[:, None]
    if BITS == 8:
        tl.store(base + cols[None, :], codes.to(tl.uint8), row_ok[:, None] & col_ok[None, :])
    else:
        codes = tl.where(col_ok[None, :], codes, 0)
        if BITS == 4:
            low, high = tl.split(tl.reshape(codes, [R, C // 2, 2]))
            at = begin // 2 + tl.arange(0, C // 2)
            packed = (low | (high << 4)).to(tl.uint8)
            tl.store(base + at[None, :], packed, row_ok[:, None] & (at < bytes_a_row)[None, :])
        else:
            lift = (tl.arange(0, 8) * BITS).to(tl.int64)
            word = tl.sum(tl.reshape(codes, [R, C // 8, 8]).to(tl.int64) << lift[None, None, :], axis=2)
            at = (begin // 8 + tl.arange(0, C // 8)) * BITS
            for k in tl.static_range(BITS):
                ok = row_ok[:, None] & (at + k < bytes_a_row)[None, :]
                tl.store(base + (at + k)[None, :], (word >> (8 * k)).to(tl.uint8), ok)


@triton.jit
def load_codes(
    ptr, stride_r, stride_c, rows, cols, row_ok, col_ok, begin, bytes_a_row, BITS: tl.constexpr, PAIRS: tl.constexpr
):
    """Load codes [R, C] as int32 from rows packed with ``BITS`` bits. PAIRS: 4 bits and adjacent columns from
    ``begin``, so each byte is loaded once.
    """
    C: tl.constexpr = cols.shape[0]
    base = ptr + (rows.to(tl.int64) * stride_r)[:, None]
    if BITS == 8:
        ok = row_ok[:, None] & col_ok[None, :]
        return tl.load(base + (cols.to(tl.int64) * stride_c)[None, :], ok, 0).to(tl.int32)
    elif PAIRS:
        at = begin // 2 + tl.arange(0, C // 2)
        ok = row_ok[:, None] & (at < bytes_a_row)[None, :]
        pair = tl.load(base + (at.to(tl.int64) * stride_c)[None, :], ok, 0).to(tl.int32)
        return tl.reshape(tl.join(pair & 15, pair >> 4), [rows.shape[0], C])
    else:
        first = cols.to(tl.int64) * BITS
        at = first >> 3
        ok = row_ok[:, None] & col_ok[None, :]
        word = tl.load(base + (at * stride_c)[None, :], ok, 0).to(tl.int32)
        if 8 % BITS != 0:
            more = ok & (at + 1 < bytes_a_row)[None, :]
            word |= tl.load(base + ((at + 1) * stride_c)[None, :], more, 0).to(tl.int32) << 8
        return (word >> (first & 7).to(tl.int32)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def load_fours(ptr, stride_r, stride_c, rows, row_ok, begin, bytes_a_row, C: tl.constexpr):
    """Load 6-bit codes [R, C] as int32 from column ``begin``, a multiple of 4: three bytes hold four codes."""
    base = ptr + (rows.to(tl.int64) * stride_r)[:, None]
    first = begin // 4 * 3 + 3 * tl.arange(0, C // 4)
    word = tl.zeros([rows.shape[0], C // 4], tl.int32)
    for k in tl.static_range(3):
        ok = row_ok[:, None] & (first + k < bytes_a_row)[None, :]
        word |= tl.load(base + ((first + k).to(tl.int64) * stride_c)[None, :], ok, 0).to(tl.int32) << 8 * k
    even = tl.join(word & 63, word >> 12 & 63)
    odd = tl.join(word >> 6 & 63, word >> 18)
    return tl.reshape(tl.join(even, odd), [rows.shape[0], C])
