"""Kernel: an optimizer step in one pass, which decodes moments, updates, computes new scales and encodes.

A program's columns are whole blocks of both moments and whole bytes of their codes (``spec.StepTiles``). No two
programs access the same memory, so the step may be in place.

``RULE`` is a name of lowbit/ops/optim.py; ``f0`` to ``f6`` are its factors, in its order. ``FIRST`` and ``SECOND`` say
how a moment is stored: a value of ``spec.DTYPES``, ``CODES``, or ``NONE`` if the rule has no such moment.

Source: docs/numerics.md section 11.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, rng, scales, tiles
from lowbit.kernels.quantize import encode_below, load_input
from lowbit.kernels.spec import GENERAL

#: Values of ``FIRST`` and ``SECOND`` that are not dtypes.
NONE, CODES = tl.constexpr(-1), tl.constexpr(3)


@triton.jit
def number(sign, magnitude):
    """The fp32 number with a sign and a magnitude."""
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
    """Numbers of a contiguous matrix."""
    sign, magnitude = bits.split(tl.load(ptr + at, here, 0), DTYPE)
    return number(sign, magnitude)


@triton.jit
def rounded(value, random, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The output pattern of fp32 numbers; STOCHASTIC is for bf16."""
    pattern = value.to(tl.int32, bitcast=True)
    if STOCHASTIC and DTYPE == 1:
        magnitude = pattern & 0x7FFFFFFF
        high = tl.minimum(magnitude + random, 0x7F800000) >> 16
        return tl.where(magnitude > 0x7F800000, 0x7FC0, high | (((pattern >> 31) & 1) << 15)).to(tl.int16)
    else:
        return bits.narrow(pattern, DTYPE, False)


