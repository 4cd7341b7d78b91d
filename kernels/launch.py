"""Host side of codecs and optimizer steps: from tensors and schemes to kernel launches.

Each function returns the launches that fill the outputs, in order; ``start.run`` runs them. Matrices are
``[rows, cols]`` with any strides; outputs are contiguous. Scratch memory is allocated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import reference
from lowbit.formats import Format
from lowbit.kernels import backward, codec, optim, quantize, rotation
from lowbit.kernels.arguments import CONVERTED, SIGNS, dense, dtype_of, input_of, pattern, rounds_once
from lowbit.kernels.spec import (
    PROGRAMS,
    TARGET,
    Launch,
    StepTiles,
    Tiling,
    format_spec,
    power_of_two,
    scale_spec,
    shared_tiling,
    step_tiles,
    tiling,
)
from lowbit.ops.optim import state_run
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import scale_dtype, zero_dtype


class Moment(NamedTuple):
    """An optimizer moment and its output tensors, which may be the same tensors.

    Packed codes and scales with a scheme; floats without scales if the scheme is None.
    """

    scheme: Scheme | None
    codes: Tensor
    scale: Tensor | None
    new_codes: Tensor
    new_scale: Tensor | None


class Weight(NamedTuple):
    """A parameter and its master (fp32, int8 low bits, or None), and their output tensors.

    ``stochastic``: whether the bf16 parameter is rounded stochastically, with the stream after the moments' stream.
    """

    param: Tensor
    master: Tensor | None
    new_param: Tensor
    new_master: Tensor | None
    stochastic: bool


class Rounding:
    """Rounding to nearest, or with ``rng`` (int64 [seed, step]) and coordinates in the whole tensor."""

    def __init__(self, rng: Tensor | None = None, stream: int = 0, offset: int = 0, pitch: int = 0):
        self.stochastic = rng is not None
        self.arguments: dict[str, Any] = {"rng_ptr": rng, "stream_id": stream, "offset": offset, "pitch": pitch}

    def mode(self, tiles: Tiling | StepTiles) -> int:
        """The kernel argument ``ROUNDING``."""
        return self.stochastic + (self.stochastic and tiles.eights(self.arguments["offset"], self.arguments["pitch"]))


# -- without scales ----------------------------------------------------------------------------------------------------
def _plain(rows: int, cols: int) -> tuple[Tiling, dict[str, Any]]:
    tiles = tiling(rows, cols, (1, 1))
    sizes = {"rows": rows, "cols": cols, "tiles_c": tiles.cols.tiles, "R": tiles.rows.span, "C": tiles.cols.span}
    return tiles, sizes


def _flat(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous matrices as one row, if its length fits the 32-bit indices of kernels."""
    if x.is_contiguous() and out.is_contiguous() and x.shape == out.shape and x.numel() < 1 << 30:
        return x.view(1, -1), out.view(1, -1)
    return x, out


def encode(x: Tensor, out: Tensor, format: Format, saturate: bool, rounding: Rounding) -> list[Launch]:
    """Encode x ``[rows, cols]``, one code per byte."""
    if not rounding.stochastic or rounding.arguments["pitch"] == x.shape[1]:
        x, out = _flat(x, out)
    tiles, sizes = _plain(*x.shape)
    more = {
        "out_ptr": out, "out_pitch": out.shape[1], "FMT": format_spec(format), "DTYPE": dtype_of(x),
        "SATURATE": saturate, "ROUNDING": rounding.mode(tiles),
        "CONVERT": conversion(format, x.device, rounding) if saturate else "",
    }  # fmt: skip
    return [Launch(codec.encode, tiles.grid, input_of(x) | sizes | rounding.arguments | more, tiles.warps)]


def conversion(format: Format, device: torch.device, rounding: Rounding) -> str:
    """The kernel argument ``CONVERT``: the format with a conversion instruction (to nearest, saturating), or ""."""
    name = CONVERTED.get(format.name, "")
    return name if name and not rounding.stochastic and rounds_once(name, device) else ""


