"""Kernel: the elementwise part of an optimizer's step, on moments that are numbers; codes are decoded before it and
encoded after it.

``RULE`` is a name of lowbit/ops/optim.py; ``f0`` to ``f6`` are its factors, in its order. A moment's dtype is a row of
``spec.DTYPES``, or -1 where the rule has none.

Source: docs/numerics.md section 11.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, rng, tiles
from lowbit.kernels.quantize import load_input
from lowbit.kernels.spec import GENERAL


@triton.jit
def number(sign, magnitude):
    """The fp32 number of a sign and a magnitude."""
    return (magnitude | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def update(p, g, m, r, f0, f1, f2, f3, f4, f5, f6, RULE: tl.constexpr):
    """The next parameter and moments."""
    if RULE == "adamw":
        m = m + (g - m) * f1
        r = tl.sqrt_rn((r * r) * f2 + (g * g) * f3)
        p = p * f0 - tl.div_rn(m, r * f4 + f5) * f6
    elif RULE == "lion":
        toward = m + (g - m) * f1
        sign = tl.where(toward > 0, 1.0, tl.where(toward < 0, -1.0, toward))
        m = m + (g - m) * f2
        p = p * f0 - sign * f3
    elif RULE == "sgd":
        p = p * f0 - (g + p * f1) * f2
    else:
        tl.static_assert(RULE == "momentum")
        g = g + p * f0
        m = m * f1 + g * f2
        p = p - (g * f3 + m * f4) * f5
    return p, m, r


@triton.jit
def load_numbers(ptr, at, here, DTYPE: tl.constexpr):
    """Numbers of a contiguous matrix; zeros of one that there is not."""
    if DTYPE == -1:
        return tl.zeros(at.shape, tl.float32)
    else:
        sign, magnitude = bits.split(tl.load(ptr + at, here, 0), DTYPE)
        return number(sign, magnitude)


@triton.jit
def rounded(value, random, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The raw pattern of fp32 numbers; STOCHASTIC to bf16."""
    pattern = value.to(tl.int32, bitcast=True)
    if STOCHASTIC and DTYPE == 1:
        magnitude = pattern & 0x7FFFFFFF
        high = tl.minimum(magnitude + random, 0x7F800000) >> 16
        return tl.where(magnitude > 0x7F800000, 0x7FC0, high | (((pattern >> 31) & 1) << 15)).to(tl.int16)
    else:
        return bits.narrow(pattern, DTYPE, False)


@triton.jit
def store_numbers(ptr, at, here, value, random, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    if DTYPE != -1:
        tl.store(ptr + at, rounded(value, random, DTYPE, STOCHASTIC), here)


@triton.jit
def join24(sign, magnitude, low):
    """The number of a bf16 pattern and the 8 bits below it."""
    return number(sign, tl.maximum(magnitude + (low.to(tl.int32) << 8), 0))


@triton.jit
def split24(value):
    """The two parts of a number that is rounded to 24 bits."""
    pattern = bits.narrow(value.to(tl.int32, bitcast=True), 0, False)
    magnitude = pattern & 0x7FFFFFFF
    short = (magnitude + 0x7F + ((magnitude >> 8) & 1)) >> 8
    high = (short + 128) >> 8
    return (high | (((pattern >> 31) & 1) << 15)).to(tl.int16), (short - (high << 8)).to(tl.int8)


@triton.jit(do_not_specialize=GENERAL)
def step(
    param_ptr, stride_r, stride_c, grad_ptr, grad_stride_r, grad_stride_c, master_ptr, first_ptr, second_ptr,
    out_ptr, new_master_ptr, new_first_ptr, new_second_ptr,
    rows, cols, tiles_c, f0, f1, f2, f3, f4, f5, f6,
    rng_ptr, stream_id: tl.int64, param_stream_id: tl.int64, offset: tl.int64, pitch: tl.int64,
    RULE: tl.constexpr, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, MASTER: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, STOCHASTIC: tl.constexpr, PARAM_STOCHASTIC: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile of one step; new tensors may be the old ones, and all but param and grad are contiguous.

    MASTER: 0 none, 1 fp32, 2 the 8 bits below a bf16 parameter.
    """
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, 1, R, True)
    col, col_ok = tiles.positions(pid_c, 1, 1, cols, 1, C, True)
    here = row_ok[:, None] & col_ok[None, :]
    at = (row.to(tl.int64) * cols)[:, None] + col[None, :]
    sign, magnitude = load_input(grad_ptr, grad_stride_r, grad_stride_c, row, col, row_ok, col_ok, GRAD_DTYPE)
    grad = number(sign, magnitude)
    sign, magnitude = load_input(param_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    param = number(sign, magnitude)
    if MASTER == 1:
        master = load_numbers(master_ptr, at, here, 0)
        its_sign, its_magnitude = bits.split(bits.narrow(master.to(tl.int32, bitcast=True), DTYPE, False), DTYPE)
        param = tl.where((its_sign == sign) & (its_magnitude == magnitude), master, param)
    elif MASTER == 2:
        param = join24(sign, magnitude, tl.load(master_ptr + at, here, 0))
    first = load_numbers(first_ptr, at, here, FIRST)
    second = load_numbers(second_ptr, at, here, SECOND)
    param, first, second = update(param, grad, first, second, f0, f1, f2, f3, f4, f5, f6, RULE)
    random = 0
    if STOCHASTIC and (FIRST == 1 or SECOND == 1):
        random = rng.each(row, col, rng_ptr, stream_id, offset, pitch)
    store_numbers(new_first_ptr, at, here, first, random, FIRST, STOCHASTIC)
    store_numbers(new_second_ptr, at, here, second, random, SECOND, STOCHASTIC)
    if MASTER == 2:
        high, low = split24(param)
        tl.store(out_ptr + at, high, here)
        tl.store(new_master_ptr + at, low, here)
    else:
        if MASTER == 1:
            store_numbers(new_master_ptr, at, here, param, 0, 0, False)
        random = 0
        if PARAM_STOCHASTIC:
            random = rng.each(row, col, rng_ptr, param_stream_id, offset, pitch)
        store_numbers(out_ptr, at, here, param, random, DTYPE, PARAM_STOCHASTIC)
