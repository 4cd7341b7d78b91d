"""Kernel: the matmul of two matrices of integer codes, exact in each segment along K, then scaled.

Zero points are applied at the end of a segment: the sum of ``(p - z) (q - w)`` over k needs only the sums of p and q.

Source: docs/numerics.md section 9.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, patches
from lowbit.kernels.spec import GENERAL_OF_PRODUCTS
from lowbit.kernels.weight_only import load_codes, place, scale_of


@triton.jit
def as_int8(code, FMT: tl.constexpr):
    """Codes as signed numbers; 128 is subtracted from unsigned 8-bit codes."""
    if FMT[5]:
        return ((code << (32 - FMT[1])) >> (32 - FMT[1])).to(tl.int8)
    elif FMT[1] == 8:
        return (code - 128).to(tl.int8)
    else:
        return code.to(tl.int8)


@triton.jit
def stored_int8(raw, FMT: tl.constexpr):
    """``as_int8`` of stored 8-bit codes."""
    if FMT[5]:
        return raw.to(tl.int8, bitcast=True)
    else:
        return as_int8(raw.to(tl.int32), FMT)


@triton.jit
def zero_of(ptr, at, ok, FMT: tl.constexpr, AFFINE: tl.constexpr):
    """int32 zero points of rows, for the numbers of ``as_int8``."""
    zero = tl.zeros_like(at).to(tl.int32)
    if AFFINE:
        zero = tl.load(ptr + at, ok, 0).to(tl.int32)
    if FMT[5] == 0 and FMT[1] == 8:
        zero -= 128
    return zero


@triton.jit
def without_zeros(exact, a_sum, a_zero, b_sum, b_zero, terms, A_ZERO: tl.constexpr, B_ZERO: tl.constexpr):
    """Sums [M, N] with zero points applied, from the sums of products and the sums of each operand."""
    if B_ZERO:
        exact -= a_sum[:, None] * b_zero[None, :]
    if A_ZERO:
        exact -= a_zero[:, None] * b_sum[None, :]
    if A_ZERO and B_ZERO:
        exact += (terms * a_zero)[:, None] * b_zero[None, :]
    return exact


@triton.jit
def scaled(
    exact, a_sum, b_sum, terms, row, a_at, row_ok, col, b_at, col_ok,
    a_scale_ptr, a_zero_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr,
    A: tl.constexpr, A_SCALE: tl.constexpr, A_AFFINE: tl.constexpr,
    B: tl.constexpr, B_SCALE: tl.constexpr, B_AFFINE: tl.constexpr,
):  # fmt: skip
    """fp32 [M, N]: exact sums of ``terms`` products with zero points applied, times the scales of blocks ``a_at`` and
    ``b_at``.
    """
    A_ZERO: tl.constexpr = A_AFFINE or (A[5] == 0 and A[1] == 8)
    B_ZERO: tl.constexpr = B_AFFINE or (B[5] == 0 and B[1] == 8)
    a_zero = zero_of(a_zero_ptr, a_at, row_ok, A, A_AFFINE)
    b_zero = zero_of(b_zero_ptr, b_at, col_ok, B, B_AFFINE)
    a_scale = scale_of(a_scale_ptr, a_global_ptr, row, a_at, row_ok, A_SCALE)
    b_scale = scale_of(b_scale_ptr, b_global_ptr, col, b_at, col_ok, B_SCALE)
    whole = without_zeros(exact, a_sum, a_zero, b_sum, b_zero, terms, A_ZERO, B_ZERO)
    return whole.to(tl.float32) * (a_scale[:, None] * b_scale[None, :])


@triton.jit
def store(total, row, col, row_ok, col_ok, cols, bias_ptr, out_ptr, BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Add the bias to scaled sums [M, N], cast, and store."""
    if BIAS >= 0:
        sign, magnitude = bits.split(tl.load(bias_ptr + col, col_ok, 0), BIAS)
        total = total + (magnitude | (sign << 31)).to(tl.float32, bitcast=True)[None, :]
    to = (row.to(tl.int64) * cols)[:, None] + col[None, :]
    out = bits.narrow(total.to(tl.int32, bitcast=True), DTYPE, False)
    tl.store(out_ptr + to, out, row_ok[:, None] & col_ok[None, :])


