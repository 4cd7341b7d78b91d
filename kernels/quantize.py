"""Kernels: quantize, fake-quantize and dequantize a matrix in blocks, and compute scales.

A program processes one tile (``tiles``). If blocks fit in a tile, ``quantize`` reads memory once. Longer blocks need
three kernels: ``reduce_extremes`` (atomic integer maxima, so the order does not matter), ``finish_scales``, and
``quantize`` with given scales.

Source: docs/numerics.md sections 2 to 7.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, rng, scales, tiles
from lowbit.kernels.spec import GENERAL


@triton.jit
def load_input(ptr, stride_r, stride_c, rows, cols, row_ok, col_ok, DTYPE: tl.constexpr):
    """A tile of the input as (sign, magnitude); masked elements are 0."""
    at = (rows.to(tl.int64) * stride_r)[:, None] + (cols.to(tl.int64) * stride_c)[None, :]
    return bits.split(tl.load(ptr + at, row_ok[:, None] & col_ok[None, :], 0), DTYPE)


@triton.jit(do_not_specialize=GENERAL)
def reduce_extremes(
    x_ptr, stride_r, stride_c, high_ptr, low_ptr,
    rows, cols, block_r, block_c, blocks_r, blocks_c, pieces_r, pieces_c, tiles_c,
    DTYPE: tl.constexpr, BOTH: tl.constexpr, FINITE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Atomic maxima into zeroed int32 ``high`` (and ``low``) [blocks_r, blocks_c]. FINITE skips Inf and NaN."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, pieces_r, block_r, rows, TILE[0], TILE[1], TILE[2])
    col, col_ok = tiles.positions(pid_c, pieces_c, block_c, cols, TILE[3], TILE[4], TILE[5])
    sign, magnitude = load_input(x_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    at, ok = tiles.blocks(pid_r, pid_c, pieces_r, pieces_c, blocks_r, blocks_c, TILE)
    reduce_tile(sign, magnitude, high_ptr, low_ptr, at, ok, BOTH, FINITE, TILE)


@triton.jit
def reduce_tile(
    sign, magnitude, high_ptr, low_ptr, at, ok, BOTH: tl.constexpr, FINITE: tl.constexpr, TILE: tl.constexpr
):
    """Reduce a tile into the extremes of its blocks ``at``."""
    if FINITE:
        magnitude = tl.where(magnitude < 0x7F800000, magnitude, 0)
    high, low = tiles.extremes(sign, magnitude, BOTH, TILE)
    tl.atomic_max(high_ptr + at, high, ok, sem="relaxed")
    if BOTH:
        tl.atomic_max(low_ptr + at, low, ok, sem="relaxed")


@triton.jit(do_not_specialize=GENERAL)
def finish_global_scale(high_ptr, out_ptr, count, DIVISOR: tl.constexpr, SIZE: tl.constexpr):
    """``count`` fp32 global scales, each from the largest finite magnitude in its range."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, scales.make_global(tl.load(high_ptr + at, at < count, 0), DIVISOR), at < count)


