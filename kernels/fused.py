"""Kernels: rms_norm, swiglu and rotary with their gradients. Source: docs/numerics.md section 15.

Each operation on fp32 numbers rounds once, in the order of the specification, so all targets are bit-identical.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits
from lowbit.kernels.spec import GENERAL
from lowbit.reference import fused as rules

_LOG2_E = tl.constexpr(rules.LOG2_E)
_HIGH_LN2 = tl.constexpr(rules.HIGH_LN2)
_LOW_LN2 = tl.constexpr(rules.LOW_LN2)
_C0, _C1, _C2, _C3, _C4 = (tl.constexpr(c) for c in rules.POLYNOMIAL)
_ROUNDER = tl.constexpr(rules.ROUNDER)
#: The pattern of ``_ROUNDER``.
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_EXP_LIMIT = tl.constexpr(rules.EXP_LIMIT)
_GATE_LIMIT = tl.constexpr(rules.GATE_LIMIT)
_GELU_A, _GELU_B, _GELU_C = (tl.constexpr(c) for c in rules.GELU)


# -- numbers and sums --------------------------------------------------------------------------------------------------
@triton.jit
def load_numbers(ptr, at, ok, DTYPE: tl.constexpr):
    """fp32 numbers from patterns; +0 where not ``ok``."""
    sign, magnitude = bits.split(tl.load(ptr + at, ok, 0), DTYPE)
    return (magnitude | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def store_numbers(ptr, at, value, ok, DTYPE: tl.constexpr):
    """fp32 numbers rounded to DTYPE, as patterns; one NaN."""
    tl.store(ptr + at, bits.narrow(value.to(tl.int32, bitcast=True), DTYPE, False), ok)


@triton.jit
def sum_halves(terms):
    """Sums [R] of fp32 terms [R, C]: the second half is added to the first until one column is left."""
    R: tl.constexpr = terms.shape[0]
    C: tl.constexpr = terms.shape[1]
    if C == 1:
        return tl.reshape(terms, [R])
    else:
        first, second = tl.split(tl.permute(tl.reshape(terms, [R, 2, C // 2]), [0, 2, 1]))
        return sum_halves(first + second)


@triton.jit
def sum_terms(terms, ok):
    """``sum_halves`` of the terms that are ``ok``. Others become -0, which changes no sum: they have no partner."""
    pattern = tl.where(ok, terms.to(tl.int32, bitcast=True), -0x80000000)
    return sum_halves(pattern.to(tl.float32, bitcast=True))


@triton.jit
def load_factors(ptr, at, ok, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    weight = load_numbers(ptr, at, ok, DTYPE)
    if OFFSET:
        weight = weight + 1.0
    return weight


# -- rms_norm ----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=GENERAL)
def rms_norm(
    x_ptr, stride_r, stride_c, weight_ptr, out_ptr, rstd_ptr, rows, cols, f0, f1,
    DTYPE: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """R whole rows. ``f0``: eps; ``f1``: the number of columns; WEIGHT: the dtype of the weight."""
    row, col = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64), tl.arange(0, C).to(tl.int64)
    row_ok, col_ok = row < rows, col < cols
    ok = row_ok[:, None] & col_ok[None, :]
    x = load_numbers(x_ptr, (row * stride_r)[:, None] + (col * stride_c)[None, :], ok, DTYPE)
    mean = tl.div_rn(sum_terms(x * x, ok), tl.full([R], f1, tl.float32))
    rstd = tl.div_rn(tl.full([R], 1.0, tl.float32), tl.sqrt_rn(mean + f0))
    factors = load_factors(weight_ptr, col, col_ok, WEIGHT, OFFSET)
    store_numbers(out_ptr, (row * cols)[:, None] + col[None, :], x * rstd[:, None] * factors[None, :], ok, DTYPE)
    store_numbers(rstd_ptr, row, rstd, row_ok, 0)


@triton.jit(do_not_specialize=GENERAL)
def rms_norm_backward(
    grad_ptr, grad_stride_r, grad_stride_c, x_ptr, stride_r, stride_c, weight_ptr, rstd_ptr, out_ptr, rows, cols, f1,
    DTYPE: tl.constexpr, GRAD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient of R whole rows of x. ``f1``: the number of columns; GRAD: the dtype of ``grad``."""
    row, col = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64), tl.arange(0, C).to(tl.int64)
    row_ok, col_ok = row < rows, col < cols
    ok = row_ok[:, None] & col_ok[None, :]
    rstd = load_numbers(rstd_ptr, row, row_ok, 0)[:, None]
    normed = load_numbers(x_ptr, (row * stride_r)[:, None] + (col * stride_c)[None, :], ok, DTYPE) * rstd
    grad = load_numbers(grad_ptr, (row * grad_stride_r)[:, None] + (col * grad_stride_c)[None, :], ok, GRAD)
    scaled = grad * load_factors(weight_ptr, col, col_ok, WEIGHT, OFFSET)[None, :]
    share = tl.div_rn(sum_terms(scaled * normed, ok), tl.full([R], f1, tl.float32))
    out = (scaled - normed * share[:, None]) * rstd
    store_numbers(out_ptr, (row * cols)[:, None] + col[None, :], out, ok, DTYPE)


