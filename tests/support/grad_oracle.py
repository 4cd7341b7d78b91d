"""What the gradient of a given scale must be (docs/numerics.md section 10): exact sums over blocks, and their bound."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from support import boundaries, oracles
from support.bits import describe
from support.mm_oracle import scales, spread
from torch import Tensor

import lowbit as lb
from lowbit.ops import OPS, Numerics
from lowbit.ops.quantize import FakeQuantizeBackward
from lowbit.ops.spec import as_rows
from lowbit.scaling import Scheme

SPEC = OPS["fake_quantize_backward"]
FP32_MAX = float(np.finfo(np.float32).max)


def quotient(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Section 5: fp32 magnitudes divided, signs multiplied; a scale of 0 divides as +Inf."""
    s = np.where(s == 0, np.float32(np.inf), s)
    return np.copysign(np.abs(x) / np.abs(s), np.where(np.signbit(x) ^ np.signbit(s), -1, 1)).astype(np.float32)


def levels(v: np.ndarray, zero: np.ndarray, s: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """What quotients decode to, without their scale, and which of them are in range."""
    f = s.format
    if f.kind == "integer":
        low, high = oracles.limits(f)
        q = np.rint(v) + zero.astype(np.float32)
        return np.where(np.isnan(q), 0.0, np.clip(q, low, high).astype(np.float64) - zero), (low <= q) & (q <= high)
    table = np.array([float(oracles.value_of(f, code)) for code in range(1 << f.bits)])
    codes = boundaries.expected_codes(f, True, np.ascontiguousarray(v).view(np.uint32))
    return table[codes], np.abs(v) <= float(oracles.largest(f))


def over_blocks(values: np.ndarray, s: Scheme) -> np.ndarray:
    """Sums ``[R, C]`` in fp64."""
    for axis, length in enumerate(s.block_of(*values.shape)):
        values = np.add.reduceat(values, np.arange(0, values.shape[axis], length), axis)
    return values


@cache
def scale_gradient(call: FakeQuantizeBackward) -> tuple[np.ndarray, np.ndarray]:
    """fp64 ``[R, C]``, with zero points ``[2, R, C]``: the exact sums, terms beyond fp32 being Inf, and how far fp32
    sums in any order may be off. Worked out once for the same tensors, which nobody may write to.
    """
    s, x, grad = lb.scheme(call.scheme), as_rows(call.x).float().numpy(), as_rows(call.grad).double().numpy()
    zero = np.zeros(x.shape) if call.zero_point is None else spread(call.zero_point.double().numpy(), s, x.shape)
    with np.errstate(all="ignore"):
        step = spread(scales(s, call), s, x.shape).astype(np.float32)
        v = quotient(x, step)
        level, inside = levels(v, zero, s)
        of_scale = sums(grad * np.where(inside, level - v.astype(np.float64), level), s)
        if not s.affine:
            return of_scale
        of_zero = sums(np.where(inside, 0.0, -step.astype(np.float64) * grad), s)
        return np.stack([of_scale[0], of_zero[0]]), np.stack([of_scale[1], of_zero[1]])


def sums(terms: np.ndarray, s: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Over blocks, with the bound on their error in fp32."""
    terms = np.where(np.abs(terms) > FP32_MAX, np.copysign(np.inf, terms), terms)
    count, size = over_blocks(np.ones(terms.shape), s), over_blocks(np.abs(terms), s)
    unit = (count + 1) * 2.0**-24
    bound = size * unit / (1 - unit) + count * 2.0**-150
    bound = np.where(size + bound < FP32_MAX, bound, np.where(np.isfinite(size), np.inf, 0.0))
    return over_blocks(terms, s), bound


def check(got: Tensor, call: FakeQuantizeBackward, what: str) -> None:
    """Gradients of scales within the op's bound of the exact ones; Inf and NaN where those are."""
    exact, _ = scale_gradient(call)
    bound = SPEC.tolerance(call, Numerics()).numpy()
    y = got.cpu().double().numpy()
    assert y.shape == exact.shape == bound.shape, f"{what}: {describe(call)}"
    with np.errstate(invalid="ignore"):
        right = (np.abs(y - exact) <= bound) | (y == exact) | (np.isnan(y) & np.isnan(exact))
    right |= np.isinf(bound) & ~np.isfinite(y)
    at = tuple(np.argwhere(~right)[0]) if not right.all() else ()
    assert right.all(), f"{what}: at {at} {y[at]}, exact {exact[at]}, bound {bound[at]:.3g}; {describe(call)}"


def same_bound(call: FakeQuantizeBackward) -> bool:
    """Whether the op's bound is that of the oracle."""
    stated, derived = SPEC.tolerance(call, Numerics()), torch.from_numpy(scale_gradient(call)[1])
    return torch.allclose(stated, derived, rtol=0.01, atol=0.0)
