"""Kernels: the matmul of two matrices of FP8, FP6 or FP4 codes by tensor cores with block scales.

Hardware applies one scale per 32 elements (E8M0), or per 16 (E4M3, for FP4 by FP4). It ignores the sign of a scale: a
tile with a negative scale is computed again, with the signs moved to the codes. FP6 is multiplied as E4M3: its patterns
are E4M3 patterns of the values divided by a power of two, which is multiplied afterwards.

Source: PTX ISA, tcgen05.mma and mma with block scaling; docs/numerics.md section 9.
"""

import triton
import triton.language as tl

from lowbit.kernels import tiles, weight_only
from lowbit.kernels.spec import GENERAL_OF_PRODUCTS


@triton.jit
def load_codes(ptr, stride_r, stride_c, bytes_a_row, row, row_ok, first, depth, FORMAT: tl.constexpr, K: tl.constexpr):
    """Codes of K elements from ``first`` in the hardware layout: bytes [R, K], or pairs [R, K / 2] for FP4."""
    if FORMAT == "e2m1":
        at = first // 2 + tl.arange(0, K // 2)
        ok = row_ok[:, None] & (at < bytes_a_row)[None, :]
        return tl.load(ptr + (row.to(tl.int64) * stride_r)[:, None] + (at.to(tl.int64) * stride_c)[None, :], ok, 0)
    elif FORMAT == "e2m3" or FORMAT == "e3m2":
        code = tiles.load_fours(ptr, stride_r, stride_c, row, row_ok, first, bytes_a_row, K)
        wide = (code & 31) << 1 if FORMAT == "e3m2" else code & 31
        return ((code & 32) << 2 | wide).to(tl.uint8)
    else:
        k = first + tl.arange(0, K)
        ok = row_ok[:, None] & (k < depth)[None, :]
        return tl.load(ptr + (row.to(tl.int64) * stride_r)[:, None] + (k.to(tl.int64) * stride_c)[None, :], ok, 0)


@triton.jit
def load_scales(ptr, blocks, block_r, block_c, row, row_ok, step, V: tl.constexpr, K: tl.constexpr):
    """Scales [R, K / V] of the K elements of a step. ``block_c``: elements per block, divided by V."""
    at = (step * (K // V) + tl.arange(0, K // V)) // block_c
    ok = row_ok[:, None] & (at < blocks)[None, :]
    return tl.load(ptr + ((row // block_r).to(tl.int64) * blocks)[:, None] + at[None, :], ok, 0)


@triton.jit
def turn(codes, scale):
    """Apply the signs of scales [R, K / 16] to FP4 codes [R, K / 2]."""
    R: tl.constexpr = codes.shape[0]
    sign = (scale & 0x80).to(tl.uint8)
    wide = tl.broadcast_to((sign | (sign >> 4))[:, :, None], [R, scale.shape[1], codes.shape[1] // scale.shape[1]])
    return codes ^ tl.reshape(wide, [R, codes.shape[1]])


@triton.jit
def sums(
    row, col, row_end, a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes, a_blocks_ptr,
    b_blocks_ptr, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, begin, end,
    A: tl.constexpr, B: tl.constexpr, V: tl.constexpr, TURNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums [N, M] of the steps from ``begin`` to ``end``, and whether a scale of FP4 codes is negative.

    ``V``: elements per hardware scale, 0 without scales. ``TURNED``: scales may be negative.
    """
    row_ok, col_ok = row < row_end, col < cols
    total = tl.zeros([N, M], tl.float32)
    if V == 16:
        a_signs = tl.zeros([M, K // V], tl.uint8)
        b_signs = tl.zeros([N, K // V], tl.uint8)
    for step in range(begin, end):
        a = load_codes(a_ptr, a_stride_r, a_stride_c, a_bytes, row, row_ok, step * K, depth, A, K)
        b = load_codes(b_ptr, b_stride_r, b_stride_c, b_bytes, col, col_ok, step * K, depth, B, K)
        if V == 0:
            a = a.to(tl.float8e4nv if A == "e4m3" else tl.float8e5, bitcast=True)
            b = b.to(tl.float8e4nv if B == "e4m3" else tl.float8e5, bitcast=True)
            total = tl.dot(b, tl.trans(a), total)
        else:
            a_scale = load_scales(a_blocks_ptr, a_blocks, a_block_r, a_block_c, row, row_ok, step, V, K)
            b_scale = load_scales(b_blocks_ptr, b_blocks, b_block_r, b_block_c, col, col_ok, step, V, K)
            if TURNED:
                a = turn(a, a_scale)
                b = turn(b, b_scale)
                a_scale = a_scale & 0x7F
                b_scale = b_scale & 0x7F
            elif V == 16:
                a_signs = a_signs | a_scale
                b_signs = b_signs | b_scale
            if V == 16:
                a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
                b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
            LEFT: tl.constexpr = "e4m3" if B == "e2m3" or B == "e3m2" else B
            RIGHT: tl.constexpr = "e4m3" if A == "e2m3" or A == "e3m2" else A
            total = tl.dot_scaled(b, b_scale, LEFT, tl.trans(a), a_scale, RIGHT, total)
    if V == 16:
        seen = tl.max(tl.max(a_signs.to(tl.int32), 1), 0) | tl.max(tl.max(b_signs.to(tl.int32), 1), 0)
        return total, seen >= 0x80
    else:
        return total, False


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def scaled(
    a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes, a_blocks_ptr, b_blocks_ptr,
    a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, sums_ptr,
    rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, a_block, b_block, count, share,
    A: tl.constexpr, B: tl.constexpr, V: tl.constexpr, FACTOR: tl.constexpr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr,
    BIAS: tl.constexpr, DTYPE: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of ``a [rows, depth] @ b [cols, depth].T``, computed as its transpose.

    ``a_blocks_ptr``, ``b_blocks_ptr``: stored block scales. For the epilogue and shares see ``weight_only``.
    ``FACTOR``: a power of two by which sums are multiplied.
    """
    row, col = weight_only.place(rows, cols, M, N)
    multiply(
        row, col, rows, a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes, a_blocks_ptr,
        b_blocks_ptr, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, sums_ptr,
        rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, a_block, b_block, count,
        share, A, B, V, FACTOR, A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE, SPLIT, M, N, K,
    )  # fmt: skip


@triton.jit
def multiply(
    row, col, row_end, a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes, a_blocks_ptr,
    b_blocks_ptr, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, sums_ptr,
    rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, a_block, b_block, count, share,
    A: tl.constexpr, B: tl.constexpr, V: tl.constexpr, FACTOR: tl.constexpr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr,
    BIAS: tl.constexpr, DTYPE: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The tile at rows ``row`` (valid before ``row_end``) and columns ``col``: see ``scaled``."""
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, count)
    total, negative = sums(
        row, col, row_end, a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes,
        a_blocks_ptr, b_blocks_ptr, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, begin,
        end, A, B, V, False, M, N, K,
    )  # fmt: skip
    if V == 16:
        if negative:
            total, _ = sums(
                row, col, row_end, a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes,
                a_blocks_ptr, b_blocks_ptr, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c,
                b_blocks, begin, end, A, B, V, True, M, N, K,
            )  # fmt: skip
    weight_only.finish(
        total * FACTOR, row, col, row_end, rows, cols, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr,
        out_ptr, sums_ptr, a_block, b_block, A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE, SPLIT,
    )  # fmt: skip
