"""Kernel: the product of two matrices of codes whose scales span whole rows, so that they wait for the epilogue.

Integer codes multiply as int8 into int32, exactly. Float codes are decoded to bf16, which holds every value of at most
8 bits whose exponents it has, and multiply into fp32: the fp8 instructions of sm_89 and sm_90 accumulate in fewer bits.

Source: docs/numerics.md section 9.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, scales, tiles
from lowbit.kernels.spec import GENERAL


@triton.jit
def operand(ptr, stride_r, stride_c, bytes_a_row, row, k, row_ok, k_ok, FMT: tl.constexpr, OPERAND: tl.constexpr):
    """A tile of codes as numbers of the type that is multiplied; what does not exist is 0."""
    code = tiles.load_codes(ptr, stride_r, stride_c, row, k, row_ok, k_ok, 0, bytes_a_row, FMT[1], False)
    if OPERAND == "int8":
        return ((code << (32 - FMT[1])) >> (32 - FMT[1])).to(tl.int8)
    else:
        pattern = bits.decode(code, 0, FMT)
        if OPERAND == "fp32":
            return pattern.to(tl.float32, bitcast=True)
        else:
            # These values are exact in bf16: its pattern is the upper half of fp32's.
            return (pattern >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def row_scale(ptr, global_scale_ptr, row, row_ok, block, SCALE: tl.constexpr):
    """fp32 scales of rows, ``block`` rows to a scale."""
    global_scale = scales.load_global_scale(global_scale_ptr, row, row_ok, 1, SCALE)
    return scales.widen(tl.load(ptr + row // block, row_ok, 0), global_scale, SCALE).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=GENERAL)
def scaled_mm(
    a_ptr, a_stride_r, a_stride_c, a_bytes, b_ptr, b_stride_r, b_stride_c, b_bytes,
    a_scale_ptr, a_global_scale_ptr, b_scale_ptr, b_global_scale_ptr, bias_ptr, out_ptr,
    rows, cols, depth, a_block, b_block,
    A: tl.constexpr, A_SCALE: tl.constexpr, B: tl.constexpr, B_SCALE: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, OPERAND: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile [M, N] of ``a [rows, depth] @ b [cols, depth].T``; then scales, bias and cast, in that order."""
    # Eight tiles down before one across, so that programs running together share their b tiles in L2.
    tiles_m, tiles_n = tl.cdiv(rows, M), tl.cdiv(cols, N)
    band = tl.program_id(0) // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    within = tl.program_id(0) % (8 * tiles_n)
    row = (band * 8 + within % height) * M + tl.arange(0, M)
    col = (within // height) * N + tl.arange(0, N)
    row_ok, col_ok = row < rows, col < cols
    if OPERAND == "int8":
        total = tl.zeros([M, N], tl.int32)
    else:
        total = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        k = start + tl.arange(0, K)
        a = operand(a_ptr, a_stride_r, a_stride_c, a_bytes, row, k, row_ok, k < depth, A, OPERAND)
        b = operand(b_ptr, b_stride_r, b_stride_c, b_bytes, col, k, col_ok, k < depth, B, OPERAND)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee", out_dtype=total.dtype)
    a_scale = row_scale(a_scale_ptr, a_global_scale_ptr, row, row_ok, a_block, A_SCALE)
    b_scale = row_scale(b_scale_ptr, b_global_scale_ptr, col, col_ok, b_block, B_SCALE)
    out = total.to(tl.float32) * (a_scale[:, None] * b_scale[None, :])
    if BIAS >= 0:
        sign, magnitude = bits.split(tl.load(bias_ptr + col, col_ok, 0), BIAS)
        out = out + (magnitude | (sign << 31)).to(tl.float32, bitcast=True)[None, :]
    to = (row.to(tl.int64) * cols)[:, None] + col[None, :]
    out = bits.narrow(out.to(tl.int32, bitcast=True), DTYPE, False)
    tl.store(out_ptr + to, out, row_ok[:, None] & col_ok[None, :])
