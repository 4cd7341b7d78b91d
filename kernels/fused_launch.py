"""Launches of the kernels in ``fused``: rms_norm, swiglu and rotary with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.kernels import fused
from lowbit.kernels.arguments import dtype_of, input_of, pattern
from lowbit.kernels.spec import TARGET, Launch, Target, power_of_two, tiling
from lowbit.ops.fused import ROWS, RMSNorm, RMSNormBackward, Rotary, Swiglu, SwigluBackward, leading_strides
from lowbit.ops.spec import as_rows

__all__ = ["rms_norm", "rms_norm_backward", "rotary", "supports_norm", "supports_norm_backward", "swiglu",
           "swiglu_backward"]  # fmt: skip

#: The most columns of a norm, whose rows a program holds whole, and the most blocks of rows.
_MOST_COLS = 1 << 15
_MOST_BLOCKS = 1 << 14
#: Columns of a program that adds up rows.
_SUM_COLS = 256


def supports_norm(call: RMSNorm | RMSNormBackward) -> str | None:
    """Why the kernels do not support the call, or None."""
    cols = call.x.shape[-1]
    return None if cols <= _MOST_COLS else f"its kernels hold rows of at most {_MOST_COLS} columns, got {cols}"


def supports_norm_backward(call: RMSNormBackward) -> str | None:
    """Why the kernels do not support the call, or None."""
    most, rows = ROWS * _MOST_BLOCKS, call.x.numel() // max(call.x.shape[-1], 1)
    if call.weight_grad and rows > most:
        return f"its kernels add the terms of at most {most} rows to the gradient of a weight, got {rows}"
    return supports_norm(call)


def _strided(name: str, x: Tensor) -> dict[str, Any]:
    return {f"{name}_ptr": pattern(x), f"{name}_stride_r": x.stride(0), f"{name}_stride_c": x.stride(1)}


def _row_tiles(rows: int, cols: int) -> dict[str, int]:
    """Rows and columns of a program with whole rows."""
    wide = power_of_two(cols)
    return {"R": max(1, min(TARGET.usual // wide, power_of_two(rows))), "C": wide}


def _warps(elements: int) -> int:
    return max(4, min(16, elements // 256), min(32, elements // 1024))


def rms_norm(call: RMSNorm, out: Tensor, rstd: Tensor) -> list[Launch]:
    """Normalize the rows of ``call.x``."""
    x = as_rows(call.x)
    tile = _row_tiles(*x.shape)
    arguments = input_of(x) | tile | {
        "weight_ptr": pattern(call.weight.contiguous()), "out_ptr": pattern(out), "rstd_ptr": pattern(rstd),
        "rows": x.shape[0], "cols": x.shape[1], "f0": _fp32(call.eps), "f1": float(x.shape[1]),
        "DTYPE": dtype_of(x), "WEIGHT": dtype_of(call.weight), "OFFSET": call.offset,
    }  # fmt: skip
    return [Launch(fused.rms_norm, (-(-x.shape[0] // tile["R"]),), arguments, _warps(tile["R"] * tile["C"]))]


def _fp32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def rms_norm_backward(call: RMSNormBackward, grad_x: Tensor, grad_weight: Tensor) -> list[Launch]:
    """Compute the gradients of x and, if ``call.weight_grad``, of the weight."""
    x, grad = as_rows(call.x), as_rows(call.grad)
    rows, cols = x.shape
    tile = _row_tiles(rows, cols)
    shared = input_of(x) | _strided("grad", grad) | {
        "rstd_ptr": pattern(call.rstd.contiguous()), "rows": rows, "cols": cols,
        "DTYPE": dtype_of(x), "GRAD": dtype_of(grad),
    }  # fmt: skip
    arguments = shared | tile | {
        "weight_ptr": pattern(call.weight.contiguous()), "out_ptr": pattern(grad_x), "f1": float(cols),
        "WEIGHT": dtype_of(call.weight), "OFFSET": call.offset,
    }  # fmt: skip
    warps = _warps(tile["R"] * tile["C"])
    launches = [Launch(fused.rms_norm_backward, (-(-rows // tile["R"]),), arguments, warps)]
    if not call.weight_grad:
        return launches
    blocks = -(-rows // ROWS)
    sums = torch.empty((blocks, cols), dtype=torch.float32, device=x.device)
    wide = min(_SUM_COLS, power_of_two(cols))
    across = -(-cols // wide)
    arguments = shared | {"sums_ptr": pattern(sums), "tiles_c": across, "ROWS": ROWS, "C": wide}
    launches.append(Launch(fused.norm_weight_sums, (blocks * across,), arguments))
    tall = power_of_two(blocks)
    wide = max(1, min(TARGET.usual // tall, 32, power_of_two(cols)))
    finish = {
        "sums_ptr": pattern(sums), "out_ptr": pattern(grad_weight), "cols": cols, "count": blocks,
        "DTYPE": dtype_of(grad_weight), "B": tall, "C": wide,
    }  # fmt: skip
    launches.append(Launch(fused.finish_norm_weight, (-(-cols // wide),), finish, _warps(tall * wide)))
    return launches


def _tiles(x: Tensor) -> tuple[dict[str, int], tuple[int, ...], int]:
    """Tile sizes of an elementwise kernel, its grid and warps."""
    tiles = tiling(*x.shape, (1, 1), Target(TARGET.whole, TARGET.usual // 4))  # so that numbers stay in registers
    sizes = {
        "rows": x.shape[0], "cols": x.shape[1], "tiles_c": tiles.cols.tiles, "R": tiles.rows.span, "C": tiles.cols.span,
    }  # fmt: skip
    return sizes, tiles.grid, tiles.warps


def swiglu(call: Swiglu, out: Tensor) -> list[Launch]:
    """Multiply the activated gate by up."""
    gate, up = as_rows(call.gate), as_rows(call.up)
    sizes, grid, warps = _tiles(gate)
    arguments = _strided("gate", gate) | _strided("up", up) | sizes | {
        "out_ptr": pattern(out), "GELU": call.activation == "gelu_tanh", "DTYPE": dtype_of(gate),
    }  # fmt: skip
    return [Launch(fused.swiglu, grid, arguments, warps)]


def swiglu_backward(call: SwigluBackward, grad_gate: Tensor, grad_up: Tensor) -> list[Launch]:
    """Compute the gradients of gate and up."""
    grad, gate, up = as_rows(call.grad), as_rows(call.gate), as_rows(call.up)
    sizes, grid, warps = _tiles(gate)
    arguments = _strided("grad", grad) | _strided("gate", gate) | _strided("up", up) | sizes | {
        "grad_gate_ptr": pattern(grad_gate), "grad_up_ptr": pattern(grad_up), "GELU": call.activation == "gelu_tanh",
        "DTYPE": dtype_of(gate), "GRAD": dtype_of(grad),
    }  # fmt: skip
    return [Launch(fused.swiglu_backward, grid, arguments, warps)]


def rotary(call: Rotary, out: Tensor) -> list[Launch]:
    """Rotate the pairs of each row of ``call.x``."""
    x, cols, pairs = call.x, call.x.shape[-1], call.cos.shape[-1]
    sizes = [1] * (4 - x.dim()) + list(x.shape[:-1])
    rows, wide, rest = sizes[0] * sizes[1] * sizes[2], power_of_two(pairs), cols - 2 * pairs
    tall = max(1, min(TARGET.usual // 2 // wide, power_of_two(rows)))
    arguments = {
        "x_ptr": pattern(x), "cos_ptr": pattern(call.cos), "sin_ptr": pattern(call.sin), "out_ptr": pattern(out),
        "stride_c": x.stride(-1), "cos_stride_c": call.cos.stride(-1), "sin_stride_c": call.sin.stride(-1),
        "rows": rows, "size_1": sizes[1], "size_2": sizes[2], "cols": cols, "pairs": pairs,
        "step": 2 if call.interleaved else 1, "apart": 1 if call.interleaved else pairs,
        "DTYPE": dtype_of(x), "TABLE": dtype_of(call.cos), "R": tall, "P": wide,
        "REST": power_of_two(rest) if rest else 0,
    }  # fmt: skip
    for name, table in (("", x), ("cos_", call.cos), ("sin_", call.sin)):
        for axis, stride in enumerate(leading_strides(table)):
            arguments[f"{name}stride_{axis}"] = stride
    return [Launch(fused.rotary, (-(-rows // tall),), arguments, _warps(2 * tall * wide))]