def decode(codes: Tensor, out: Tensor, format: Format) -> list[Launch]:
    """Decode codes ``[rows, cols]``, one per byte."""
    codes, out = _flat(codes, out)
    tiles, sizes = _plain(*codes.shape)
    arguments = {
        "codes_ptr": codes, "stride_r": codes.stride(0), "stride_c": codes.stride(1), "out_ptr": pattern(out),
        "out_pitch": out.shape[1], "FMT": format_spec(format), "DTYPE": dtype_of(out),
    }  # fmt: skip
    return [Launch(codec.decode, tiles.grid, arguments | sizes, tiles.warps)]


def pack(codes: Tensor, out: Tensor, bits: int) -> list[Launch]:
    """Pack codes ``[rows, cols]`` into rows of ``out.shape[1]`` bytes."""
    tiles, sizes = _plain(*out.shape)
    arguments = {
        "codes_ptr": codes, "stride_r": codes.stride(0), "stride_c": codes.stride(1),
        "out_ptr": out, "out_bytes": out.shape[1], "BITS": bits,
    }  # fmt: skip
    return [Launch(codec.pack, tiles.grid, arguments | sizes | {"cols": codes.shape[1]}, tiles.warps)]


def unpack(packed: Tensor, out: Tensor, bits: int) -> list[Launch]:
    """Unpack rows of bytes to one code per byte, ``out [rows, cols]``."""
    tiles, sizes = _plain(*out.shape)
    arguments = {
        "packed_ptr": packed, "stride_r": packed.stride(0), "stride_c": packed.stride(1),
        "packed_bytes": packed.shape[1], "out_ptr": out, "BITS": bits, "PAIRS": _pairs(tiles, bits),
    }  # fmt: skip
    return [Launch(codec.unpack, tiles.grid, arguments | sizes, tiles.warps)]


