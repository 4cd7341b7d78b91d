"""Kernels: the gradients of fake quantization, straight through for x, LSQ for scales and LSQ+ for zero points.

``grad_x`` is ``grad`` if the quotient was in range, else +0. The gradient of a scale is the sum over its block of
``(level - x / scale if in range else level) * grad``; level is the decoded code minus its zero point. The gradient of a
zero point is the sum of ``-scale * grad`` over elements out of range. Scales come first, then zero points. Each tile
stores its sums. If a block has several tiles, ``sum_pieces`` adds them in a fixed order, so results are deterministic.

Source: docs/numerics.md section 10; LSQ, arXiv 1902.08153; LSQ+, arXiv 2004.09576.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, scales, tiles
from lowbit.kernels.quantize import load_input
from lowbit.kernels.spec import GENERAL


@triton.jit
def in_range(magnitude, sign, zero_point, FMT: tl.constexpr, MAX: tl.constexpr):
    """Whether quotients were encoded without clamping; False for NaN."""
    if FMT[0] == 1:
        q = bits.round_integer(sign, magnitude) + zero_point
        return (q >= FMT[9]) & (q <= FMT[10]) & (magnitude <= 0x7F800000)
    else:
        return magnitude.to(tl.float32, bitcast=True) <= MAX


@triton.jit(do_not_specialize=GENERAL)
def fake_quantize_backward(
    grad_ptr, grad_stride_r, grad_stride_c, x_ptr, stride_r, stride_c, scale_ptr, zero_ptr, global_scale_ptr,
    out_ptr, out_pitch, sums_ptr, rows, cols, block_r, block_c, blocks_r, blocks_c, pieces_r, pieces_c, tiles_c,
    FMT: tl.constexpr, SCALE: tl.constexpr, MAX: tl.constexpr, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILE: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """A tile of grad_x. With GIVEN (scales are loaded, not computed) also the sums of its blocks ``[blocks, pieces]``,
    and the same for zero points.
    """
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, pieces_r, block_r, rows, TILE[0], TILE[1], TILE[2])
    col, col_ok = tiles.positions(pid_c, pieces_c, block_c, cols, TILE[3], TILE[4], TILE[5])
    here = row_ok[:, None] & col_ok[None, :]
    sign, magnitude = load_input(x_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    at, ok = tiles.blocks(pid_r, pid_c, pieces_r, pieces_c, blocks_r, blocks_c, TILE)
    global_scale = scales.load_global_scale(global_scale_ptr, at, ok, blocks_c, SCALE)
    if GIVEN:
        scale = scales.widen(tl.load(scale_ptr + at, ok, 0), global_scale, SCALE)
        zero_point = tl.zeros_like(scale)
        if SCALE[2]:
            zero_point = tl.load(zero_ptr + at, ok, 0).to(tl.int32)
    else:
        high, low = tiles.extremes(sign, magnitude, SCALE[2] or SCALE[6], TILE)
        _, scale, zero_point = scales.make(high, low, global_scale, FMT, SCALE)
    step = tiles.spread(scale, TILE)
    sign, magnitude = scales.divide(sign, magnitude, step, SCALE)
    zero_point = tiles.spread(zero_point, TILE)
    kept = in_range(magnitude, sign, zero_point, FMT, MAX)

    grad_at = (row.to(tl.int64) * grad_stride_r)[:, None] + (col.to(tl.int64) * grad_stride_c)[None, :]
    pattern = tl.load(grad_ptr + grad_at, here, 0)
    out = tl.where(kept, pattern, tl.zeros_like(pattern))
    tl.store(out_ptr + (row.to(tl.int64) * out_pitch)[:, None] + col[None, :], out, here)
    if sums_ptr is not None:
        grad_sign, grad = bits.split(pattern, GRAD_DTYPE)
        grad = (grad | (grad_sign << 31)).to(tl.float32, bitcast=True)
        code = bits.encode(sign, magnitude, 0, zero_point, FMT, True, False)
        level = bits.decode(code, zero_point, FMT).to(tl.float32, bitcast=True)
        quotient = (magnitude | (sign << 31)).to(tl.float32, bitcast=True)
        slope = tl.where(here, tl.where(kept, level - quotient, level) * grad, 0.0)
        cut = tl.reshape(slope, [TILE[0], TILE[1], TILE[3], TILE[4]])
        piece = (pid_r % pieces_r) * pieces_c + pid_c % pieces_c
        sums_ptr += at * (pieces_r * pieces_c) + piece
        tl.store(sums_ptr, tl.sum(tl.sum(cut, axis=3), axis=1), ok)
        if SCALE[2]:
            moved = tl.where(here & (kept == 0), -step.to(tl.float32, bitcast=True) * grad, 0.0)
            cut = tl.reshape(moved, [TILE[0], TILE[1], TILE[3], TILE[4]])
            of_scales = blocks_r.to(tl.int64) * blocks_c * (pieces_r * pieces_c)
            tl.store(sums_ptr + of_scales, tl.sum(tl.sum(cut, axis=3), axis=1), ok)


@triton.jit(do_not_specialize=GENERAL)
def sum_pieces(sums_ptr, out_ptr, pieces, SIZE: tl.constexpr):
    """The sum of the ``pieces`` partial sums of a block; one program per block."""
    block = tl.program_id(0).to(tl.int64)
    total = tl.zeros([SIZE], tl.float32)
    for start in range(0, pieces, SIZE):
        at = start + tl.arange(0, SIZE)
        total += tl.load(sums_ptr + block * pieces + at, at < pieces, 0.0)
    tl.store(out_ptr + block, tl.sum(total, axis=0))