@triton.jit(do_not_specialize=GENERAL)
def norm_weight_sums(
    grad_ptr, grad_stride_r, grad_stride_c, x_ptr, stride_r, stride_c, rstd_ptr, sums_ptr, rows, cols, tiles_c,
    DTYPE: tl.constexpr, GRAD: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums ``[blocks, cols]`` of grad times the normed x over each block of ROWS rows, in their order, from +0 on."""
    block = tl.program_id(0) // tiles_c
    col = (tl.program_id(0) % tiles_c * C + tl.arange(0, C)).to(tl.int64)
    ok = col < cols
    sums = tl.zeros([C], tl.float32)
    for i in range(ROWS):
        row = block.to(tl.int64) * ROWS + i + 0 * col
        here = ok & (row < rows)
        rstd = load_numbers(rstd_ptr, row, here, 0)
        normed = load_numbers(x_ptr, row * stride_r + col * stride_c, here, DTYPE) * rstd
        sums += load_numbers(grad_ptr, row * grad_stride_r + col * grad_stride_c, here, GRAD) * normed
    store_numbers(sums_ptr, block.to(tl.int64) * cols + col, sums, ok, 0)


@triton.jit(do_not_specialize=GENERAL)
def finish_norm_weight(
    sums_ptr, out_ptr, cols, count, DTYPE: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient of the weight from the sums ``[count, cols]``; B: a power of two that is ``count`` at least."""
    block, col = tl.arange(0, B).to(tl.int64), (tl.program_id(0) * C + tl.arange(0, C)).to(tl.int64)
    ok = (col < cols)[:, None] & (block < count)[None, :]
    terms = load_numbers(sums_ptr, col[:, None] + (block * cols)[None, :], ok, 0)
    store_numbers(out_ptr, col, sum_terms(terms, ok), col < cols, DTYPE)


# -- swiglu ------------------------------------------------------------------------------------------------------------
@triton.jit
def exp(y):
    """e^y for fp32 ``|y| <= _EXP_LIMIT``, or NaN."""
    sum = y * _LOG2_E + _ROUNDER
    power = sum - _ROUNDER
    f = (y - power * _HIGH_LN2) - power * _LOW_LN2
    tail = (((f * _C4 + _C3) * f + _C2) * f + _C1) * f + _C0
    near = (f + (f * f) * tail) + 1.0
    whole = sum.to(tl.int32, bitcast=True) - _ROUNDER_BITS
    first = whole >> 1
    near = near * ((first + 127) << 23).to(tl.float32, bitcast=True)
    return near * ((whole - first + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    return tl.where(x < -LIMIT, -LIMIT, tl.where(x > LIMIT, LIMIT, x))


@triton.jit
def gate_sigmoid(gate, GELU: tl.constexpr):
    z = gate
    if GELU:
        z = gate * ((gate * gate) * _GELU_B + _GELU_A)
    bottom = exp(clamp(-z, _EXP_LIMIT)) + 1.0
    return tl.div_rn(tl.full(bottom.shape, 1.0, tl.float32), bottom)


@triton.jit(do_not_specialize=GENERAL)
def swiglu(
    gate_ptr, gate_stride_r, gate_stride_c, up_ptr, up_stride_r, up_stride_c, out_ptr, rows, cols, tiles_c,
    GELU: tl.constexpr, DTYPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile of the activated gate times up; ``out`` is contiguous."""
    row = ((tl.program_id(0) // tiles_c) * R + tl.arange(0, R)).to(tl.int64)
    col = ((tl.program_id(0) % tiles_c) * C + tl.arange(0, C)).to(tl.int64)
    ok = (row < rows)[:, None] & (col < cols)[None, :]
    gate = load_numbers(gate_ptr, (row * gate_stride_r)[:, None] + (col * gate_stride_c)[None, :], ok, DTYPE)
    up = load_numbers(up_ptr, (row * up_stride_r)[:, None] + (col * up_stride_c)[None, :], ok, DTYPE)
    out = gate * gate_sigmoid(gate, GELU) * up
    store_numbers(out_ptr, (row * cols)[:, None] + col[None, :], out, ok, DTYPE)


@triton.jit(do_not_specialize=GENERAL)
def swiglu_backward(
    grad_ptr, grad_stride_r, grad_stride_c, gate_ptr, gate_stride_r, gate_stride_c, up_ptr, up_stride_r, up_stride_c,
    grad_gate_ptr, grad_up_ptr, rows, cols, tiles_c,
    GELU: tl.constexpr, DTYPE: tl.constexpr, GRAD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile of both gradients, which are contiguous. GRAD: the dtype of ``grad``."""
    row = ((tl.program_id(0) // tiles_c) * R + tl.arange(0, R)).to(tl.int64)
    col = ((tl.program_id(0) % tiles_c) * C + tl.arange(0, C)).to(tl.int64)
    ok = (row < rows)[:, None] & (col < cols)[None, :]
    grad = load_numbers(grad_ptr, (row * grad_stride_r)[:, None] + (col * grad_stride_c)[None, :], ok, GRAD)
    gate = load_numbers(gate_ptr, (row * gate_stride_r)[:, None] + (col * gate_stride_c)[None, :], ok, DTYPE)
    up = load_numbers(up_ptr, (row * up_stride_r)[:, None] + (col * up_stride_c)[None, :], ok, DTYPE)
    near = clamp(gate, _GATE_LIMIT)
    s = gate_sigmoid(near, GELU)
    rest = 1.0 - s
    if GELU:
        rest = ((near * near) * _GELU_C + _GELU_A) * rest
    to = (row * cols)[:, None] + col[None, :]
    store_numbers(grad_gate_ptr, to, (grad * up) * ((near * rest + 1.0) * s), ok, DTYPE)
    store_numbers(grad_up_ptr, to, grad * (gate * s), ok, DTYPE)


# -- rotary ------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=GENERAL)
def rotary(
    x_ptr, stride_0, stride_1, stride_2, stride_c, cos_ptr, cos_stride_0, cos_stride_1, cos_stride_2, cos_stride_c,
    sin_ptr, sin_stride_0, sin_stride_1, sin_stride_2, sin_stride_c, out_ptr, rows, size_1, size_2, cols, pairs,
    step, apart, DTYPE: tl.constexpr, TABLE: tl.constexpr, R: tl.constexpr, P: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """R rows of three axes, whose pairs are ``step * i`` and that plus ``apart``; ``out`` is contiguous.

    TABLE: the dtype of cos and sin. P: a power of two that is ``pairs`` at least. REST: the same of the columns in no
    pair, or 0.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    first, second, third = row // size_2 // size_1, row // size_2 % size_1, row % size_2
    row_ok = (row < rows)[:, None]
    pair = tl.arange(0, P).to(tl.int64)[None, :]
    ok = row_ok & (pair < pairs)
    table = (first * cos_stride_0 + second * cos_stride_1 + third * cos_stride_2)[:, None] + pair * cos_stride_c
    cos = load_numbers(cos_ptr, table, ok, TABLE)
    table = (first * sin_stride_0 + second * sin_stride_1 + third * sin_stride_2)[:, None] + pair * sin_stride_c
    sin = load_numbers(sin_ptr, table, ok, TABLE)
    start, to = (first * stride_0 + second * stride_1 + third * stride_2)[:, None], (row * cols)[:, None]
    a = load_numbers(x_ptr, start + pair * step * stride_c, ok, DTYPE)
    b = load_numbers(x_ptr, start + (pair * step + apart) * stride_c, ok, DTYPE)
    store_numbers(out_ptr, to + pair * step, a * cos - b * sin, ok, DTYPE)
    store_numbers(out_ptr, to + pair * step + apart, b * cos + a * sin, ok, DTYPE)
    if REST:
        col = 2 * pairs + tl.arange(0, REST).to(tl.int64)[None, :]
        ok = row_ok & (col < cols)
        store_numbers(out_ptr, to + col, load_numbers(x_ptr, start + col * stride_c, ok, DTYPE), ok, DTYPE)
