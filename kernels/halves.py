"""Host side of ``both``: a matrix in two schemes, in tiles that suit both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.kernels import both, quantize
from lowbit.kernels.arguments import SIGNS, dtype_of, input_of, pattern
from lowbit.kernels.launch import Rounding, conversion
from lowbit.kernels.spec import SECTOR, TARGET, Launch, Tiling, format_spec, power_of_two, scale_spec, shared_tiling
from lowbit.ops.both import QuantizeBoth, halves
from lowbit.scaling import Scheme, scheme

__all__ = ["quantize_both", "supports"]

#: The longest side of a block that a tile holds whole.
_WHOLE = 128


class _Half(NamedTuple):
    """One of the two schemes, its rounding, and what its codes and scales go to."""

    scheme: Scheme
    rounding: Rounding
    codes: Tensor
    scale: Tensor
    above: Tensor

    def reduced(self, rows: int, cols: int) -> tuple[int, int] | None:
        return _reduced_block(self.scheme, rows, cols)


def _reduced_block(of: Scheme, rows: int, cols: int) -> tuple[int, int] | None:
    """The blocks whose largest magnitude is asked for before codes are made, or None."""
    if of.global_scale:
        return (1 if of.global_scale == "row" else rows), cols
    block = of.block_of(rows, cols)
    return block if max(block) > _WHOLE else None


def _tilings(call: QuantizeBoth, blocks: list[tuple[int, int]]) -> list[Tiling] | None:
    """The same tiles seen as whole blocks, or pieces, of each of these; None where no tiles suit all."""
    rows, cols = call.x.shape
    tall = [SECTOR, call.block, *(r for r, _ in blocks if r <= _WHOLE)]
    wide = [SECTOR, *(c for _, c in blocks if c <= _WHOLE)]
    span_r = min(power_of_two(max(tall)), power_of_two(rows))
    span_c = min(power_of_two(max(*wide, TARGET.usual // span_r)), power_of_two(cols))
    found = [shared_tiling(rows, cols, block, (span_r, span_c)) for block in blocks]
    return None if None in found else [one for one in found if one is not None]


def supports(call: QuantizeBoth) -> str | None:
    """Why these kernels cannot serve the call."""
    rows, cols = call.x.shape
    schemes = [scheme(half.scheme) for half in halves(call)]
    if any(one.full for one in schemes):
        return "its kernels have no scales of the element of largest magnitude"
    if rows % call.block:
        return f"it transforms whole blocks of {call.block} rows, and there are {rows} rows"
    blocks = [one.block_of(rows, cols) for one in schemes]
    if any(one.global_scale and max(block) > _WHOLE for one, block in zip(schemes, blocks, strict=True)):
        return f"below a global scale its blocks are of at most {_WHOLE} elements a side"
    reduced = [_reduced_block(one, rows, cols) or block for one, block in zip(schemes, blocks, strict=True)]
    tilings = _tilings(call, blocks) if _tilings(call, reduced) is not None else None
    if tilings is None or not all(t.packs(one.format.bits) for t, one in zip(tilings, schemes, strict=True)):
        return "no tiles of its kernels lie end to end in blocks of both schemes"
    return None


def quantize_both(call: QuantizeBoth, outs: tuple[Tensor, ...]) -> list[Launch]:
    """Codes, scales and global scales of both schemes."""
    x = call.x
    rows, cols = x.shape
    parts = [
        _Half(
            scheme(half.scheme),
            Rounding(call.rng if half.rounding == "stochastic" else None, half.stream, 0, cols),
            *outs[3 * number : 3 * number + 3],
        )
        for number, half in enumerate(halves(call))
    ]
    shared = {**input_of(x), "rows": rows, "cols": cols, "DTYPE": dtype_of(x), **_transform(call.block)}
    launches = _reduced(call, parts, shared)
    tilings = _tilings(call, [half.scheme.block_of(rows, cols) for half in parts])
    assert tilings is not None
    arguments = {**shared, "tiles_c": tilings[0].cols.tiles, "rng_ptr": call.rng, "pitch": cols}
    for half, tiles, prefix in zip(parts, tilings, ("", "other_"), strict=True):
        given = not half.scheme.global_scale and half.reduced(rows, cols) is not None
        arguments |= _of_half(prefix, half, tiles, given, x.device)
    return [*launches, Launch(both.quantize_both, tilings[0].grid, arguments, _warps(tilings[0]))]


def _warps(tiles: Tiling) -> int:
    """More than for one scheme: the tile is in registers until it is in both."""
    return max(8, tiles.warps)


def _transform(block: int) -> dict[str, Any]:
    return {"SIGNS": SIGNS, "SIZE": block, "FACTOR": block**-0.5}


def _blocks(prefix: str, tiles: Tiling) -> dict[str, int]:
    return {
        f"{prefix}blocks_r": tiles.rows.blocks, f"{prefix}blocks_c": tiles.cols.blocks,
        f"{prefix}pieces_r": tiles.rows.pieces, f"{prefix}pieces_c": tiles.cols.pieces,
    }  # fmt: skip


def _of_half(prefix: str, half: _Half, tiles: Tiling, given: bool, device: torch.device) -> dict[str, Any]:
    constants = {
        "FMT": format_spec(half.scheme.format), "SCALE": scale_spec(half.scheme), "TILE": tiles.constexpr(),
        "GIVEN": given, "OUT_BITS": half.scheme.format.bits, "ROUNDING": half.rounding.mode(tiles),
        "CONVERT": conversion(half.scheme.format, device, half.rounding),
    }  # fmt: skip
    return {
        f"{prefix}scale_ptr": pattern(half.scale),
        f"{prefix}global_scale_ptr": half.above if half.scheme.global_scale else None,
        f"{prefix}out_ptr": half.codes, f"{prefix}out_bytes": half.codes.shape[1],
        f"{prefix}stream_id": half.rounding.arguments["stream_id"], **_blocks(prefix, tiles),
        **{prefix.upper() + name: value for name, value in constants.items()},
    }  # fmt: skip


def _reduced(call: QuantizeBoth, parts: list[_Half], shared: dict[str, Any]) -> list[Launch]:
    """Launches that make what spans more than a tile: global scales, and scales of large blocks."""
    rows, cols = call.x.shape
    asked = [half.reduced(rows, cols) for half in parts]
    if asked == [None, None]:
        return []
    tilings = _tilings(
        call, [block or half.scheme.block_of(rows, cols) for half, block in zip(parts, asked, strict=True)]
    )
    assert tilings is not None
    arguments, finish = {**shared, "tiles_c": tilings[0].cols.tiles}, []
    for half, block, tiles, prefix in zip(parts, asked, tilings, ("", "other_"), strict=True):
        shape = (tiles.rows.blocks, tiles.cols.blocks)
        high = None if block is None else torch.zeros(shape, dtype=torch.int32, device=call.x.device)
        arguments |= {
            f"{prefix}high_ptr": high, f"{prefix.upper()}FINITE": bool(half.scheme.global_scale),
            f"{prefix.upper()}TILE": tiles.constexpr(), **_blocks(prefix, tiles),
        }  # fmt: skip
        if high is not None:
            finish.append(_finish(half, high))
    return [Launch(both.reduce_both, tilings[0].grid, arguments, _warps(tilings[0])), *finish]


def _finish(half: _Half, high: Tensor) -> Launch:
    """The global scales of a half, or its scales, from the largest magnitudes."""
    count = high.numel()
    size = min(power_of_two(count), TARGET.usual // 4)
    grid, shared = (-(-count // size),), {"high_ptr": high, "count": count, "SIZE": size}
    if half.scheme.global_scale:
        more = {"out_ptr": half.above, "DIVISOR": scale_spec(half.scheme)[7]}
        return Launch(quantize.finish_global_scale, grid, shared | more, warps=1)
    more = {
        "low_ptr": None, "global_scale_ptr": None, "scale_ptr": pattern(half.scale), "zero_ptr": None,
        "blocks_c": high.shape[1], "FMT": format_spec(half.scheme.format), "SCALE": scale_spec(half.scheme),
    }  # fmt: skip
    return Launch(quantize.finish_scales, grid, shared | more)
