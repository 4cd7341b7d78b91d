"""Reference of rms_norm, swiglu and rotary, of their sums and of exp (section 15)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.reference.codec import cast, require_subnormals
from lowbit.reference.optim import root

__all__ = [
    "EXP_LIMIT", "GELU", "HIGH_LN2", "LOW_LN2", "POLYNOMIAL", "ROUNDER", "exp", "rms_norm", "rms_norm_backward",
    "rotary", "sum_terms", "swiglu", "swiglu_backward",
]  # fmt: skip

#: fp32 nearest 1 / ln 2; the multiple of 2^-16 nearest ln 2, and the fp32 nearest the rest.
LOG2_E = float.fromhex("0x1.715476p+0")
HIGH_LN2 = float.fromhex("0x1.62e4p-1")
LOW_LN2 = float.fromhex("0x1.7f7d1cp-20")
#: Of ``(e^f - 1 - f) / f^2`` for ``|f| <= ln(2) / 2``, from the constant term on: minimax in the relative error of e^f.
POLYNOMIAL = tuple(
    float.fromhex(c) for c in ("0x1.fffffcp-2", "0x1.555492p-3", "0x1.5558f2p-5", "0x1.123a0ap-7", "0x1.6a23f2p-10")
)
#: 1.5 * 2^23: a sum with it is rounded to an integer, which its lowest bits are.
ROUNDER = 12582912.0
#: From here on e^y rounds to infinity, and e^-y to 0.
EXP_LIMIT = 104.0
#: fp32 nearest sqrt(8 / pi), that times 0.044715, and three times that: the tanh form of gelu is
#: ``g * sigmoid(g * (a + b * g^2))``, whose argument has the derivative ``a + c * g^2``.
GELU = tuple(float.fromhex(c) for c in ("0x1.988454p+0", "0x1.2444f2p-4", "0x1.b6676cp-3"))
#: Magnitude to which derivatives clamp the gate: sigmoid is exactly 0 or 1 there.
GATE_LIMIT = 128.0


def sum_terms(terms: Tensor) -> Tensor:
    """fp32 sums ``[...]`` of terms ``[..., n]``: the second half is added to the first until one number is left."""
    if terms.shape[-1] == 0:
        return terms.new_zeros(terms.shape[:-1])
    while (count := terms.shape[-1]) > 1:
        half = 1 << (count - 1).bit_length() - 1
        paired = terms[..., : count - half] + terms[..., half:]
        terms = torch.cat([paired, terms[..., count - half : half]], -1)
    return terms[..., 0]


# -- rms_norm ----------------------------------------------------------------------------------------------------------
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: int) -> tuple[Tensor, Tensor]:
    """``x / rms(x) * (weight + offset)`` in the dtype of ``x [..., n]``, and fp32 ``1 / rms(x)`` ``[...]``."""
    require_subnormals(x)
    wide = x.float()
    mean = sum_terms(wide * wide) / _full(wide, wide.shape[-1])
    rms = root(mean + _full(mean, eps))
    rstd = torch.ones_like(rms) / rms
    y = wide * rstd[..., None] * _factors(weight, offset)
    return cast(y, x.dtype).reshape(x.shape), cast(rstd, torch.float32).reshape(rstd.shape)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: int, rows: int
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, in their dtypes. ``rows``: those whose terms are added one after the other."""
    require_subnormals(x)
    normed = x.float() * rstd[..., None]
    scaled = grad.float() * _factors(weight, offset)
    share = sum_terms(scaled * normed) / _full(rstd, x.shape[-1])
    grad_x = (scaled - normed * share[..., None]) * rstd[..., None]
    terms = (grad.float() * normed).reshape(-1, x.shape[-1]) if x.numel() else normed.new_zeros(0, x.shape[-1])
    grad_weight = cast(sum_terms(_row_blocks(terms, rows).t().contiguous()), weight.dtype)
    return cast(grad_x, x.dtype).reshape(x.shape), grad_weight


def _row_blocks(terms: Tensor, rows: int) -> Tensor:
    """Sums ``[blocks, n]`` over every ``rows`` rows of ``terms [M, n]``, in their order, from +0 on."""
    count = -(-terms.shape[0] // rows)
    padded = terms.new_zeros(count * rows, terms.shape[1])
    padded[: terms.shape[0]] = terms
    sums = terms.new_zeros(count, terms.shape[1])
    for i in range(rows):
        sums = sums + padded[i::rows]
    return sums


def _factors(weight: Tensor, offset: int) -> Tensor:
    return weight.float() + 1.0 if offset else weight.float()


def _full(like: Tensor, number: float) -> Tensor:
    """A number as an fp32 tensor: torch divides by Python numbers in another way on CUDA."""
    return torch.full((), number, dtype=torch.float32, device=like.device)


# -- swiglu ------------------------------------------------------------------------------------------------------------
def exp(y: Tensor) -> Tensor:
    """fp32 ``e^y`` for fp32 ``|y| <= EXP_LIMIT``, or NaN; the error is below one unit in the last place."""
    power = (y * LOG2_E + ROUNDER) - ROUNDER
    f = (y - power * HIGH_LN2) - power * LOW_LN2
    tail = torch.full_like(f, POLYNOMIAL[-1])
    for c in reversed(POLYNOMIAL[:-1]):
        tail = tail * f + c
    near = (f + (f * f) * tail) + 1.0
    exponent = power.nan_to_num(0.0).long()
    first = exponent >> 1
    return (near * _power_of_two(first)) * _power_of_two(exponent - first)


def _power_of_two(exponent: Tensor) -> Tensor:
    return (exponent + 127 << 23).to(torch.int32).view(torch.float32)


def _sigmoid(gate: Tensor, activation: str) -> Tensor:
    z = gate
    if activation == "gelu_tanh":
        z = gate * ((gate * gate) * GELU[1] + GELU[0])
    bottom = exp((-z).clamp(-EXP_LIMIT, EXP_LIMIT)) + 1.0
    return torch.ones_like(bottom) / bottom


def swiglu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` in their dtype."""
    require_subnormals(gate)
    g = gate.float()
    return cast((g * _sigmoid(g, activation)) * up.float(), gate.dtype).reshape(gate.shape)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, in their dtypes."""
    require_subnormals(gate)
    d, g, u = grad.float(), gate.float(), up.float()
    near = g.clamp(-GATE_LIMIT, GATE_LIMIT)
    s = _sigmoid(near, activation)
    rest = 1.0 - s
    if activation == "gelu_tanh":
        rest = ((near * near) * GELU[2] + GELU[0]) * rest
    slope = (near * rest + 1.0) * s
    grad_gate, grad_up = (d * u) * slope, d * (g * s)
    return cast(grad_gate, gate.dtype).reshape(gate.shape), cast(grad_up, up.dtype).reshape(up.shape)


# -- rotary ------------------------------------------------------------------------------------------------------------
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x [..., n]`` with its pairs rotated, in its dtype. ``cos`` and ``sin``: ``[..., pairs]``, broadcast."""
    require_subnormals(x)
    pairs, wide = cos.shape[-1], x.float()
    c, s = cos.float(), sin.float()
    turned = wide[..., : 2 * pairs]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(pairs, -1)
    first, second = a * c - b * s, b * c + a * s
    joined = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return cast(torch.cat([joined, wide[..., 2 * pairs :]], -1), x.dtype).reshape(x.shape)
