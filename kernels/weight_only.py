"""Kernels: the matmul of a float matrix and a matrix of codes, which are decoded in registers.

Tensor cores multiply in bf16, or in fp16 for fp16 floats, and sum in fp32. A number that is not exact there is split
into several: fp32 and codebook entries into three terms of 8 bits. A scale is multiplied into the operand if that is
exact, else into the sum of its block, or for row scales in the epilogue.

Source: docs/numerics.md section 9.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, decode_4bit, patches, scales, tiles
from lowbit.kernels.spec import GENERAL_OF_PRODUCTS


@triton.jit
def narrowed(value, OPERAND: tl.constexpr):
    """``value`` in the operand format. The interpreter multiplies bf16 numbers in fp32, which is exact."""
    if OPERAND == "fp16":
        return value.to(tl.float16)
    elif OPERAND == "bf16":
        return value.to(tl.bfloat16)
    else:
        return value


@triton.jit
def upper(value):
    """fp32 numbers with the mantissa truncated to bf16; NaN stays NaN."""
    cut = (value.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(value == value, cut, value)


@triton.jit
def finite(value):
    """0 in place of Inf and NaN."""
    return tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)


@triton.jit
def term(value, INDEX: tl.constexpr, TERMS: tl.constexpr, OPERAND: tl.constexpr):
    """Term ``INDEX`` of the ``TERMS`` 8-bit numbers that add up to fp32 ``value``. Inf and NaN are in the first."""
    if TERMS == 1:
        return narrowed(value, OPERAND)
    else:
        for _ in tl.static_range(INDEX):
            rest = value - upper(value)
            value = tl.where(rest == rest, rest, 0.0)
        return narrowed(upper(value), OPERAND)


@triton.jit
def load_codes(
    ptr, stride_r, stride_c, bytes_a_row, row, k, row_ok, k_ok, first, BITS: tl.constexpr, PAIRS: tl.constexpr
):
    """Codes [N, K] from column ``first``. PAIRS: 4 or 6 bits, ``first`` begins a byte; each byte is loaded once."""
    if PAIRS and BITS == 6:
        return tiles.load_fours(ptr, stride_r, stride_c, row, row_ok, first, bytes_a_row, k.shape[0])
    elif PAIRS:
        K: tl.constexpr = k.shape[0]
        at = first // 2 + tl.arange(0, K // 2)
        ok = row_ok[:, None] & (at < bytes_a_row)[None, :]
        pair = tl.load(ptr + (row.to(tl.int64) * stride_r)[:, None] + (at.to(tl.int64) * stride_c)[None, :], ok, 0).to(
            tl.int32
        )
        return tl.reshape(tl.join(pair & 15, pair >> 4), [row.shape[0], K])
    else:
        return tiles.load_codes(ptr, stride_r, stride_c, row, k, row_ok, k_ok, 0, bytes_a_row, BITS, False)


@triton.jit
def decode(code, table_ptr, FMT: tl.constexpr, FP8: tl.constexpr):
    """fp32 values of codes. FP8: the format that hardware converts from, or none."""
    if FP8 == "e4m3":
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif FP8 == "e5m2":
        # The upper half of fp16's patterns.
        return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FMT[0] == 1:
        # An integer below 2**23 in the mantissa of 2**23: the subtraction leaves it exactly.
        sign: tl.constexpr = (1 << (FMT[1] - 1)) if FMT[5] else 0
        wide = ((code ^ sign) | 0x4B000000).to(tl.float32, bitcast=True)
        return wide - (8388608.0 + sign)
    elif FMT[0] == 2:
        return tl.load(table_ptr + code)
    else:
        return bits.decode(code, 0, FMT).to(tl.float32, bitcast=True)


@triton.jit
def tile_of(tiles_m, tiles_n):
    """The row and column index of this program's tile.

    Eight tiles down before one across, so that concurrent programs share their tiles of ``b`` in L2.
    """
    band = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    within = tl.program_id(0) % (8 * tiles_n)
    return band * 8 + within % height, within // height


@triton.jit
def place(rows, cols, M: tl.constexpr, N: tl.constexpr):
    """Rows and columns of this program's tile."""
    down, across = tile_of(tl.cdiv(rows, M), tl.cdiv(cols, N))
    return down * M + tl.arange(0, M), across * N + tl.arange(0, N)


