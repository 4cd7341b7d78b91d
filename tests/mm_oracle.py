"""What scaled_mm must give: operands decoded by exact rationals and multiplied in fp64, integers in every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import torch
from bits import assert_same_bits, describe
from torch import Tensor

import lowbit as lb
from lowbit.ops import OPS, Numerics
from lowbit.ops.matmul import ScaledMM, is_exact, sides
from lowbit.scaling import Scheme

SPEC = OPS["scaled_mm"]


def decoded(call: ScaledMM, which: int) -> np.ndarray:
    """An operand in fp64, exact: (value - zero point) * scale, neither rounded."""
    side = sides(call)[which]
    if side.scheme is None:
        return side.data.cpu().double().numpy()
    s = lb.scheme(side.scheme)
    units = units_of(side, s, call.cols)
    return units * spread(scales(s, side), s, units.shape)


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
    outer = None if side.outer_scale is None else oracles.Fraction(float(side.outer_scale))
    stored = side.scale.cpu().contiguous()
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[stored.element_size()]
    patterns = stored.view(view).long() & ((1 << 8 * stored.element_size()) - 1)
    flat = [float(oracles.scale_of(int(p), s, outer)) for p in patterns.flatten()]
    return np.array(flat).reshape(tuple(stored.shape))


def spread(blocks: np.ndarray, s: Scheme, shape: tuple[int, ...]) -> np.ndarray:
    r, c = s.block_of(*shape)
    return np.repeat(np.repeat(blocks, r, 0)[: shape[0]], c, 1)[:, : shape[1]]


def exact(call: ScaledMM) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        y = decoded(call, 0) @ decoded(call, 1).T
    return y if call.bias is None else y + call.bias.cpu().double().numpy()


def integer_product(call: ScaledMM) -> Tensor:
    """Section 9 for integers, in the order of its words: exact sum, fp32, times fp32(scale * scale), bias, cast."""
    a, b = (units_of(side, lb.scheme(side.scheme), call.cols) for side in sides(call))
    total = (a.astype(np.int64) @ b.astype(np.int64).T).astype(np.float32)
    row = [
        np.float32(spread(scales(lb.scheme(s.scheme), s), lb.scheme(s.scheme), (s.data.shape[0], 1)))
        for s in sides(call)
    ]
    y = torch.from_numpy(total * (row[0] * row[1].T))
    if call.bias is not None:
        y = y + call.bias.cpu().float()
    return y.to(call.out_dtype)


def check(y: Tensor, call: ScaledMM, numerics: Numerics, what: str) -> None:
    """``y`` within the op's derived bound of the exact product, and in every bit where integers promise that."""
    what = f"{what}: {describe(call)}"
    assert y.dtype == call.out_dtype and tuple(y.shape) == (call.a.shape[0], call.b.shape[0]), what
    if is_exact(call):
        assert_same_bits(y.cpu(), integer_product(call), what)
        return
    wanted, got = exact(call), y.cpu().double().numpy()
    bound = SPEC.tolerance(call, numerics).numpy() + 2.0**-45 * np.abs(wanted)
    assert np.array_equal(np.isnan(wanted), np.isnan(got)), f"{what}: NaN in other places"
    largest = torch.finfo(call.out_dtype).max
    overflow = np.isinf(got) & (np.abs(wanted) + bound > largest) & (np.sign(got) == np.sign(wanted))
    with np.errstate(invalid="ignore"):
        right = (np.abs(got - wanted) <= bound) | overflow | np.isnan(wanted)
    worst = np.argmax(~right)
    assert right.all(), (
        f"{what}: {np.sum(~right)} outside the bound; the first: {got.flat[worst]}, exact {wanted.flat[worst]}, "
        f"off by {abs(got.flat[worst] - wanted.flat[worst]):.3g}, "
        f"bound {np.broadcast_to(bound, got.shape).flat[worst]:.3g}"
    )
