"""Triton kernels that quantize a matrix in two schemes in one pass (dual quantization).

If scales span more than one tile, ``reduce_both`` reads the matrix once before. A tile holds whole blocks of both
schemes, or pieces of larger ones, and tiles are adjacent (``tiles``). Names of the second scheme begin with ``other``.
Its input goes through the signed Hadamard transform first if ``SIZE`` is more than 1.

Source: docs/numerics.md sections 2 to 7 and 13.
"""

import triton
import triton.language as tl

from lowbit.kernels import rng, rotation, scales, tiles
from lowbit.kernels.quantize import load_input, quantize_tile, reduce_tile
from lowbit.kernels.spec import GENERAL


@triton.jit
def tile_of(x_ptr, stride_r, stride_c, rows, cols, tiles_c, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """This program's tile: indices, rows, columns, their masks, and the elements as sign and magnitude."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, TILE[0], TILE[1], True)
    col, col_ok = tiles.positions(pid_c, 1, 1, cols, TILE[3], TILE[4], True)
    sign, magnitude = load_input(x_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    return pid_r, pid_c, row, col, row_ok, col_ok, sign, magnitude


@triton.jit(do_not_specialize=GENERAL)
def reduce_both(
    x_ptr, stride_r, stride_c, rows, cols, tiles_c,
    high_ptr, blocks_r, blocks_c, pieces_r, pieces_c,
    other_high_ptr, other_blocks_r, other_blocks_c, other_pieces_r, other_pieces_c,
    DTYPE: tl.constexpr, SIGNS: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr,
    FINITE: tl.constexpr, TILE: tl.constexpr, OTHER_FINITE: tl.constexpr, OTHER_TILE: tl.constexpr,
):  # fmt: skip
    """``quantize.reduce_extremes`` for each scheme whose ``high_ptr`` is not None."""
    pid_r, pid_c, row, _, _, _, sign, magnitude = tile_of(x_ptr, stride_r, stride_c, rows, cols, tiles_c, DTYPE, TILE)
    if high_ptr is not None:
        at, ok = tiles.blocks(pid_r, pid_c, pieces_r, pieces_c, blocks_r, blocks_c, TILE)
        reduce_tile(sign, magnitude, high_ptr, high_ptr, at, ok, False, FINITE, TILE)
    if other_high_ptr is not None:
        if SIZE > 1:
            sign, magnitude = rotation.turn_rows(sign, magnitude, row, SIGNS, SIZE, FACTOR, DTYPE)
        at, ok = tiles.blocks(
            pid_r, pid_c, other_pieces_r, other_pieces_c, other_blocks_r, other_blocks_c, OTHER_TILE
        )  # fmt: skip
        reduce_tile(sign, magnitude, other_high_ptr, other_high_ptr, at, ok, False, OTHER_FINITE, OTHER_TILE)


@triton.jit(do_not_specialize=GENERAL)
def quantize_both(
    x_ptr, stride_r, stride_c, rows, cols, tiles_c, rng_ptr, pitch: tl.int64,
    scale_ptr, global_scale_ptr, out_ptr, out_bytes, blocks_r, blocks_c, pieces_r, pieces_c, stream_id: tl.int64,
    other_scale_ptr, other_global_scale_ptr, other_out_ptr, other_out_bytes, other_blocks_r, other_blocks_c,
    other_pieces_r, other_pieces_c, other_stream_id: tl.int64,
    DTYPE: tl.constexpr, SIGNS: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr,
    FMT: tl.constexpr, SCALE: tl.constexpr, TILE: tl.constexpr, GIVEN: tl.constexpr, OUT_BITS: tl.constexpr,
    ROUNDING: tl.constexpr, CONVERT: tl.constexpr,
    OTHER_FMT: tl.constexpr, OTHER_SCALE: tl.constexpr, OTHER_TILE: tl.constexpr, OTHER_GIVEN: tl.constexpr,
    OTHER_OUT_BITS: tl.constexpr, OTHER_ROUNDING: tl.constexpr, OTHER_CONVERT: tl.constexpr,
):  # fmt: skip
    """A tile's codes and scales in both schemes. GIVEN: scales are loaded, not computed."""
    pid_r, pid_c, row, col, row_ok, col_ok, sign, magnitude = tile_of(
        x_ptr, stride_r, stride_c, rows, cols, tiles_c, DTYPE, TILE
    )
    begin = pid_c * (TILE[3] * TILE[4])
    offset = tl.zeros([], tl.int64)
    at, ok = tiles.blocks(pid_r, pid_c, pieces_r, pieces_c, blocks_r, blocks_c, TILE)
    random = rng.draw(row, col, begin, rng_ptr, stream_id, offset, pitch, ROUNDING)
    global_scale = scales.load_global_scale(global_scale_ptr, at, ok, blocks_c, SCALE)
    quantize_tile(
        sign, magnitude, row, col, row_ok, col_ok, begin, at, ok, random, global_scale, scale_ptr, None,
        out_ptr, out_bytes, out_bytes, FMT, SCALE, DTYPE, TILE, GIVEN, True, False, not GIVEN, OUT_BITS, ROUNDING,
        CONVERT,
    )  # fmt: skip
    if SIZE > 1:
        sign, magnitude = rotation.turn_rows(sign, magnitude, row, SIGNS, SIZE, FACTOR, DTYPE)
    at, ok = tiles.blocks(pid_r, pid_c, other_pieces_r, other_pieces_c, other_blocks_r, other_blocks_c, OTHER_TILE)
    random = rng.draw(row, col, begin, rng_ptr, other_stream_id, offset, pitch, OTHER_ROUNDING)
    global_scale = scales.load_global_scale(other_global_scale_ptr, at, ok, other_blocks_c, OTHER_SCALE)
    quantize_tile(
        sign, magnitude, row, col, row_ok, col_ok, begin, at, ok, random, global_scale, other_scale_ptr, None,
        other_out_ptr, other_out_bytes, other_out_bytes, OTHER_FMT, OTHER_SCALE, DTYPE, OTHER_TILE, OTHER_GIVEN, True,
        False, not OTHER_GIVEN, OTHER_OUT_BITS, OTHER_ROUNDING, OTHER_CONVERT,
    )  # fmt: skip