@triton.jit(do_not_specialize=GENERAL)
def finish_range(high_ptr, low_ptr, out_high_ptr, out_low_ptr, count, SIZE: tl.constexpr):
    """fp32 maxima and minima of ``count`` blocks from their extremes; NaN for blocks with Inf or NaN."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    high, low = tl.load(high_ptr + at, at < count, 0), tl.load(low_ptr + at, at < count, 0)
    non_finite = tl.maximum(high, low) >= 0x7F800000
    high = tl.where(non_finite, 0x7FC00000, high)
    low = tl.where(non_finite, 0x7FC00000, tl.where(low == 0, 0, low | -0x80000000))
    tl.store(out_high_ptr + at, high.to(tl.float32, bitcast=True), at < count)
    tl.store(out_low_ptr + at, low.to(tl.float32, bitcast=True), at < count)


@triton.jit(do_not_specialize=GENERAL)
def finish_scales(
    high_ptr, low_ptr, global_scale_ptr, scale_ptr, zero_ptr, count, blocks_c,
    FMT: tl.constexpr, SCALE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Stored scales and zero points from the extremes of ``count`` blocks."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = at < count
    high = tl.load(high_ptr + at, ok, 0)
    low = high
    if SCALE[2] or SCALE[6]:
        low = tl.load(low_ptr + at, ok, 0)
    global_scale = scales.load_global_scale(global_scale_ptr, at, ok, blocks_c, SCALE)
    raw, _, zero_point = scales.make(high, low, global_scale, FMT, SCALE)
    tl.store(scale_ptr + at, raw.to(scale_ptr.dtype.element_ty), ok)
    if SCALE[2]:
        tl.store(zero_ptr + at, zero_point.to(zero_ptr.dtype.element_ty), ok)


@triton.jit(do_not_specialize=GENERAL)
def quantize(
    x_ptr, stride_r, stride_c, scale_ptr, zero_ptr, global_scale_ptr, out_ptr, out_pitch, out_bytes,
    rows, cols, block_r, block_c, blocks_r, blocks_c, pieces_r, pieces_c, tiles_c,
    rng_ptr, stream_id: tl.int64, offset: tl.int64, pitch: tl.int64,
    FMT: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr,
    GIVEN: tl.constexpr, DYNAMIC: tl.constexpr, FAKE: tl.constexpr, STORE_SCALE: tl.constexpr,
    OUT_BITS: tl.constexpr, ROUNDING: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Load a tile, then ``quantize_tile``."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, pieces_r, block_r, rows, TILE[0], TILE[1], TILE[2])
    col, col_ok = tiles.positions(pid_c, pieces_c, block_c, cols, TILE[3], TILE[4], TILE[5])
    sign, magnitude = load_input(x_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    at, ok = tiles.blocks(pid_r, pid_c, pieces_r, pieces_c, blocks_r, blocks_c, TILE)
    begin = pid_c * (TILE[3] * TILE[4])
    random = rng.draw(row, col, begin, rng_ptr, stream_id, offset, pitch, ROUNDING)
    global_scale = scales.load_global_scale(global_scale_ptr, at, ok, blocks_c, SCALE)
    quantize_tile(
        sign, magnitude, row, col, row_ok, col_ok, begin, at, ok, random, global_scale, scale_ptr, zero_ptr,
        out_ptr, out_pitch, out_bytes, FMT, SCALE, DTYPE, TILE, GIVEN, DYNAMIC, FAKE, STORE_SCALE, OUT_BITS, ROUNDING,
        CONVERT,
    )  # fmt: skip


@triton.jit(do_not_specialize=GENERAL)
def quantize_rows(
    x_ptr, stride_r, stride_c, scale_ptr, global_scale_ptr, out_ptr, out_bytes, rows, cols, blocks_r, blocks_c,
    FMT: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr, DIVISOR: tl.constexpr,
    OUT_BITS: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Quantize whole rows to nearest, with one global scale per row and block scales."""
    row, row_ok = tiles.positions(tl.program_id(0), 1, 1, rows, TILE[0], TILE[1], True)
    col, col_ok = tiles.positions(0, 1, 1, cols, TILE[3], TILE[4], True)
    sign, magnitude = load_input(x_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    amax = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=1)
    made = scales.make_global(amax, DIVISOR)
    tl.store(global_scale_ptr + row, made, row_ok)
    at, ok = tiles.blocks(tl.program_id(0), 0, 1, 1, blocks_r, blocks_c, TILE)
    global_scale = tl.broadcast_to(made[:, None], [TILE[0], TILE[3]])
    quantize_tile(
        sign, magnitude, row, col, row_ok, col_ok, 0, at, ok, 0, global_scale, scale_ptr, None, out_ptr, out_bytes,
        out_bytes, FMT, SCALE, DTYPE, TILE, False, True, False, True, OUT_BITS, 0, CONVERT,
    )  # fmt: skip