@triton.jit
def scale_of(ptr, global_ptr, row, at, ok, SCALE: tl.constexpr):
    """fp32 row scales."""
    global_scale = scales.load_global_scale(global_ptr, row, ok, 1, SCALE)
    return scales.widen(tl.load(ptr + at, ok, 0), global_scale, SCALE).to(tl.float32, bitcast=True)


@triton.jit
def epilogue(
    total, row, col, rows, cols, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, a_block,
    b_block,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Apply row scales, bias and cast to sums [N, M], in that order."""
    row_ok, col_ok = row < rows, col < cols
    scale = tl.full([col.shape[0], 1], 1.0, tl.float32)
    if SCALED == "row":
        scale = scale_of(b_scale_ptr, b_global_ptr, col, col // b_block, col_ok, B_SCALE)[:, None]
    elif GLOBAL:
        scale = tl.load(b_global_ptr + (col if GLOBAL == 2 else col * 0), col_ok, 1.0)[:, None]
    if A_SCALE is not None:
        scale = scale_of(a_scale_ptr, a_global_ptr, row, row // a_block, row_ok, A_SCALE)[None, :] * scale
    if A_SCALE is not None or SCALED == "row" or GLOBAL:
        total = total * scale
    if BIAS >= 0:
        sign, magnitude = bits.split(tl.load(bias_ptr + col, col_ok, 0), BIAS)
        total = total + (magnitude | (sign << 31)).to(tl.float32, bitcast=True)[:, None]
    to = (row.to(tl.int64) * cols)[None, :] + col[:, None]
    tl.store(
        out_ptr + to, bits.narrow(total.to(tl.int32, bitcast=True), DTYPE, False), row_ok[None, :] & col_ok[:, None]
    )


@triton.jit
def finish(
    total, row, col, end, rows, cols, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr,
    sums_ptr, a_block, b_block,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store sums [N, M] through the epilogue, or with ``SPLIT`` as a partial sum. Rows before ``end`` are valid."""
    if SPLIT:
        to = (tl.program_id(1) * rows + row).to(tl.int64)[None, :] * cols + col[:, None]
        tl.store(sums_ptr + to, total, (row < end)[None, :] & (col < cols)[:, None])
    else:
        epilogue(
            total, row, col, end, cols, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr,
            a_block, b_block, A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE,
        )  # fmt: skip


@triton.jit
def multiply(
    row, col, end, a_ptr, a_stride_r, a_stride_c, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr, sums_ptr,
    a_blocks_ptr, rows, cols, depth, a_block, a_block_r, a_block_c, a_blocks, b_block, b_block_c, blocks, block, steps,
    count, share,
    B: tl.constexpr, B_SCALE: tl.constexpr, A_SCALE: tl.constexpr, A_BLOCKS: tl.constexpr, AFFINE: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr, REGISTERS: tl.constexpr, OPERAND: tl.constexpr,
    A_FP8: tl.constexpr, A_TERMS: tl.constexpr, B_TERMS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    image=None, WINDOW: tl.constexpr = None, MADE: tl.constexpr = None, MADE_SCALE: tl.constexpr = None,
    MADE_DTYPE: tl.constexpr = 0,
):  # fmt: skip
    """The tile at rows ``row`` (valid before ``end``) and columns ``col``: see ``weight_only``.

    With a ``WINDOW`` the rows are patches: see ``patches``.
    """
    row_ok, col_ok = row < end, col < cols
    if WINDOW is None:
        a_base = a_ptr + (row.to(tl.int64) * a_stride_r)[:, None]
    else:
        first_pixel = patches.corner(row, image, WINDOW)
    if MADE is not None:
        patch_scale = scale_of(a_scale_ptr, None, row, row, row_ok, A_SCALE)[:, None]
    scale_row = (col // b_block).to(tl.int64) * blocks
    a_scale_row = (row // a_block_r).to(tl.int64) * a_blocks
    BY_BLOCK: tl.constexpr = SCALED == "block" or A_BLOCKS is not None
    total = tl.zeros([N, M], tl.float32)
    begin = tl.program_id(1) * share
    for step in range(begin, tl.minimum(begin + share, count)):
        at = 0
        if BY_BLOCK:
            begins = (step // steps) * block
            at = begins // b_block_c
            first = begins + (step % steps) * K
            last = tl.minimum(begins + block, depth)
        else:
            first = step * K
            last = depth
        k = first + tl.arange(0, K)
        k_ok = k < last
        if WINDOW is None:
            a = tl.load(a_base + (k.to(tl.int64) * a_stride_c)[None, :], row_ok[:, None] & k_ok[None, :], 0)
        else:
            a, _ = patches.load(a_ptr, first_pixel, k, row_ok, k_ok, image, WINDOW)
        if MADE is not None:
            code = patches.encode(a, patch_scale, MADE, MADE_SCALE, MADE_DTYPE)
            a = decode(code, None, MADE, A_FP8)
        elif A_FP8 != "":
            a = decode(a.to(tl.int32), None, (), A_FP8)
        zero_point = tl.zeros([N], tl.float32)
        if AFFINE:
            zero_point = tl.load(b_zero_ptr + scale_row + at, col_ok, 0).to(tl.float32)
        if SCALED == "none":
            b_at = (col.to(tl.int64) * b_stride_r)[:, None] + (k.to(tl.int64) * b_stride_c)[None, :]
            value = tl.load(b_ptr + b_at, col_ok[:, None] & k_ok[None, :], 0.0).to(tl.float32)
        elif PTX != "":
            pair_at = first // 2 + tl.arange(0, K // 2)
            ok = col_ok[:, None] & (pair_at < b_bytes)[None, :]
            packed = tl.load(
                b_ptr + (col.to(tl.int64) * b_stride_r)[:, None] + (pair_at.to(tl.int64) * b_stride_c)[None, :], ok, 0
            )
            pairs = decode_4bit.look_up(packed, PTX, REGISTERS, B_TERMS)
        else:
            code = load_codes(b_ptr, b_stride_r, b_stride_c, b_bytes, col, k, col_ok, k_ok, first, B[1], PAIRS)
            value = decode(code, table_ptr, B, FP8)
            if AFFINE:
                value -= zero_point[:, None]
        if SCALED == "element":
            index = first // GROUP + tl.arange(0, K // GROUP)
            ok = col_ok[:, None] & (index < blocks)[None, :]
            raw = tl.load(b_scale_ptr + scale_row[:, None] + index[None, :], ok, 0)
            element_scale = scales.widen(raw, tl.full([], 1.0, tl.float32), B_SCALE).to(tl.float32, bitcast=True)
            if PTX == "":
                value = tl.reshape(value, [N, K // GROUP, GROUP]) * element_scale[:, :, None]
                value = tl.reshape(value, [N, K])
        if BY_BLOCK:
            part = tl.zeros([N, M], tl.float32)
        else:
            part = total
        for j in tl.static_range(B_TERMS):
            if PTX != "":
                pair = pairs if B_TERMS == 1 else pairs[j]
                if AFFINE:
                    one = decode_4bit.twice(tl.full([1, 1], 1.0, tl.float32), OPERAND)
                    pair = decode_4bit.multiply_add(
                        pair, one, decode_4bit.twice(-zero_point, OPERAND)[:, None], OPERAND
                    )
                if SCALED == "element":
                    factor = decode_4bit.twice(element_scale, OPERAND)[:, :, None]
                    nothing = decode_4bit.twice(tl.full([1, 1, 1], -0.0, tl.float32), OPERAND)
                    pair = tl.reshape(pair, [N, K // GROUP, GROUP // 2])
                    pair = tl.reshape(decode_4bit.multiply_add(pair, factor, nothing, OPERAND), [N, K // 2])
                left = decode_4bit.unpaired(pair, OPERAND)
            else:
                left = term(value, j, B_TERMS, OPERAND)
            for i in tl.static_range(A_TERMS):
                right = term(a.to(tl.float32), i, A_TERMS, OPERAND)
                # Inf is multiplied with first terms only: other terms may be 0, which would give NaN.
                if j > 0:
                    right = finite(right)
                part = tl.dot(finite(left) if i > 0 else left, tl.trans(right), part, input_precision="ieee")
        if BY_BLOCK:
            if SCALED == "block":
                part = part * scale_of(b_scale_ptr, b_global_ptr, col, scale_row + at, col_ok, B_SCALE)[:, None]
            if A_BLOCKS is not None:
                a_at = a_scale_row + begins // a_block_c
                a_scale = scales.widen(tl.load(a_blocks_ptr + a_at, row_ok, 0), tl.full([], 1.0, tl.float32), A_BLOCKS)
                part = part * a_scale.to(tl.float32, bitcast=True)[None, :]
            total = total + part
        else:
            total = part
    finish(
        total, row, col, end, rows, cols, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr,
        sums_ptr, a_block, b_block, A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE, SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def weight_only(
    a_ptr, a_stride_r, a_stride_c, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr, sums_ptr,
    a_blocks_ptr, rows, cols, depth, a_block, a_block_r, a_block_c, a_blocks, b_block, b_block_c, blocks, block, steps,
    count, share,
    B: tl.constexpr, B_SCALE: tl.constexpr, A_SCALE: tl.constexpr, A_BLOCKS: tl.constexpr, AFFINE: tl.constexpr,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr, REGISTERS: tl.constexpr, OPERAND: tl.constexpr,
    A_FP8: tl.constexpr, A_TERMS: tl.constexpr, B_TERMS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of ``a [rows, depth] @ b [cols, depth].T``, computed as its transpose, with the weights on the left.

    ``SCALED``: where block scales are multiplied: "row", "block" (block sums) or "element". ``A_BLOCKS``: how the block
    scales of ``a`` are stored, which are also multiplied into block sums. A step has K elements. With block sums it is
    within a block of ``block`` elements and ``steps`` steps, else within the row. A program takes ``share`` of
    ``count`` steps. With ``SPLIT`` several programs share a tile; partial sums go to ``sums [shares, rows, cols]``.
    """
    row, col = place(rows, cols, M, N)
    multiply(
        row, col, rows, a_ptr, a_stride_r, a_stride_c, b_ptr, b_stride_r, b_stride_c, b_bytes,
        a_scale_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, table_ptr, bias_ptr, out_ptr, sums_ptr,
        a_blocks_ptr, rows, cols, depth, a_block, a_block_r, a_block_c, a_blocks, b_block, b_block_c, blocks, block,
        steps, count, share,
        B, B_SCALE, A_SCALE, A_BLOCKS, AFFINE, PAIRS, SCALED, GROUP, GLOBAL, BIAS, DTYPE, FP8, PTX, REGISTERS, OPERAND,
        A_FP8, A_TERMS, B_TERMS, SPLIT, M, N, K,
    )  # fmt: skip


@triton.jit
def add(
    row, col, end, sums_ptr, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, rows, cols,
    a_block, b_block, shares,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The tile at rows ``row`` (valid before ``end``) and columns ``col``: see ``add_shares``."""
    ok = (row < end)[None, :] & (col < cols)[:, None]
    total = tl.zeros([N, M], tl.float32)
    for share in range(shares):
        at = (share * rows + row).to(tl.int64)[None, :] * cols + col[:, None]
        total = total + tl.load(sums_ptr + at, ok, 0).to(tl.float32)
    epilogue(
        total, row, col, end, cols, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, a_block,
        b_block, A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE,
    )  # fmt: skip


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def add_shares(
    sums_ptr, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, rows, cols, a_block, b_block,
    shares,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, SCALED: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of ``weight_only`` in order, and apply the epilogue."""
    tiles_n = tl.cdiv(cols, N)
    row = (tl.program_id(0) // tiles_n) * M + tl.arange(0, M)
    col = (tl.program_id(0) % tiles_n) * N + tl.arange(0, N)
    add(
        row, col, rows, sums_ptr, a_scale_ptr, a_global_ptr, b_scale_ptr, b_global_ptr, bias_ptr, out_ptr, rows,
        cols, a_block, b_block, shares, A_SCALE, B_SCALE, SCALED, GLOBAL, BIAS, DTYPE, M, N,
    )  # fmt: skip
