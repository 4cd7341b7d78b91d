"""Launches of the kernels in ``dual``: quantizes a matrix in two schemes, with tiles that suit both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.kernels import dual, quantize
from lowbit.kernels.arguments import SIGNS, dtype_of, input_of, pattern
from lowbit.kernels.launch import Rounding, conversion
from lowbit.kernels.spec import SECTOR, TARGET, Launch, Tiling, format_spec, power_of_two, scale_spec, shared_tiling
from lowbit.ops.dual import QuantizeBoth, quantize_calls
from lowbit.scaling import Scheme, scheme

__all__ = ["quantize_both", "supports"]

#: The longest side of a block that a tile holds whole.
_WHOLE = 128


class _Target(NamedTuple):
    """One of the two schemes with its rounding and output tensors."""

    scheme: Scheme
    rounding: Rounding
    codes: Tensor
    scale: Tensor
    above: Tensor

    def reduced(self, rows: int, cols: int) -> tuple[int, int] | None:
        return _reduced_block(self.scheme, rows, cols)


def _reduced_block(scheme: Scheme, rows: int, cols: int) -> tuple[int, int] | None:
    """Blocks whose amax a first kernel reduces before quantization; None if one kernel is enough."""
    if scheme.global_scale:
        return (1 if scheme.global_scale == "row" else rows), cols
    block = scheme.block_of(rows, cols)
    return block if max(block) > _WHOLE else None


def _tilings(call: QuantizeBoth, blocks: list[tuple[int, int]]) -> list[Tiling] | None:
    """One tile shape, described in the blocks of each scheme; None if no tile suits all of them."""
    rows, cols = call.x.shape
    tall = [SECTOR, call.block, *(r for r, _ in blocks if r <= _WHOLE)]
    wide = [SECTOR, *(c for _, c in blocks if c <= _WHOLE)]
    span_r = min(power_of_two(max(tall)), power_of_two(rows))
    span_c = min(power_of_two(max(*wide, TARGET.usual // span_r)), power_of_two(cols))
    tilings = [shared_tiling(rows, cols, block, (span_r, span_c)) for block in blocks]
    return None if None in tilings else [tiling for tiling in tilings if tiling is not None]


def supports(call: QuantizeBoth) -> str | None:
    """Why these kernels do not support the call, or None."""
    rows, cols = call.x.shape
    schemes = [scheme(single.scheme) for single in quantize_calls(call)]
    if any(s.full for s in schemes):
        return "its kernels have no scales of the element of largest magnitude"
    if rows % call.block:
        return f"it transforms whole blocks of {call.block} rows, and there are {rows} rows"
    blocks = [s.block_of(rows, cols) for s in schemes]
    if any(s.global_scale and max(block) > _WHOLE for s, block in zip(schemes, blocks, strict=True)):
        return f"below a global scale its blocks are of at most {_WHOLE} elements a side"
    reduced = [_reduced_block(s, rows, cols) or block for s, block in zip(schemes, blocks, strict=True)]
    tilings = _tilings(call, blocks) if _tilings(call, reduced) is not None else None
    if tilings is None or not all(t.packs(s.format.bits) for t, s in zip(tilings, schemes, strict=True)):
        return "no tiles of its kernels lie end to end in blocks of both schemes"
    return None


def quantize_both(call: QuantizeBoth, outs: tuple[Tensor, ...]) -> list[Launch]:
    x = call.x
    rows, cols = x.shape
    targets = [
        _Target(
            scheme(single.scheme),
            Rounding(call.rng if single.rounding == "stochastic" else None, single.stream, 0, cols),
            *outs[3 * index : 3 * index + 3],
        )
        for index, single in enumerate(quantize_calls(call))
    ]
    shared = {**input_of(x), "rows": rows, "cols": cols, "DTYPE": dtype_of(x), **_transform(call.block)}
    launches = _reductions(call, targets, shared)
    tilings = _tilings(call, [target.scheme.block_of(rows, cols) for target in targets])
    assert tilings is not None
    arguments = {**shared, "tiles_c": tilings[0].cols.tiles, "rng_ptr": call.rng, "pitch": cols}
    for target, tiles, prefix in zip(targets, tilings, ("", "other_"), strict=True):
        is_reduced = not target.scheme.global_scale and target.reduced(rows, cols) is not None
        arguments |= _target_arguments(prefix, target, tiles, is_reduced, x.device)
    return [*launches, Launch(dual.quantize_both, tilings[0].grid, arguments, _warps(tilings[0]))]


def _warps(tiles: Tiling) -> int:
    """More warps than for one scheme, because the tile stays in registers until both are written."""
    return max(8, tiles.warps)


def _transform(block: int) -> dict[str, Any]:
    return {"SIGNS": SIGNS, "SIZE": block, "FACTOR": block**-0.5}


def _blocks(prefix: str, tiles: Tiling) -> dict[str, int]:
    return {
        f"{prefix}blocks_r": tiles.rows.blocks, f"{prefix}blocks_c": tiles.cols.blocks,
        f"{prefix}pieces_r": tiles.rows.pieces, f"{prefix}pieces_c": tiles.cols.pieces,
    }  # fmt: skip


def _target_arguments(prefix: str, target: _Target, tiles: Tiling, given: bool, device: torch.device) -> dict[str, Any]:
    constants = {
        "FMT": format_spec(target.scheme.format), "SCALE": scale_spec(target.scheme), "TILE": tiles.constexpr(),
        "GIVEN": given, "OUT_BITS": target.scheme.format.bits, "ROUNDING": target.rounding.mode(tiles),
        "CONVERT": conversion(target.scheme.format, device, target.rounding),
    }  # fmt: skip
    return {
        f"{prefix}scale_ptr": pattern(target.scale),
        f"{prefix}global_scale_ptr": target.above if target.scheme.global_scale else None,
        f"{prefix}out_ptr": target.codes, f"{prefix}out_bytes": target.codes.shape[1],
        f"{prefix}stream_id": target.rounding.arguments["stream_id"], **_blocks(prefix, tiles),
        **{prefix.upper() + name: value for name, value in constants.items()},
    }  # fmt: skip


def _reductions(call: QuantizeBoth, targets: list[_Target], shared: dict[str, Any]) -> list[Launch]:
    """Launches that compute the scales that span several tiles: global scales, and scales of large blocks."""
    rows, cols = call.x.shape
    blocks = [target.reduced(rows, cols) for target in targets]
    if blocks == [None, None]:
        return []
    tilings = _tilings(
        call, [block or target.scheme.block_of(rows, cols) for target, block in zip(targets, blocks, strict=True)]
    )
    assert tilings is not None
    arguments, finish = {**shared, "tiles_c": tilings[0].cols.tiles}, []
    for target, block, tiles, prefix in zip(targets, blocks, tilings, ("", "other_"), strict=True):
        shape = (tiles.rows.blocks, tiles.cols.blocks)
        high = None if block is None else torch.zeros(shape, dtype=torch.int32, device=call.x.device)
        arguments |= {
            f"{prefix}high_ptr": high, f"{prefix.upper()}FINITE": bool(target.scheme.global_scale),
            f"{prefix.upper()}TILE": tiles.constexpr(), **_blocks(prefix, tiles),
        }  # fmt: skip
        if high is not None:
            finish.append(_finish(target, high))
    return [Launch(dual.reduce_both, tilings[0].grid, arguments, _warps(tilings[0])), *finish]


def _finish(target: _Target, high: Tensor) -> Launch:
    """The launch that computes a target's global scales, or its scales, from the amax values."""
    count = high.numel()
    size = min(power_of_two(count), TARGET.usual // 4)
    grid, shared = (-(-count // size),), {"high_ptr": high, "count": count, "SIZE": size}
    if target.scheme.global_scale:
        more = {"out_ptr": target.above, "DIVISOR": scale_spec(target.scheme)[7]}
        return Launch(quantize.finish_global_scale, grid, shared | more, warps=1)
    more = {
        "low_ptr": None, "global_scale_ptr": None, "scale_ptr": pattern(target.scale), "zero_ptr": None,
        "blocks_c": high.shape[1], "FMT": format_spec(target.scheme.format), "SCALE": scale_spec(target.scheme),
    }  # fmt: skip
    return Launch(quantize.finish_scales, grid, shared | more)
