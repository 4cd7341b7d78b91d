"""Kernels: bare encode and decode of a matrix, pack and unpack of sub-byte codes.

Source: docs/numerics.md sections 2 to 4, 7 and 8.
"""

import triton
import triton.language as tl

from lowbit.kernels import bits, quantize, rng, tiles
from lowbit.kernels.spec import GENERAL


@triton.jit(do_not_specialize=GENERAL)
def encode(
    x_ptr, stride_r, stride_c, out_ptr, out_pitch, rows, cols, tiles_c,
    rng_ptr, stream_id: tl.int64, offset: tl.int64, pitch: tl.int64,
    FMT: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr, ROUNDING: tl.constexpr, CONVERT: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Codes of x [rows, cols], one per byte, unscaled. ROUNDING: see ``rng.draw``. CONVERT: see ``bits.encode``."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, 1, R, True)
    col, col_ok = tiles.positions(pid_c, 1, 1, cols, 1, C, True)
    sign, magnitude = quantize.load_input(x_ptr, stride_r, stride_c, row, col, row_ok, col_ok, DTYPE)
    random = rng.draw(row, col, pid_c * C, rng_ptr, stream_id, offset, pitch, ROUNDING)
    code = bits.encode(sign, magnitude, random, 0, FMT, SATURATE, ROUNDING != 0, CONVERT)
    tiles.store_codes(out_ptr, out_pitch, code, row, col, row_ok, col_ok, pid_c * C, out_pitch, 8)


@triton.jit(do_not_specialize=GENERAL)
def decode(
    codes_ptr, stride_r, stride_c, out_ptr, out_pitch, rows, cols, tiles_c,
    FMT: tl.constexpr, DTYPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Values of codes [rows, cols], one per byte. Zeros and NaN keep their signs."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, 1, R, True)
    col, col_ok = tiles.positions(pid_c, 1, 1, cols, 1, C, True)
    code = tiles.load_codes(codes_ptr, stride_r, stride_c, row, col, row_ok, col_ok, pid_c * C, cols, 8, False)
    out = bits.narrow(bits.decode(code & ((1 << FMT[1]) - 1), 0, FMT), DTYPE, True)
    to = (row.to(tl.int64) * out_pitch)[:, None] + col[None, :]
    tl.store(out_ptr + to, out, row_ok[:, None] & col_ok[None, :])


@triton.jit(do_not_specialize=GENERAL)
def pack(
    codes_ptr, stride_r, stride_c, out_ptr, out_bytes, rows, cols, tiles_c,
    BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pack rows of codes into little-endian bit streams [rows, out_bytes]: each byte gathers the codes it overlaps."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, 1, R, True)
    byte, byte_ok = tiles.positions(pid_c, 1, 1, out_bytes, 1, C, True)
    base = codes_ptr + (row.to(tl.int64) * stride_r)[:, None]
    first = byte.to(tl.int64) * 8
    packed = tl.zeros([R, C], tl.int32)
    for k in tl.static_range((7 + BITS) // BITS + (8 % BITS != 0)):
        code_at = first // BITS + k
        ok = row_ok[:, None] & (byte_ok & (code_at < cols))[None, :]
        code = tl.load(base + (code_at * stride_c)[None, :], ok, 0).to(tl.int32) & ((1 << BITS) - 1)
        # Shifted left by up to 7 extra bits, so that a code that starts in the previous byte fits.
        lift = (code_at * BITS - first + 8).to(tl.int32)
        packed |= tl.where((lift < 16)[None, :], (code << tl.minimum(lift, 16)[None, :]) >> 8, 0)
    tl.store(
        out_ptr + (row.to(tl.int64) * out_bytes)[:, None] + byte[None, :],
        packed.to(tl.uint8),
        row_ok[:, None] & byte_ok[None, :],
    )


@triton.jit(do_not_specialize=GENERAL)
def unpack(
    packed_ptr, stride_r, stride_c, packed_bytes, out_ptr, rows, cols, tiles_c,
    BITS: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Unpack little-endian bit streams to one code per byte [rows, cols]."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, 1, R, True)
    col, col_ok = tiles.positions(pid_c, 1, 1, cols, 1, C, True)
    begin = pid_c * C
    code = tiles.load_codes(packed_ptr, stride_r, stride_c, row, col, row_ok, col_ok, begin, packed_bytes, BITS, PAIRS)
    tiles.store_codes(out_ptr, cols, code, row, col, row_ok, col_ok, begin, cols, 8)


@triton.jit(do_not_specialize=GENERAL)
def transpose(
    packed_ptr, stride_r, stride_c, packed_bytes, out_ptr, out_bytes, rows, cols, tiles_c,
    BITS: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Repack little-endian bit streams of codes [rows, cols] as streams of their columns [cols, out_bytes]."""
    pid_r, pid_c = tl.program_id(0) // tiles_c, tl.program_id(0) % tiles_c
    row, row_ok = tiles.positions(pid_r, 1, 1, rows, 1, R, True)
    col, col_ok = tiles.positions(pid_c, 1, 1, cols, 1, C, True)
    code = tiles.load_codes(
        packed_ptr, stride_r, stride_c, row, col, row_ok, col_ok, pid_c * C, packed_bytes, BITS, PAIRS
    )
    tiles.store_codes(out_ptr, out_bytes, tl.trans(code), col, row, col_ok, row_ok, pid_r * R, out_bytes, BITS)