@triton.jit
def store_numbers(ptr, at, here, value, random, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    tl.store(ptr + at, rounded(value, random, DTYPE, STOCHASTIC), here)


@triton.jit
def scale_places(row, row_ok, begin, blocks, CUT: tl.constexpr, SPAN: tl.constexpr):
    """Linear indices [R, blocks per row] of a tile's scales, and their mask."""
    k = tl.arange(0, CUT[1])
    at = (row.to(tl.int64) * blocks)[:, None] + (begin // CUT[0] + k)[None, :]
    return at, row_ok[:, None] & ((k * CUT[0] < SPAN) & (begin // CUT[0] + k < blocks))[None, :]


@triton.jit
def end_of_codes(begin, row_bytes, BITS: tl.constexpr, SPAN: tl.constexpr):
    """The end, in bytes of a row, of a tile's codes; not used for 8-bit codes."""
    return tl.minimum((begin // 8 + SPAN // 8) * BITS, row_bytes)


@triton.jit
def load_moment(
    ptr, scale_ptr, row_bytes, blocks, row, col, row_ok, col_ok, begin, at,
    KIND: tl.constexpr, FMT: tl.constexpr, SCALE: tl.constexpr, CUT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A moment as fp32; zeros for a missing moment."""
    if KIND == NONE:
        return tl.zeros(at.shape, tl.float32)
    elif KIND == CODES:
        end = end_of_codes(begin, row_bytes, FMT[1], SPAN)
        code = tiles.load_codes(ptr, row_bytes, 1, row, col, row_ok, col_ok, begin, end, FMT[1], FMT[1] == 4)
        where, ok = scale_places(row, row_ok, begin, blocks, CUT, SPAN)
        scale = tiles.cut_spread(scales.widen(tl.load(scale_ptr + where, ok, 0), 0, SCALE), col.shape[0], CUT)
        return scales.multiply(bits.decode(code, 0, FMT), scale, 0).to(tl.float32, bitcast=True)
    else:
        return load_numbers(ptr, at, row_ok[:, None] & col_ok[None, :], KIND)


@triton.jit
def store_moment(
    ptr, scale_ptr, row_bytes, blocks, row, col, row_ok, col_ok, begin, at, value, random,
    KIND: tl.constexpr, FMT: tl.constexpr, SCALE: tl.constexpr, CUT: tl.constexpr, SPAN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store a moment; for codes, with new block scales."""
    if KIND == CODES:
        sign, magnitude = bits.split(value.to(tl.int32, bitcast=True), 0)
        amax = tiles.cut_max(tl.where(row_ok[:, None] & col_ok[None, :], magnitude, 0), CUT)
        raw, scale, _ = scales.make(amax, amax, 0, FMT, SCALE)
        where, ok = scale_places(row, row_ok, begin, blocks, CUT, SPAN)
        tl.store(scale_ptr + where, raw.to(scale_ptr.dtype.element_ty), ok)
        scale = tiles.cut_spread(scale, col.shape[0], CUT)
        code = encode_below(sign, magnitude, scale, 0, random, FMT, SCALE, True, STOCHASTIC)
        end = end_of_codes(begin, row_bytes, FMT[1], SPAN)
        tiles.store_codes(ptr, row_bytes, code, row, col, row_ok, col_ok, begin, end, FMT[1])
    elif KIND != NONE:
        store_numbers(ptr, at, row_ok[:, None] & col_ok[None, :], value, random, KIND, STOCHASTIC)


@triton.jit
def join24(sign, magnitude, low):
    """The number with a bf16 pattern and the 8 bits below it."""
    return number(sign, tl.maximum(magnitude + (low.to(tl.int32) << 8), 0))


@triton.jit
def split24(value):
    """Round a number to 24 bits, as a bf16 pattern and the 8 bits below it."""
    pattern = bits.narrow(value.to(tl.int32, bitcast=True), 0, False)
    magnitude = pattern & 0x7FFFFFFF
    short = (magnitude + 0x7F + ((magnitude >> 8) & 1)) >> 8
    high = (short + 128) >> 8
    return (high | (((pattern >> 31) & 1) << 15)).to(tl.int16), (short - (high << 8)).to(tl.int8)


@triton.jit(do_not_specialize=GENERAL)
def step(
    param_ptr, stride_r, stride_c, grad_ptr, grad_stride_r, grad_stride_c, master_ptr,
    first_ptr, first_scale_ptr, first_bytes, first_blocks, second_ptr, second_scale_ptr, second_bytes, second_blocks,
    out_ptr, new_master_ptr, new_first_ptr, new_first_scale_ptr, new_second_ptr, new_second_scale_ptr,
    rows, cols, tiles_c, share, f0, f1, f2, f3, f4, f5, f6,
    rng_ptr, stream_id: tl.int64, param_stream_id: tl.int64, offset: tl.int64, pitch: tl.int64,
    RULE: tl.constexpr, DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, MASTER: tl.constexpr,
    FIRST: tl.constexpr, FIRST_FMT: tl.constexpr, FIRST_SCALE: tl.constexpr, FIRST_CUT: tl.constexpr,
    SECOND: tl.constexpr, SECOND_FMT: tl.constexpr, SECOND_SCALE: tl.constexpr, SECOND_CUT: tl.constexpr,
    ROUNDING: tl.constexpr, PARAM_ROUNDING: tl.constexpr, R: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """``share`` tiles of one step. All tensors except param and grad are contiguous.

    Values that do not depend on the tile, such as codebook tables, are computed once: the compiler hoists them.
    MASTER: 0 none, 1 fp32, 2 the 8 bits below a bf16 parameter. ROUNDING of moments and parameter: see ``rng.draw``.
    SPAN: columns of a tile; C: the next power of two.
    """
    start = tl.program_id(0) * share
    for tile in tl.range(start, tl.minimum(start + share, tl.cdiv(rows, R) * tiles_c)):
        pid_r, pid_c = tile // tiles_c, tile % tiles_c
        begin = pid_c * SPAN
        row, col = pid_r * R + tl.arange(0, R), begin + tl.arange(0, C)
        row_ok, col_ok = row < rows, (tl.arange(0, C) < SPAN) & (col < cols)
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
        first = load_moment(
            first_ptr, first_scale_ptr, first_bytes, first_blocks, row, col, row_ok, col_ok, begin, at,
            FIRST, FIRST_FMT, FIRST_SCALE, FIRST_CUT, SPAN,
        )  # fmt: skip
        second = load_moment(
            second_ptr, second_scale_ptr, second_bytes, second_blocks, row, col, row_ok, col_ok, begin, at,
            SECOND, SECOND_FMT, SECOND_SCALE, SECOND_CUT, SPAN,
        )  # fmt: skip
        # Several threads may load an element that one of them stores, so all load before any stores.
        tl.debug_barrier()
        param, first, second = update(param, grad, first, second, f0, f1, f2, f3, f4, f5, f6, RULE)
        random = rng.draw(row, col, begin, rng_ptr, stream_id, offset, pitch, ROUNDING)
        store_moment(
            new_first_ptr, new_first_scale_ptr, first_bytes, first_blocks, row, col, row_ok, col_ok, begin, at,
            first, random, FIRST, FIRST_FMT, FIRST_SCALE, FIRST_CUT, SPAN, ROUNDING != 0,
        )  # fmt: skip
        store_moment(
            new_second_ptr, new_second_scale_ptr, second_bytes, second_blocks, row, col, row_ok, col_ok, begin, at,
            second, random, SECOND, SECOND_FMT, SECOND_SCALE, SECOND_CUT, SPAN, ROUNDING != 0,
        )  # fmt: skip
        if MASTER == 2:
            high, low = split24(param)
            tl.store(out_ptr + at, high, here)
            tl.store(new_master_ptr + at, low, here)
        else:
            if MASTER == 1:
                store_numbers(new_master_ptr, at, here, param, 0, 0, False)
            random = rng.draw(row, col, begin, rng_ptr, param_stream_id, offset, pitch, PARAM_ROUNDING)
            store_numbers(out_ptr, at, here, param, random, DTYPE, PARAM_ROUNDING != 0)
