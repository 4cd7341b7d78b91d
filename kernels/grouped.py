"""Kernels: grouped matmuls for mixtures of experts in one launch. Rows of ``a`` are sorted by expert.

Each program finds its expert from the offsets on the device, so the host does not wait. It then runs the tile function
of the kernel for a single matmul.

Source: docs/numerics.md section 9.
"""

import triton
import triton.language as tl

from lowbit.kernels import integers, scaled, weight_only
from lowbit.kernels.spec import GENERAL_OF_PRODUCTS


@triton.jit
def locate(offsets_ptr, experts, rows, tile, M: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of row tile ``tile``, the tile's first row, and the end of the expert's rows.

    Tiles are not shared by experts. Rows after the last expert's count as expert ``experts``; a tile past all rows
    has a larger number. ``EXPERTS``: a power of two above ``experts``.
    """
    expert = tl.arange(0, EXPERTS)
    end = tl.load(offsets_ptr + expert, expert < experts, rows)
    begin = tl.load(offsets_ptr + expert - 1, (expert > 0) & (expert <= experts), 0)
    begin = tl.where(expert > experts, rows, begin)
    begin, end = tl.minimum(tl.maximum(begin, 0), rows), tl.minimum(tl.maximum(end, 0), rows)
    tiles = (tl.maximum(end - begin, 0) + M - 1) // M
    behind = tl.cumsum(tiles, 0)
    found = tl.sum((behind <= tile).to(tl.int32), 0)
    here = expert == found
    first = tl.sum(tl.where(here, begin + (tile - behind + tiles) * M, 0), 0)
    return found, first, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def place(offsets_ptr, experts, rows, cols, M: tl.constexpr, N: tl.constexpr, EXPERTS: tl.constexpr):
    """This program's expert, rows and columns, and the end of the expert's rows."""
    tiles_n = tl.cdiv(cols, N)
    down, across = weight_only.tile_of(tl.num_programs(0) // tiles_n, tiles_n)
    expert, first, end = locate(offsets_ptr, experts, rows, down, M, EXPERTS)
    return expert, first + tl.arange(0, M), across * N + tl.arange(0, N), end


@triton.jit
def of_expert(ptr, expert, stride):
    """Pointer to an expert's part of a stack."""
    return ptr + expert.to(tl.int64) * stride


@triton.jit
def store_zeros(row, col, end, cols, out_ptr):
    """Store zeros in rows without an expert."""
    to = (row.to(tl.int64) * cols)[:, None] + col[None, :]
    zeros = tl.zeros([row.shape[0], col.shape[0]], out_ptr.dtype.element_ty)
    tl.store(out_ptr + to, zeros, (row < end)[:, None] & (col < cols)[None, :])


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def grouped_weight_only(
    a_ptr, a_stride_r, a_stride_c, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr, sums_ptr,
    a_blocks_ptr, rows, cols, depth, a_block, a_block_r, a_block_c, a_blocks, b_block, b_block_c, blocks, block, steps,
    count, share, offsets_ptr, experts, b_stride_e, scale_stride_e, global_stride_e,
    B: tl.constexpr, B_SCALE: tl.constexpr, A_SCALE: tl.constexpr, A_BLOCKS: tl.constexpr, AFFINE: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr, REGISTERS: tl.constexpr, OPERAND: tl.constexpr,
    A_FP8: tl.constexpr, A_TERMS: tl.constexpr, B_TERMS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """``weight_only`` for the expert of a tile. ``b`` and its scales are stacked by expert."""
    expert, row, col, end = place(offsets_ptr, experts, rows, cols, M, N, EXPERTS)
    if b_zero_ptr is not None:
        b_zero_ptr = of_expert(b_zero_ptr, expert, scale_stride_e)
    if b_global_ptr is not None:
        b_global_ptr = of_expert(b_global_ptr, expert, global_stride_e)
    if bias_ptr is not None:
        bias_ptr = of_expert(bias_ptr, expert, cols)
    if expert < experts:
        weight_only.multiply(
            row, col, end, a_ptr, a_stride_r, a_stride_c,
            of_expert(b_ptr, expert, b_stride_e), b_stride_r, b_stride_c, b_bytes,
            a_scale_ptr, a_global_ptr, of_expert(b_scale_ptr, expert, scale_stride_e),
            b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr, sums_ptr, a_blocks_ptr,
            rows, cols, depth, a_block, a_block_r, a_block_c, a_blocks, b_block,
            b_block_c, blocks, block, steps, count, share,
            B, B_SCALE, A_SCALE, A_BLOCKS, AFFINE, PAIRS, SCALED, GROUP, GLOBAL, BIAS, DTYPE, FP8, PTX, REGISTERS,
            OPERAND, A_FP8, A_TERMS, B_TERMS, SPLIT, M, N, K,
        )  # fmt: skip
    elif (expert == experts) & (tl.program_id(1) == 0):
        store_zeros(row, col, end, cols, out_ptr)


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def grouped_add_shares(
    sums_ptr, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, rows, cols, a_block, b_block,
    shares, offsets_ptr, experts, scale_stride_e, global_stride_e,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """``add_shares`` for the expert of a tile."""
    tiles_n = tl.cdiv(cols, N)
    expert, first, end = locate(offsets_ptr, experts, rows, tl.program_id(0) // tiles_n, M, EXPERTS)
    row, col = first + tl.arange(0, M), (tl.program_id(0) % tiles_n) * N + tl.arange(0, N)
    if b_global_ptr is not None:
        b_global_ptr = of_expert(b_global_ptr, expert, global_stride_e)
    if bias_ptr is not None:
        bias_ptr = of_expert(bias_ptr, expert, cols)
    if expert < experts:
        weight_only.add(
            row, col, end, sums_ptr, a_scale_ptr, a_global_ptr, of_expert(b_scale_ptr, expert, scale_stride_e),
            b_global_ptr, bias_ptr, out_ptr, rows, cols, a_block, b_block, shares,
            A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE, M, N,
        )  # fmt: skip


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def grouped_integers(
    a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_zero_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, bias_ptr, out_ptr,
    rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, block, segments, length, steps,
    count, offsets_ptr, experts, b_stride_e, scale_stride_e, global_stride_e,
    A: tl.constexpr, A_SCALE: tl.constexpr, A_AFFINE: tl.constexpr, A_PAIRS: tl.constexpr,
    B: tl.constexpr, B_SCALE: tl.constexpr, B_AFFINE: tl.constexpr, B_PAIRS: tl.constexpr,
    WHOLE: tl.constexpr, ONE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """``integers`` for the expert of a tile. ``b`` and its scales are stacked by expert."""
    expert, row, col, end = place(offsets_ptr, experts, rows, cols, M, N, EXPERTS)
    if b_zero_ptr is not None:
        b_zero_ptr = of_expert(b_zero_ptr, expert, scale_stride_e)
    if b_global_ptr is not None:
        b_global_ptr = of_expert(b_global_ptr, expert, global_stride_e)
    if bias_ptr is not None:
        bias_ptr = of_expert(bias_ptr, expert, cols)
    if expert < experts:
        integers.multiply(
            row, col, end, a_ptr, a_stride_r, a_stride_c, a_bytes,
            of_expert(b_ptr, expert, b_stride_e), b_stride_r, b_stride_c, b_bytes,
            a_scale_ptr, a_zero_ptr, a_global_ptr, of_expert(b_scale_ptr, expert, scale_stride_e),
            b_zero_ptr, b_global_ptr, bias_ptr, out_ptr,
            cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, block, segments, length,
            steps, count, A, A_SCALE, A_AFFINE, A_PAIRS, B, B_SCALE, B_AFFINE, B_PAIRS, WHOLE, ONE, ALIGNED, BIAS,
            DTYPE, M, N, K,
        )  # fmt: skip
    elif expert == experts:
        store_zeros(row, col, end, cols, out_ptr)


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def grouped_scaled(
    a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes, a_blocks_ptr, b_blocks_ptr,
    a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, sums_ptr,
    rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, a_block, b_block, count, share,
    offsets_ptr, experts, b_stride_e, scale_stride_e, global_stride_e,
    A: tl.constexpr, B: tl.constexpr, V: tl.constexpr, FACTOR: tl.constexpr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr,
    BIAS: tl.constexpr, DTYPE: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """``scaled`` for the expert of a tile. ``b`` and its scales are stacked by expert."""
    expert, row, col, end = place(offsets_ptr, experts, rows, cols, M, N, EXPERTS)
    if b_global_ptr is not None:
        b_global_ptr = of_expert(b_global_ptr, expert, global_stride_e)
    if bias_ptr is not None:
        bias_ptr = of_expert(bias_ptr, expert, cols)
    if expert < experts:
        scaled.multiply(
            row, col, end, a_ptr, a_stride_r, a_stride_c, a_bytes,
            of_expert(b_ptr, expert, b_stride_e), b_stride_r, b_stride_c, b_bytes,
            a_blocks_ptr, of_expert(b_blocks_ptr, expert, scale_stride_e), a_scale_ptr, a_global_ptr,
            of_expert(b_scale_ptr, expert, scale_stride_e), b_global_ptr, bias_ptr, out_ptr, sums_ptr,
            rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, a_block, b_block,
            count, share, A, B, V, FACTOR, A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE, SPLIT, M, N, K,
        )  # fmt: skip
    elif (expert == experts) & (tl.program_id(1) == 0):
        store_zeros(row, col, end, cols, out_ptr)