@triton.jit
def quantize_tile(
    sign, magnitude, row, col, row_ok, col_ok, begin, at, ok, random, global_scale, scale_ptr, zero_ptr,
    out_ptr, out_pitch, out_bytes,
    FMT: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr,
    GIVEN: tl.constexpr, DYNAMIC: tl.constexpr, FAKE: tl.constexpr, STORE_SCALE: tl.constexpr,
    OUT_BITS: tl.constexpr, ROUNDING: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """Scale and encode a tile with blocks ``at``, then store codes of ``OUT_BITS`` bits, or with FAKE decode and store
    in x's dtype.

    GIVEN: scales are loaded, not computed. DYNAMIC: scales come from the same elements, so a NaN scale marks a
    non-finite block, whose codes are canonical. ROUNDING: see ``rng.draw``.
    """
    if GIVEN:
        scale = scales.widen(tl.load(scale_ptr + at, ok, 0), global_scale, SCALE)
        zero_point = tl.zeros_like(scale)
        if SCALE[2]:
            zero_point = tl.load(zero_ptr + at, ok, 0).to(tl.int32)
    else:
        high, low = tiles.extremes(sign, magnitude, SCALE[2] or SCALE[6], TILE)
        raw, scale, zero_point = scales.make(high, low, global_scale, FMT, SCALE)
        if STORE_SCALE:
            tl.store(scale_ptr + at, raw.to(scale_ptr.dtype.element_ty), ok)
            if SCALE[2]:
                tl.store(zero_ptr + at, zero_point.to(zero_ptr.dtype.element_ty), ok)
    scale = tiles.spread(scale, TILE)
    if SCALE[2]:
        zero_point = tiles.spread(zero_point, TILE)
    else:
        zero_point = 0
    # Fake quantization needs no canonical codes: the NaN scale makes every element NaN.
    CANONICAL: tl.constexpr = DYNAMIC and not FAKE
    code = encode_below(
        sign, magnitude, scale, zero_point, random, FMT, SCALE, CANONICAL, ROUNDING != 0, CONVERT
    )  # fmt: skip
    if FAKE:
        out = scales.multiply(bits.decode(code, zero_point, FMT), scale, DTYPE)
        to = (row.to(tl.int64) * out_pitch)[:, None] + col[None, :]
        tl.store(out_ptr + to, out, row_ok[:, None] & col_ok[None, :])
    else:
        tiles.store_codes(out_ptr, out_pitch, code, row, col, row_ok, col_ok, begin, out_bytes, OUT_BITS)


@triton.jit
def encode_below(
    sign, magnitude, scale, zero_point, random,
    FMT: tl.constexpr, SCALE: tl.constexpr, CANONICAL: tl.constexpr, STOCHASTIC: tl.constexpr,
    CONVERT: tl.constexpr = bits.NO_CONVERSION,
):  # fmt: skip
    """Saturating codes of numbers divided by their scales (fp32 bits). CANONICAL: the canonical code for a NaN scale.
    CONVERT: see ``bits.encode``.
    """
    sign, magnitude = scales.divide(sign, magnitude, scale, SCALE)
    code = bits.encode(sign, magnitude, random, zero_point, FMT, True, STOCHASTIC, CONVERT)
    if CANONICAL:
        code = tl.where((scale & 0x7FFFFFFF) > 0x7F800000, canonical(zero_point, FMT), code)
    return code


@triton.jit
def canonical(zero_point, FMT: tl.constexpr):
    """The code of every element of a block with Inf or NaN."""
    if FMT[0] == 1:
        return zero_point & ((1 << FMT[1]) - 1)
    elif FMT[0] == 2:
        return FMT[12]
    elif FMT[8] >= 0:
        return FMT[8]
    else:
        return FMT[6]


@triton.jit(do_not_specialize=GENERAL)
def dequantize(
    codes_ptr, stride_r, stride_c, codes_bytes, scale_ptr, zero_ptr, global_scale_ptr, out_ptr, out_pitch,
    rows, cols, block_r, block_c, blocks_r, blocks_c, pieces_r, pieces_c, tiles_c,
    FMT: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Decode the packed codes of a tile, multiply by the block scale, round to the output dtype."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, pieces_r, block_r, rows, TILE[0], TILE[1], TILE[2])
    col, col_ok = tiles.positions(pid_c, pieces_c, block_c, cols, TILE[3], TILE[4], TILE[5])
    begin = pid_c * (TILE[3] * TILE[4])
    code = tiles.load_codes(codes_ptr, stride_r, stride_c, row, col, row_ok, col_ok, begin, codes_bytes, FMT[1], PAIRS)
    at, ok = tiles.blocks(pid_r, pid_c, pieces_r, pieces_c, blocks_r, blocks_c, TILE)
    global_scale = scales.load_global_scale(global_scale_ptr, at, ok, blocks_c, SCALE)
    scale = tiles.spread(scales.widen(tl.load(scale_ptr + at, ok, 0), global_scale, SCALE), TILE)
    zero_point = 0
    if SCALE[2]:
        zero_point = tiles.spread(tl.load(zero_ptr + at, ok, 0).to(tl.int32), TILE)
    out = scales.multiply(bits.decode(code, zero_point, FMT), scale, DTYPE)
    to = (row.to(tl.int64) * out_pitch)[:, None] + col[None, :]
    tl.store(out_ptr + to, out, row_ok[:, None] & col_ok[None, :])
