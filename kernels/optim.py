"""Kernel: the elementwise part of AdamW, on moments that are decoded before and encoded after.

Source: docs/numerics.md section 11.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, tiles
from lowbit.kernels.quantize import load_input
from lowbit.kernels.spec import GENERAL


@triton.jit
def number(sign, magnitude):
    """The fp32 number of a sign and a magnitude."""
    return (magnitude | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=GENERAL)
def adamw(
    param_ptr, stride_r, stride_c, grad_ptr, grad_stride_r, grad_stride_c, avg_ptr, rms_ptr, out_ptr, out_pitch,
    rows, cols, tiles_c, decay, mix, keep, mix_square, correction, eps, rate,
    DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The next parameter; the moments, fp32 [rows, cols] without gaps, are replaced. out may be param."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, 1, R, True)
    col, col_ok = tiles.positions(pid_c, 1, 1, cols, 1, C, True)
    here = row_ok[:, None] & col_ok[None, :]
    sign, magnitude = load_input(param_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    param = number(sign, magnitude)
    sign, magnitude = load_input(grad_ptr, grad_stride_r, grad_stride_c, row, col, row_ok, col_ok, GRAD_DTYPE)
    grad = number(sign, magnitude)
    at = (row.to(tl.int64) * cols)[:, None] + col[None, :]
    avg = tl.load(avg_ptr + at, here, 0.0)
    rms = tl.load(rms_ptr + at, here, 0.0)
    avg = avg + (grad - avg) * mix
    rms = tl.sqrt_rn((rms * rms) * keep + (grad * grad) * mix_square)
    param = param * decay - tl.div_rn(avg, rms * correction + eps) * rate
    tl.store(avg_ptr + at, avg, here)
    tl.store(rms_ptr + at, rms, here)
    to = (row.to(tl.int64) * out_pitch)[:, None] + col[None, :]
    tl.store(out_ptr + to, bits.narrow(param.to(tl.int32, bitcast=True), DTYPE, False), here)