def transpose(packed: Tensor, out: Tensor, bits: int, cols: int) -> list[Launch]:
    """Repack the columns of packed codes ``[rows, cols]`` as rows."""
    rows = packed.shape[0]
    tile_r, tile_c = (max(8, min(64, power_of_two(size))) for size in (rows, cols))
    tiles_c = -(-cols // tile_c)
    arguments = {
        "packed_ptr": packed, "stride_r": packed.stride(0), "stride_c": packed.stride(1),
        "packed_bytes": packed.shape[1], "out_ptr": out, "out_bytes": out.shape[1], "rows": rows, "cols": cols,
        "tiles_c": tiles_c, "BITS": bits, "PAIRS": bits == 4, "R": tile_r, "C": tile_c,
    }  # fmt: skip
    return [Launch(codec.transpose, (-(-rows // tile_r) * tiles_c,), arguments)]


def _pairs(tiles: Tiling, bits: int) -> bool:
    return bits == 4 and tiles.packs(4)


def hadamard(x: Tensor, out: Tensor, block: int, signed: bool) -> list[Launch]:
    """Transform x ``[rows, cols]`` along its columns: one launch per block size."""
    launches = []
    for start, length, size in reference.pieces(x.shape[1], block):
        # A tile is long along the contiguous axis.
        cols = max(size, min(power_of_two(length), 128 if x.stride(1) == 1 else 16))
        elements = 2048 if x.stride(1) == 1 else 8192
        rows = min(max(1, elements // cols), power_of_two(x.shape[0]))
        arguments = input_of(x) | {
            "out_ptr": pattern(out), "out_stride_r": out.stride(0), "out_stride_c": out.stride(1),
            "rows": x.shape[0], "start": start, "end": start + length, "tiles_c": -(-length // cols),
            "SIGNS": SIGNS if signed else None, "BLOCK": block, "FACTOR": size**-0.5, "DTYPE": dtype_of(x),
            "SIZE": size, "R": rows, "C": cols,
        }  # fmt: skip
        grid = (-(-x.shape[0] // rows) * arguments["tiles_c"],)
        launches.append(Launch(rotation.hadamard, grid, arguments, max(1, elements // 512)))
    return launches


# -- with scales -------------------------------------------------------------------------------------------------------
def _extremes(x: Tensor, tiles: Tiling, both: bool, finite: bool) -> tuple[Launch, Tensor, Tensor | None]:
    shape = (tiles.rows.blocks, tiles.cols.blocks)
    high, low = (torch.zeros(shape, dtype=torch.int32, device=x.device) if want else None for want in (True, both))
    assert high is not None
    more = {
        "high_ptr": high, "low_ptr": low, "rows": x.shape[0], "cols": x.shape[1],
        "DTYPE": dtype_of(x), "BOTH": both, "FINITE": finite, "TILE": tiles.constexpr(),
    }  # fmt: skip
    arguments = input_of(x) | tiles.arguments() | more
    return Launch(quantize.reduce_extremes, tiles.grid, arguments, tiles.warps), high, low


def global_scale(x: Tensor, out: Tensor, scheme: Scheme) -> list[Launch]:
    """Compute the global scale of x, ``out`` fp32 ``[1, 1]``, or of each row, ``[rows, 1]``."""
    rows, cols = x.shape
    tiles = tiling(rows, cols, (1 if scheme.global_scale == "row" else rows, cols))
    reduce, high, _ = _extremes(x, tiles, both=False, finite=True)
    count = high.numel()
    size = min(power_of_two(count), TARGET.usual // 4)
    finish = {"high_ptr": high, "out_ptr": out, "count": count, "DIVISOR": scale_spec(scheme)[7], "SIZE": size}
    return [reduce, Launch(quantize.finish_global_scale, (-(-count // size),), finish, warps=1)]


def block_range(x: Tensor, low: Tensor, high: Tensor, scheme: Scheme) -> list[Launch]:
    """Compute the minimum and maximum of each block and 0, fp32 ``[R, C]``."""
    reduce, most, least = _extremes(x, tiling(*x.shape, scheme.block_of(*x.shape)), both=True, finite=False)
    count = most.numel()
    size = min(power_of_two(count), TARGET.usual // 4)
    finish = {
        "high_ptr": most, "low_ptr": least, "out_high_ptr": high, "out_low_ptr": low, "count": count, "SIZE": size,
    }  # fmt: skip
    return [reduce, Launch(quantize.finish_range, (-(-count // size),), finish, warps=1)]


def quantize_dynamic(
    x: Tensor, scheme: Scheme, global_scale: Tensor | None,
    out: Tensor, scale: Tensor | None, zero_point: Tensor | None,
    rounding: Rounding, fake: bool = False,
) -> list[Launch]:  # fmt: skip
    """Compute the scales of x and its packed codes, or with ``fake`` the dequantized values.

    ``scale`` and ``zero_point`` receive the scales, and may be None with ``fake``.
    """
    rows, cols = x.shape
    tiles = tiling(rows, cols, scheme.block_of(rows, cols))
    if tiles.one_pass:
        return _quantize(
            x, scheme, tiles, (scale, zero_point, global_scale), out, rounding, fake, given=False, dynamic=True
        )
    made, scale, zero_point = _make_scales(x, scheme, tiles, global_scale, scale, zero_point)
    scales = (scale, zero_point, global_scale)
    return [*made, *_quantize(x, scheme, tiles, scales, out, rounding, fake, given=True, dynamic=True)]


def _make_scales(
    x: Tensor,
    scheme: Scheme,
    tiles: Tiling,
    global_scale: Tensor | None,
    scale: Tensor | None,
    zero_point: Tensor | None,
) -> tuple[list[Launch], Tensor, Tensor | None]:
    """Launches that compute the scales of blocks larger than tiles, and their output tensors, given or new."""
    if scale is None:
        shape = scheme.scale_shape(*x.shape)
        scale = torch.empty(shape, dtype=scale_dtype(scheme), device=x.device)
        zero_point = torch.empty(shape, dtype=zero_dtype(scheme), device=x.device) if scheme.affine else None
    reduce, high, low = _extremes(x, tiles, scheme.both_ends, finite=False)
    count = high.numel()
    size = min(power_of_two(count), TARGET.usual // 4)
    finish = {
        "high_ptr": high, "low_ptr": low, "global_scale_ptr": dense(global_scale), "scale_ptr": pattern(scale),
        "zero_ptr": zero_point, "count": count, "blocks_c": tiles.cols.blocks, "FMT": format_spec(scheme.format),
        "SCALE": scale_spec(scheme), "SIZE": size,
    }  # fmt: skip
    return [reduce, Launch(quantize.finish_scales, (-(-count // size),), finish)], scale, zero_point


def whole_rows(rows: int, cols: int, scheme: Scheme) -> Tiling | None:
    """Tiles of whole rows in blocks of ``scheme``, for one-pass global scales; None if there are none."""
    if scheme.global_scale != "row" or scheme.affine:
        return None
    wide = power_of_two(cols)
    tall = min(max(1, TARGET.usual // wide), power_of_two(rows))
    if wide > TARGET.whole:
        return None
    tiles = shared_tiling(rows, cols, scheme.block_of(rows, cols), (tall, wide))
    return tiles if tiles is not None and tiles.packs(scheme.format.bits) else None


def quantize_rows(x: Tensor, scheme: Scheme, codes: Tensor, scale: Tensor, global_scale: Tensor) -> list[Launch]:
    """Compute the packed codes of x (to nearest), block scales, and the global scale of each row."""
    rows, cols = x.shape
    tiles = whole_rows(rows, cols, scheme)
    assert tiles is not None
    arguments = input_of(x) | {
        "scale_ptr": pattern(scale), "global_scale_ptr": global_scale, "out_ptr": codes, "out_bytes": codes.shape[1],
        "rows": x.shape[0], "cols": x.shape[1], "blocks_r": tiles.rows.blocks, "blocks_c": tiles.cols.blocks,
        "FMT": format_spec(scheme.format), "SCALE": scale_spec(scheme), "DTYPE": dtype_of(x),
        "TILE": tiles.constexpr(), "DIVISOR": scale_spec(scheme)[7], "OUT_BITS": scheme.format.bits,
        "CONVERT": conversion(scheme.format, x.device, Rounding()),
    }  # fmt: skip
    return [Launch(quantize.quantize_rows, (tiles.rows.tiles,), arguments, 2 * tiles.warps)]


def quantize_static(
    x: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, global_scale: Tensor | None, out: Tensor,
    rounding: Rounding, fake: bool = False,
) -> list[Launch]:  # fmt: skip
    """Compute the packed codes of x for given scales, or with ``fake`` the dequantized values."""
    tiles = tiling(*x.shape, scheme.block_of(*x.shape))
    scales = (scale.contiguous(), dense(zero_point), global_scale)
    return _quantize(x, scheme, tiles, scales, out, rounding, fake, given=True, dynamic=False)


def _quantize(
    x: Tensor, scheme: Scheme, tiles: Tiling, scales: tuple[Tensor | None, Tensor | None, Tensor | None], out: Tensor,
    rounding: Rounding, fake: bool, given: bool, dynamic: bool,
) -> list[Launch]:  # fmt: skip
    scale, zero_point, global_scale = scales
    bits = scheme.format.bits
    fused = fake or tiles.packs(bits)
    codes = out if fused else torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    more = {
        "scale_ptr": None if scale is None else pattern(scale), "zero_ptr": zero_point if scheme.affine else None,
        "global_scale_ptr": dense(global_scale), "out_ptr": pattern(codes), "out_pitch": codes.shape[1],
        "out_bytes": codes.shape[1], "rows": x.shape[0], "cols": x.shape[1],
        "FMT": format_spec(scheme.format), "SCALE": scale_spec(scheme), "DTYPE": dtype_of(x), "TILE": tiles.constexpr(),
        "GIVEN": given, "DYNAMIC": dynamic, "FAKE": fake, "STORE_SCALE": scale is not None and not given,
        "OUT_BITS": bits if fused else 8, "ROUNDING": rounding.mode(tiles),
        "CONVERT": conversion(scheme.format, x.device, rounding),
    }  # fmt: skip
    arguments = input_of(x) | tiles.arguments() | rounding.arguments | more
    first = Launch(quantize.quantize, tiles.grid, arguments, tiles.warps)
    return [first] if fused else [first, *pack(codes, out, bits)]


def dequantize(
    codes: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, global_scale: Tensor | None, out: Tensor
) -> list[Launch]:
    """Dequantize packed codes to ``out [rows, cols]``."""
    rows, cols = out.shape
    tiles = tiling(rows, cols, scheme.block_of(rows, cols))
    more = {
        "codes_ptr": codes, "stride_r": codes.stride(0), "stride_c": codes.stride(1), "codes_bytes": codes.shape[1],
        "scale_ptr": pattern(scale.contiguous()), "zero_ptr": dense(zero_point),
        "global_scale_ptr": dense(global_scale), "out_ptr": pattern(out),
        "out_pitch": cols, "rows": rows, "cols": cols,
        "FMT": format_spec(scheme.format), "SCALE": scale_spec(scheme), "DTYPE": dtype_of(out),
        "TILE": tiles.constexpr(), "PAIRS": _pairs(tiles, scheme.format.bits),
    }  # fmt: skip
    return [Launch(quantize.dequantize, tiles.grid, tiles.arguments() | more, tiles.warps)]


def fake_quantize_backward(
    grad: Tensor, x: Tensor, scheme: Scheme,
    scale: Tensor | None, zero_point: Tensor | None, global_scale: Tensor | None,
    out: Tensor, grad_scale: Tensor | None,
) -> list[Launch]:  # fmt: skip
    """Compute the gradient of x, ``out``, and of given scales and zero points, ``grad_scale`` fp32.

    Scales that are computed from x are constants.
    """
    tiles = tiling(*x.shape, scheme.block_of(*x.shape))
    launches: list[Launch] = []
    if scale is None and not tiles.one_pass:
        launches, scale, zero_point = _make_scales(x, scheme, tiles, global_scale, None, None)
    pieces = tiles.rows.pieces * tiles.cols.pieces
    sums = grad_scale
    if grad_scale is not None and pieces > 1:
        sums = torch.empty((grad_scale.numel(), pieces), dtype=torch.float32, device=x.device)
    more = {
        "grad_ptr": pattern(grad), "grad_stride_r": grad.stride(0), "grad_stride_c": grad.stride(1),
        "scale_ptr": None if scale is None else pattern(scale.contiguous()),
        "zero_ptr": dense(zero_point), "global_scale_ptr": dense(global_scale),
        "out_ptr": pattern(out), "out_pitch": x.shape[1], "sums_ptr": sums, "rows": x.shape[0], "cols": x.shape[1],
        "FMT": format_spec(scheme.format), "SCALE": scale_spec(scheme), "MAX": scheme.format.max, "DTYPE": dtype_of(x),
        "GRAD_DTYPE": dtype_of(grad), "TILE": tiles.constexpr(), "GIVEN": scale is not None,
    }  # fmt: skip
    arguments = input_of(x) | tiles.arguments() | more
    launches.append(Launch(backward.fake_quantize_backward, tiles.grid, arguments, tiles.warps))
    if grad_scale is not None and pieces > 1:
        finish = {"sums_ptr": sums, "out_ptr": grad_scale, "pieces": pieces, "SIZE": min(power_of_two(pieces), 1024)}
        launches.append(Launch(backward.sum_pieces, (grad_scale.numel(),), finish))
    return launches


# -- optimizer ---------------------------------------------------------------------------------------------------------
#: The kernel argument ``MASTER`` by dtype.
_MASTERS = {torch.float32: 1, torch.int8: 2}


def optimizer_step(
    weight: Weight, grad: Tensor, moments: list[Moment], rule: str, factors: Sequence[float], rounding: Rounding,
    stochastic: bool,
) -> list[Launch]:  # fmt: skip
    """Update the weight and moments.

    ``rounding`` has the random bits for moments and parameter. ``stochastic``: whether moments use them.
    """
    rows, cols = weight.param.shape
    tiles = step_tiles(rows, cols, lcm(1, *(state_run(m.scheme) for m in moments if m.scheme is not None)))
    across = -(-cols // tiles.span)
    count = -(-rows // tiles.rows) * across
    tables = any(m.scheme is not None and m.scheme.format.kind == "codebook" for m in moments)
    share = max(1, min(8, count // PROGRAMS)) if tables else 1
    random = rounding.arguments
    more = {
        "param_ptr": pattern(weight.param), "stride_r": weight.param.stride(0), "stride_c": weight.param.stride(1),
        "grad_ptr": pattern(grad), "grad_stride_r": grad.stride(0), "grad_stride_c": grad.stride(1),
        "master_ptr": _maybe_pattern(dense(weight.master)), "out_ptr": pattern(weight.new_param),
        "new_master_ptr": _maybe_pattern(weight.new_master), "param_stream_id": random["stream_id"] + 1,
        "rows": rows, "cols": cols, "tiles_c": across, "share": share,
        "R": tiles.rows, "C": tiles.cols, "SPAN": tiles.span,
        "RULE": rule, "DTYPE": dtype_of(weight.param), "GRAD_DTYPE": dtype_of(grad),
        "MASTER": 0 if weight.master is None else _MASTERS[weight.master.dtype],
        "ROUNDING": rounding.mode(tiles) if stochastic else 0,
        "PARAM_ROUNDING": rounding.mode(tiles) if weight.stochastic else 0,
    }  # fmt: skip
    for name, moment in zip(("first", "second"), [*moments, None, None], strict=False):
        more |= _of_moment(name, moment, cols, tiles)
    named = {f"f{i}": value for i, value in enumerate([*factors, *[0.0] * (7 - len(factors))])}
    return [Launch(optim.step, (-(-count // share),), more | named | random, tiles.warps)]


def _of_moment(name: str, moment: Moment | None, cols: int, tiles: StepTiles) -> dict[str, Any]:
    """Kernel arguments of a moment, or of a missing one."""
    codes, scale, new_codes, new_scale = (None,) * 4 if moment is None else moment[1:]
    found: dict[str, Any] = {
        f"{name}_ptr": _maybe_pattern(dense(codes)), f"{name}_scale_ptr": _maybe_pattern(dense(scale)),
        f"new_{name}_ptr": _maybe_pattern(new_codes), f"new_{name}_scale_ptr": _maybe_pattern(new_scale),
        f"{name}_bytes": 0, f"{name}_blocks": 0,
    }  # fmt: skip
    scheme = None if moment is None else moment.scheme
    if scheme is None:
        kind = optim.NONE.value if codes is None else dtype_of(codes)
        return found | {name.upper() + rest: None for rest in ("_FMT", "_SCALE", "_CUT")} | {name.upper(): kind}
    block = scheme.block_of(1, cols)[1]
    return found | {
        f"{name}_bytes": scheme.packed_cols(cols), f"{name}_blocks": -(-cols // block),
        name.upper(): optim.CODES.value, f"{name.upper()}_FMT": format_spec(scheme.format),
        f"{name.upper()}_SCALE": scale_spec(scheme), f"{name.upper()}_CUT": tiles.cut(block),
    }  # fmt: skip


def _maybe_pattern(x: Tensor | None) -> Tensor | None:
    return None if x is None else pattern(x)
