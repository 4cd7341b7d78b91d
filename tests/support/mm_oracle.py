"""What scaled_mm must give: operands decoded by exact rationals and multiplied in fp64, integers in every bit.

How far a float product may be off is section 9's bound of docs/numerics.md, worked out here from those operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from support import oracles
from support.bits import describe, pattern
from torch import Tensor

import lowbit as lb
from lowbit.ops import Numerics
from lowbit.ops.matmul import ScaledMM, sides
from lowbit.scaling import Scheme

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 0.0}
NAME = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


@dataclass(frozen=True, eq=False)
class Operand:
    """One side: its numbers, fp64 ``[rows, K]``, exact; of codes also the values less zero points, without scales.

    Integers have ``scale``, fp32 ``[rows, K]``, and ``block``, the elements along K that share one, or None where a row
    has one scale; ``dtype`` is that of floats, and fp32 of numbers of a codebook, which kernels decode before.
    """

    exact: np.ndarray
    units: np.ndarray | None = None
    scale: np.ndarray | None = None
    block: int | None = None
    dtype: torch.dtype | None = None

    @property
    def largest(self) -> float:
        """The largest finite code without its scale; 0 for a float matrix, which has none to lose."""
        return 0.0 if self.units is None else float(np.abs(self.units[np.isfinite(self.units)]).max(initial=0))


def operand(call: ScaledMM, which: int) -> Operand:
    side = sides(call)[which]
    if side.scheme is None:
        return Operand(side.data.cpu().double().numpy(), dtype=side.data.dtype)
    s = lb.scheme(side.scheme)
    units, stored = units_of(side, s, call.cols), scales(s, side)
    if s.format.kind != "integer":
        dtype = torch.float32 if s.format.kind == "codebook" else None
        return Operand(units * spread(stored, s, units.shape), units, dtype=dtype)
    scale = spread(stored, s, (len(units), max(call.cols, 1))).astype(np.float32)
    block = None if stored.shape[1] == 1 else s.block_of(len(units), call.cols)[1]
    return Operand(units * spread(stored, s, units.shape), units, scale, block)


def units_of(side: Any, s: Scheme, cols: int) -> np.ndarray:
    """Code values less zero points, fp64."""
    bits = s.format.bits
    rows = np.ascontiguousarray(side.data.cpu().numpy())
    stream = np.unpackbits(rows, axis=1, bitorder="little")[:, : cols * bits].reshape(rows.shape[0], cols, bits)
    codes = (stream * (1 << np.arange(bits))).sum(-1).astype(np.int64)
    table = np.array([float(oracles.value_of(s.format, code)) for code in range(1 << bits)])
    values = table[codes]
    if side.zero_point is not None:
        values = values - spread(side.zero_point.cpu().double().numpy(), s, values.shape)
    return values


def scales(s: Scheme, side: Any) -> np.ndarray:
    global_scale = (
        [None] if side.global_scale is None else [oracles.Fraction(f) for f in side.global_scale.flatten().tolist()]
    )
    stored = side.scale.cpu().contiguous()
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[stored.element_size()]
    patterns = stored.view(view).long() & ((1 << 8 * stored.element_size()) - 1)
    rows = [
        [float(oracles.scale_of(int(p), s, global_scale[row if len(global_scale) > 1 else 0])) for p in line]
        for row, line in enumerate(patterns)
    ]
    return np.array(rows).reshape(tuple(stored.shape))


def spread(blocks: np.ndarray, s: Scheme, shape: tuple[int, ...]) -> np.ndarray:
    r, c = s.block_of(*shape)
    return np.repeat(np.repeat(blocks, r, 0)[: shape[0]], c, 1)[:, : shape[1]]


class Wanted:
    """What a call must give; ``a`` and ``b`` where they are known already."""

    def __init__(self, call: ScaledMM, a: Operand | None = None, b: Operand | None = None) -> None:
        self.call, self.a, self.b = call, a or operand(call, 0), b or operand(call, 1)
        self.blocks = [x.block for x in (self.a, self.b) if x.block is not None]
        integers = self.a.scale is not None and self.b.scale is not None
        self.integers = integers and min(self.blocks, default=8) >= 8
        self.bias = np.zeros(1) if call.bias is None else call.bias.cpu().double().numpy()

    @cached_property
    def bits(self) -> Tensor:
        """Section 9 for integers, in the order of its words: exact sums, fp32, scales, bias, cast."""
        if not self.blocks:
            total = self._sum(0, self.call.cols) * (self.a.scale[:, :1] * self.b.scale[:, :1].T)
        else:
            total = np.zeros((len(self.a.units), len(self.b.units)), np.float32)
            begin = 0
            for k in range(1, self.call.cols + 1):
                if k == self.call.cols or k - begin == 512 or any(k % block == 0 for block in self.blocks):
                    total = total + self._sum(begin, k) * (self.a.scale[:, [begin]] * self.b.scale[:, [begin]].T)
                    begin = k
        y = torch.from_numpy(total)
        if self.call.bias is not None:
            y = y + self.call.bias.cpu().float()
        return y.to(self.call.out_dtype)

    def _sum(self, begin: int, end: int) -> np.ndarray:
        left, right = (x.units[:, begin:end].astype(np.int64) for x in (self.a, self.b))
        return (left @ right.T).astype(np.float32)

    @cached_property
    def product(self) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return self.a.exact @ self.b.exact.T + self.bias

    def bound(self, numerics: Numerics) -> np.ndarray:
        """((1 + v)^p (1 + gamma(K + 6)) - 1) |A| |B|^T, flushing, the bias's sum and the cast.

        Operands and products below 2^-126 may be flushed, and 2^-150 of a product of two scales lost to each term.
        """
        k, out = self.call.cols, self.call.out_dtype
        a, b = np.abs(self.a.exact), np.abs(self.b.exact)
        short = 128 * 2.0**-13 if numerics.accumulator == "fp22" else 0.0  # of 128 terms, before fp32 adds them
        n, rounded = (
            (k + 6) * UNIT.get(numerics.accumulator, UNIT["fp32"]),
            sum(self._rounds(x, numerics) for x in (self.a, self.b)),
        )
        relative = (1 + UNIT[numerics.operand]) ** rounded * (1 + n / (1 - n)) * (1 + short / (1 - short)) - 1
        with np.errstate(invalid="ignore"):
            flushed = 2.0**-126 * (a.sum(1)[:, None] + b.sum(1) + k) + k * self.a.largest * self.b.largest * 2.0**-150
            before = relative * (a @ b.T) + flushed + 2.0**-23 * np.abs(self.bias)
            cast = 0.0 if out == torch.float32 else UNIT[NAME[out]]
            return before + cast * (np.abs(self.product) + before) + SMALLEST[out]

    @staticmethod
    def _rounds(x: Operand, numerics: Numerics) -> bool:
        if x.dtype is None or numerics.operand == "fp32":
            return False
        return NAME[x.dtype] != numerics.operand if x.units is None else numerics.codebooks

    def wrong(self, y: Tensor, numerics: Numerics) -> tuple[np.ndarray, np.ndarray]:
        """Which elements are outside the bound (integers: differ in a bit), and the bound."""
        if self.integers:
            return (pattern(y) != pattern(self.bits)).numpy(), np.zeros(1)
        got, wanted = y.cpu().double().numpy(), self.product
        bound = self.bound(numerics) + 2.0**-45 * np.abs(wanted)
        with np.errstate(invalid="ignore"):
            beyond = np.abs(wanted) + bound > torch.finfo(self.call.out_dtype).max
            overflow = np.isinf(got) & beyond & (np.sign(got) == np.sign(wanted))
            right = (np.abs(got - wanted) <= bound) | overflow | (np.isnan(wanted) & np.isnan(got))
        return ~right, bound


def check(
    y: Tensor, call: ScaledMM, numerics: Numerics, what: str, work_out: Callable[[ScaledMM], Wanted] = Wanted
) -> None:
    """``y`` within the derived bound of the exact product, and in every bit where integers promise that.

    ``work_out``: what the call must give; ``cache(Wanted)`` works out calls that several kernels are given once.
    """
    wanted = work_out(call)
    assert y.dtype == call.out_dtype and tuple(y.shape) == (call.a.shape[0], call.b.shape[0]), what
    wrong, bound = wanted.wrong(y, numerics)
    if not wrong.any():
        return
    got, at = y.cpu().double().numpy(), np.unravel_index(np.argmax(wrong), wrong.shape)
    exact = (wanted.bits.double().numpy() if wanted.integers else wanted.product)[at]
    raise AssertionError(
        f"{what}: {wrong.sum()} outside the bound; the first at {[int(i) for i in at]}: {got[at]}, exact {exact}, "
        f"off by {abs(got[at] - exact):.3g}, bound {np.broadcast_to(bound, got.shape)[at]:.3g}; {describe(call)}"
    )
