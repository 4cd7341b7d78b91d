"""Kernels: implicit convolutions, matmuls of patches that are read from the images and never stored.

They use the tile functions of ``integers`` and ``weight_only``; ``patches`` computes addresses. The third grid axis is
the group. In a depthwise convolution a patch has one channel and a tile is [positions, channels], without tensor cores.

Source: docs/numerics.md section 9.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, integers, patches, weight_only
from lowbit.kernels.spec import GENERAL_OF_PRODUCTS


@triton.jit
def place(rows, cols, M: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr):
    """Rows and columns of this program's tile. Columns outside its group are set to ``cols``."""
    each = cols // GROUPS
    row, col = weight_only.place(rows, each, M, N)
    if GROUPS > 1:
        col = tl.where(col < each, tl.program_id(2) * each + col, cols)
    return row, col


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def conv_integers(
    a_ptr, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_zero_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, bias_ptr, out_ptr,
    rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, block, segments, length, steps,
    count, channels, each, size_d, size_h, size_w, places_d, places_h, places_w,
    A: tl.constexpr, A_SCALE: tl.constexpr, A_AFFINE: tl.constexpr,
    B: tl.constexpr, B_SCALE: tl.constexpr, B_AFFINE: tl.constexpr, B_PAIRS: tl.constexpr,
    WHOLE: tl.constexpr, ONE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WINDOW: tl.constexpr, MADE: tl.constexpr, MADE_SCALE: tl.constexpr, MADE_DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """``integers`` on patches of ``a [N, D, H, W, channels]``."""
    row, col = place(rows, cols, M, N, GROUPS)
    group = tl.program_id(2)
    if MADE is not None:
        a_scale_ptr += group.to(tl.int64) * rows
    integers.multiply(
        row, col, rows, a_ptr + group * each, 0, 0, 0, b_ptr, b_stride_r, b_stride_c, b_bytes,
        a_scale_ptr, a_zero_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, bias_ptr, out_ptr,
        cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, block, segments, length, steps,
        count, A, A_SCALE, A_AFFINE, False, B, B_SCALE, B_AFFINE, B_PAIRS, WHOLE, ONE, ALIGNED, BIAS, DTYPE, M, N, K,
        (channels, each, size_d, size_h, size_w, places_d, places_h, places_w), WINDOW, MADE,
        MADE_SCALE, MADE_DTYPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def conv_weight_only(
    a_ptr, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr, sums_ptr,
    rows, cols, depth, a_block, b_block, b_block_c, blocks, block, steps, count, share,
    channels, each, size_d, size_h, size_w, places_d, places_h, places_w,
    B: tl.constexpr, B_SCALE: tl.constexpr, A_SCALE: tl.constexpr, AFFINE: tl.constexpr, PAIRS: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
    FP8: tl.constexpr, PTX: tl.constexpr, REGISTERS: tl.constexpr, OPERAND: tl.constexpr,
    A_FP8: tl.constexpr, A_TERMS: tl.constexpr, B_TERMS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WINDOW: tl.constexpr, MADE: tl.constexpr, MADE_SCALE: tl.constexpr, MADE_DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """``weight_only`` on patches of ``a [N, D, H, W, channels]``."""
    row, col = place(rows, cols, M, N, GROUPS)
    group = tl.program_id(2)
    if MADE is not None:
        a_scale_ptr += group.to(tl.int64) * rows
    weight_only.multiply(
        row, col, rows, a_ptr + group * each, 0, 0, b_ptr, b_stride_r, b_stride_c, b_bytes,
        a_scale_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr, sums_ptr,
        None, rows, cols, depth, a_block, 1, 1, 1, b_block, b_block_c, blocks, block, steps, count, share,
        B, B_SCALE, A_SCALE, None, AFFINE, PAIRS, SCALED, GROUP, GLOBAL, BIAS, DTYPE, FP8, PTX, REGISTERS, OPERAND,
        A_FP8, A_TERMS, B_TERMS, SPLIT, M, N, K,
        (channels, each, size_d, size_h, size_w, places_d, places_h, places_w), WINDOW, MADE,
        MADE_SCALE, MADE_DTYPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def patch_scales(
    a_ptr, out_ptr, rows, depth, count,
    channels, each, size_d, size_h, size_w, places_d, places_h, places_w,
    WINDOW: tl.constexpr, MADE: tl.constexpr, MADE_SCALE: tl.constexpr, MADE_DTYPE: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """fp32 scales ``out [groups, rows]`` of the patches of each group; NaN for a patch with Inf or NaN."""
    group = tl.program_id(2)
    row = tl.program_id(0) * M + tl.arange(0, M)
    row_ok = row < rows
    image = (channels, each, size_d, size_h, size_w, places_d, places_h, places_w)
    first = patches.corner(row, image, WINDOW)
    amax = tl.zeros([M], tl.int32)
    for step in range(count):
        k = step * K + tl.arange(0, K)
        raw, _ = patches.load(a_ptr + group * each, first, k, row_ok, k < depth, image, WINDOW)
        _, magnitude = bits.split(raw, MADE_DTYPE)
        amax = tl.maximum(amax, tl.max(magnitude, axis=1))
    tl.store(out_ptr + group.to(tl.int64) * rows + row, patches.made_scale(amax, MADE, MADE_SCALE), row_ok)


@triton.jit
def signed(code, FMT: tl.constexpr):
    """The int32 values of integer codes."""
    if FMT[5]:
        return (code << (32 - FMT[1])) >> (32 - FMT[1])
    else:
        return code


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def depthwise(
    a_ptr, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_zero_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr,
    rows, cols, depth, b_block, channels, each, size_d, size_h, size_w, places_d, places_h, places_w,
    A: tl.constexpr, A_SCALE: tl.constexpr, A_AFFINE: tl.constexpr, A_FP8: tl.constexpr,
    B: tl.constexpr, B_SCALE: tl.constexpr, B_AFFINE: tl.constexpr, FP8: tl.constexpr,
    INTEGERS: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, MADE: tl.constexpr, MADE_SCALE: tl.constexpr, MADE_DTYPE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A tile [M, N] of positions and channels of the result. ``EACH`` adjacent output channels read one input channel.

    ``A``: the format of ``a``, None for floats. ``INTEGERS``: sums are int32; otherwise fp32 of decoded numbers.
    """
    row, col = weight_only.place(rows, cols, M, N)
    row_ok, col_ok = row < rows, col < cols
    image = (channels, each, size_d, size_h, size_w, places_d, places_h, places_w)
    first = patches.corner(row, image, WINDOW)
    channel = col // EACH
    ok = row_ok[:, None] & col_ok[None, :]
    if MADE is not None:
        amax = tl.zeros([M, N], tl.int32)
        for tap in range(depth):
            at, there = patches.find(first, tl.zeros_like(col) + tap, channel, image, ok, WINDOW)
            _, magnitude = bits.split(tl.load(a_ptr + at, there, 0), MADE_DTYPE)
            amax = tl.maximum(amax, magnitude)
        a_scale = patches.made_scale(amax, MADE, MADE_SCALE)
    elif A is not None:
        a_scale = weight_only.scale_of(a_scale_ptr, None, row, row * 0, row_ok, A_SCALE)[:, None]
    else:
        a_scale = tl.full([M, 1], 1.0, tl.float32)
    a_zero = tl.zeros([], tl.int32)
    if A_AFFINE:
        a_zero = tl.load(a_zero_ptr).to(tl.int32)
    b_zero = tl.zeros([N], tl.int32)
    if B_AFFINE:
        b_zero = tl.load(b_zero_ptr + col // b_block, col_ok, 0).to(tl.int32)
    total = tl.zeros([M, N], tl.int32 if INTEGERS else tl.float32)
    for tap in range(depth):
        at, there = patches.find(first, tl.zeros_like(col) + tap, channel, image, ok, WINDOW)
        raw = tl.load(a_ptr + at, there, 0)
        k = tap + tl.arange(0, 1)
        code = weight_only.load_codes(b_ptr, b_stride_r, b_stride_c, b_bytes, col, k, col_ok, k >= 0, tap, B[1], False)
        code = tl.reshape(code, [N])
        if MADE is not None:
            raw = patches.encode(raw, a_scale, MADE, MADE_SCALE, MADE_DTYPE)
        if INTEGERS:
            a = tl.where(there, signed(raw.to(tl.int32), A) - a_zero, 0)
            b = signed(code, B) - b_zero
        else:
            if A is None:
                a = raw.to(tl.float32)
            else:
                a = weight_only.decode(raw.to(tl.int32), None, A, A_FP8) - a_zero.to(tl.float32)
                a = tl.where(there, a, 0.0)
            b = weight_only.decode(code, table_ptr, B, FP8) - b_zero.to(tl.float32)
        total += a * b[None, :]
    b_scale = weight_only.scale_of(b_scale_ptr, b_global_ptr, col, col // b_block, col_ok, B_SCALE)
    scaled = total.to(tl.float32) * (a_scale * b_scale[None, :])
    integers.store(scaled, row, col, row_ok, col_ok, cols, bias_ptr, out_ptr, BIAS, DTYPE)