@triton.jit
def of_patches(
    ptr, first, k, row_ok, k_ok, scale, zero, image, FMT: tl.constexpr, ZERO: tl.constexpr, WINDOW: tl.constexpr,
    MADE: tl.constexpr, MADE_SCALE: tl.constexpr, MADE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Numbers [M, K] of patches; padding is the zero point. See ``patches``."""
    raw, ok = patches.load(ptr, first, k, row_ok, k_ok, image, WINDOW)
    if MADE is not None:
        code = patches.encode(raw, scale[:, None], MADE, MADE_SCALE, MADE_DTYPE)
        return tl.where(k_ok[None, :], as_int8(code, FMT), 0)
    elif not ZERO:
        return stored_int8(raw, FMT)
    else:
        return tl.where(ok, stored_int8(raw, FMT), tl.where(k_ok[None, :], zero.to(tl.int8)[:, None], 0))


@triton.jit
def multiply(
    row, col, end,
    a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_zero_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, bias_ptr, out_ptr,
    cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, block, segments, length, steps,
    count,
    A: tl.constexpr, A_SCALE: tl.constexpr, A_AFFINE: tl.constexpr, A_PAIRS: tl.constexpr,
    B: tl.constexpr, B_SCALE: tl.constexpr, B_AFFINE: tl.constexpr, B_PAIRS: tl.constexpr,
    WHOLE: tl.constexpr, ONE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    image=None, WINDOW: tl.constexpr = None, MADE: tl.constexpr = None, MADE_SCALE: tl.constexpr = None,
    MADE_DTYPE: tl.constexpr = 0,
):  # fmt: skip
    """The tile at rows ``row`` (valid before ``end``) and columns ``col``: see ``integers``.

    With a ``WINDOW`` the rows are patches: see ``patches``.
    """
    row_ok, col_ok = row < end, col < cols
    a_row, b_row = (row // a_block_r).to(tl.int64) * a_blocks, (col // b_block_r).to(tl.int64) * b_blocks
    A_ZERO: tl.constexpr = A_AFFINE or (A[5] == 0 and A[1] == 8)
    B_ZERO: tl.constexpr = B_AFFINE or (B[5] == 0 and B[1] == 8)
    if WINDOW is not None:
        first_pixel = patches.corner(row, image, WINDOW)
        patch_zero = zero_of(a_zero_ptr, a_row, row_ok, A, A_AFFINE)
        patch_scale = scale_of(a_scale_ptr, a_global_ptr, row, a_row, row_ok, A_SCALE)
    total = tl.zeros([M, N], tl.float32)
    exact = tl.zeros([M, N], tl.int32)
    a_sum, b_sum = tl.zeros([M], tl.int32), tl.zeros([N], tl.int32)
    for step in range(count):
        if WHOLE:
            first = 0
            last = depth
            start = step * K
        elif ONE:
            first = (step // segments) * block + (step % segments) * length
            last = tl.minimum(tl.minimum(first + length, (step // segments) * block + block), depth)
            start = first
        else:
            segment = step // steps
            first = (segment // segments) * block + (segment % segments) * length
            last = tl.minimum(tl.minimum(first + length, (segment // segments) * block + block), depth)
            start = first + (step % steps) * K
        start, last = tl.multiple_of(start, ALIGNED), tl.multiple_of(last, ALIGNED)
        k = start + tl.arange(0, K)
        k_ok = k < last
        if WINDOW is None:
            code = load_codes(a_ptr, a_stride_r, a_stride_c, a_bytes, row, k, row_ok, k_ok, start, A[1], A_PAIRS)
            a = tl.where(k_ok[None, :], as_int8(code, A), 0)
        else:
            a = of_patches(
                a_ptr, first_pixel, k, row_ok, k_ok, patch_scale, patch_zero, image, A, A_ZERO, WINDOW, MADE,
                MADE_SCALE, MADE_DTYPE,
            )  # fmt: skip
        code = load_codes(b_ptr, b_stride_r, b_stride_c, b_bytes, col, k, col_ok, k_ok, start, B[1], B_PAIRS)
        b = as_int8(code, B)
        exact = tl.dot(a, tl.trans(b), exact, out_dtype=tl.int32)
        if B_ZERO:
            a_sum += tl.sum(a.to(tl.int32), axis=1)
        if A_ZERO:
            b_sum += tl.sum(tl.where(k_ok[None, :], b, 0).to(tl.int32), axis=1)
        if not WHOLE:
            # Segments of the last block may begin past K: their scales are loaded, but they add nothing. Blocks whose
            # length is not a multiple of a segment are shorter at the end of K: elements past K add nothing.
            there = tl.minimum(first, depth - 1)
            a_at, b_at = a_row + there // a_block_c, b_row + there // b_block_c
            # A branch, because for tcgen05 Triton 3.9 cannot compile a select between an accumulator and zeros.
            if True if ONE else step % steps == steps - 1:
                part = scaled(
                    exact, a_sum, b_sum, last - first, row, a_at, row_ok, col, b_at, col_ok, a_scale_ptr, a_zero_ptr,
                    a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, A, A_SCALE, A_AFFINE, B, B_SCALE, B_AFFINE,
                )  # fmt: skip
                total = tl.where(first < last, total + part, total)
                exact = tl.zeros([M, N], tl.int32)
                a_sum, b_sum = tl.zeros([M], tl.int32), tl.zeros([N], tl.int32)
    if WHOLE:
        total = scaled(
            exact, a_sum, b_sum, depth, row, a_row, row_ok, col, b_row, col_ok, a_scale_ptr, a_zero_ptr,
            a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, A, A_SCALE, A_AFFINE, B, B_SCALE, B_AFFINE,
        )  # fmt: skip
    store(total, row, col, row_ok, col_ok, cols, bias_ptr, out_ptr, BIAS, DTYPE)


@triton.jit(do_not_specialize=GENERAL_OF_PRODUCTS)
def integers(
    a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_zero_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, bias_ptr, out_ptr,
    rows, cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, block, segments, length, steps,
    count,
    A: tl.constexpr, A_SCALE: tl.constexpr, A_AFFINE: tl.constexpr, A_PAIRS: tl.constexpr,
    B: tl.constexpr, B_SCALE: tl.constexpr, B_AFFINE: tl.constexpr, B_PAIRS: tl.constexpr,
    WHOLE: tl.constexpr, ONE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile [M, N] of ``a [rows, depth] @ b [cols, depth].T``.

    A block along K has ``segments`` of ``length`` elements; the last one may be shorter. A segment has ``steps`` of K
    elements (one with ``ONE``), and there are ``count`` segments. ``WHOLE``: there is one segment. ``ALIGNED``: a power
    of two that divides the ends of each segment, so that 16 bytes can be loaded at once.
    """
    row, col = place(rows, cols, M, N)
    multiply(
        row, col, rows, a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes,
        a_scale_ptr, a_zero_ptr, a_global_ptr, b_scale_ptr, b_zero_ptr, b_global_ptr, bias_ptr, out_ptr,
        cols, depth, a_block_r, a_block_c, a_blocks, b_block_r, b_block_c, b_blocks, block, segments, length, steps,
        count, A, A_SCALE, A_AFFINE, A_PAIRS, B, B_SCALE, B_AFFINE, B_PAIRS, WHOLE, ONE, ALIGNED, BIAS, DTYPE, M, N, K,
    )  # fmt: skip
