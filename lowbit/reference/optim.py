"""Reference of optimizer steps with quantized or float states and optional master weights (section 11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.formats import FORMATS
from lowbit.reference.codec import F32_INF, F32_MAGNITUDE, F32_NAN, Rng, cast, noise16, require_subnormals, to_bits
from lowbit.reference.codec import from_bits as _numbers_of
from lowbit.reference.quantizers import dequantize, quantize
from lowbit.scaling import Scheme


class Moment(NamedTuple):
    """Codes ``[rows, cols]``, one per byte, with scales and scheme; or floats, without the other two."""

    codes: Tensor
    scale: Tensor | None
    scheme: Scheme | None


#: (parameter, gradient, moments in fp32, factors) -> (next parameter, next moments).
Update = Callable[[Tensor, Tensor, list[Tensor], Sequence[float]], tuple[Tensor, list[Tensor]]]


def _adamw(p: Tensor, g: Tensor, moments: list[Tensor], factors: Sequence[float]) -> tuple[Tensor, list[Tensor]]:
    decay, mix, keep, mix_square, correction, eps, rate = factors
    m, r = moments
    m = m + (g - m) * mix
    r = root((r * r) * keep + (g * g) * mix_square)
    return p * decay - (m / (r * correction + eps)) * rate, [m, r]


def _lion(p: Tensor, g: Tensor, moments: list[Tensor], factors: Sequence[float]) -> tuple[Tensor, list[Tensor]]:
    decay, mix, mix_kept, rate = factors
    (m,) = moments
    toward = m + (g - m) * mix
    signs = torch.where(toward > 0, 1.0, torch.where(toward < 0, -1.0, toward))
    return p * decay - signs * rate, [m + (g - m) * mix_kept]


def _sgd(p: Tensor, g: Tensor, moments: list[Tensor], factors: Sequence[float]) -> tuple[Tensor, list[Tensor]]:
    decay, l2, rate = factors
    return p * decay - (g + p * l2) * rate, []


def _momentum(p: Tensor, g: Tensor, moments: list[Tensor], factors: Sequence[float]) -> tuple[Tensor, list[Tensor]]:
    l2, keep, mix, grad_share, momentum_share, rate = factors
    g = g + p * l2
    m = moments[0] * keep + g * mix
    return p - (g * grad_share + m * momentum_share) * rate, [m]


#: The arithmetic of every rule of lowbit/ops/optim.py.
UPDATES: dict[str, Update] = {
    "adamw": _adamw, "lion": _lion, "sgd": _sgd, "momentum": _momentum,
}  # fmt: skip


def optimizer_step(
    param: Tensor,
    grad: Tensor,
    master: Tensor | None,
    moments: list[Moment],
    rule: str,
    factors: Sequence[float],
    rng: Rng | None,
    param_rng: Rng | None,
) -> tuple[Tensor, Tensor | None, list[Moment]]:
    """The next parameter, master and moments in their storage formats; ``param, grad, master: [rows, cols]``."""
    require_subnormals(param)
    p, numbers = UPDATES[rule](weight(param, master), grad.float(), [_numbers(m) for m in moments], factors)
    stored = [_stored(number, moment, rng) for number, moment in zip(numbers, moments, strict=True)]
    if master is not None and master.dtype == torch.int8:
        return *split24(p), stored
    return (
        cast(p, param.dtype) if param_rng is None else bf16_stochastic(p, param_rng),
        None if master is None else cast(p, torch.float32),
        stored,
    )


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root. torch's fp32 sqrt is not on all devices; via fp64 it is."""
    return x.double().sqrt().float()


def _numbers(moment: Moment) -> Tensor:
    if moment.scheme is None:
        return moment.codes.float()
    assert moment.scale is not None
    return dequantize(moment.codes, moment.scheme, moment.scale, None, None, torch.float32)


def _stored(x: Tensor, before: Moment, rng: Rng | None) -> Moment:
    if before.scheme is not None:
        codes, scale, _ = quantize(x, before.scheme, None, rng)
        return Moment(codes, scale, before.scheme)
    if before.codes.dtype == torch.bfloat16 and rng is not None:
        return Moment(bf16_stochastic(x, rng), None, None)
    return Moment(cast(x, before.codes.dtype), None, None)


# -- weights -------------------------------------------------------------------------------------------------------
def weight(param: Tensor, master: Tensor | None) -> Tensor:
    """The fp32 weight from a parameter and its master: the fp32 weight, or its 8 bits below bf16.

    A master that does not round to the parameter is outdated, because other code has changed the parameter.
    """
    if master is None:
        return param.float()
    if master.dtype != torch.int8:
        return torch.where(to_bits(cast(master, param.dtype)) == to_bits(param), master, param.float())
    bits = to_bits(param)
    magnitude = ((bits & F32_MAGNITUDE) + (master.long() << 8)).clamp(min=0)
    return _numbers_of(magnitude | (bits & ~F32_MAGNITUDE))


def split24(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 rounded to 24 bits, as the nearest bf16 number and the int8 difference of the two patterns."""
    bits = to_bits(x)
    magnitude = bits & F32_MAGNITUDE
    magnitude = torch.where(magnitude > F32_INF, F32_NAN, magnitude)
    short = (magnitude + 0x7F + ((magnitude >> 8) & 1)) >> 8
    high = (short + 128) >> 8
    negative = (bits > F32_MAGNITUDE) & (magnitude <= F32_INF)
    return _bf16(high | (negative.long() << 15)), (short - (high << 8)).to(torch.int8)


def bf16_stochastic(x: Tensor, rng: Rng) -> Tensor:
    """Rounds fp32 ``[rows, cols]`` to bf16 stochastically (section 7); Inf beyond the range."""
    bits = to_bits(x)
    magnitude = bits & F32_MAGNITUDE
    high = ((magnitude + noise16(x.shape[0], x.shape[1], rng, x.device)) >> 16).clamp(max=FORMATS["bf16"].inf_code)
    high = high | ((bits > F32_MAGNITUDE).long() << 15)
    return _bf16(torch.where(magnitude > F32_INF, F32_NAN >> 16, torch.where(magnitude == F32_INF, bits >> 16, high)))


def _bf16(pattern: Tensor) -> Tensor:
    return pattern.where(pattern < 1 << 15, pattern - (1 << 16)).to(torch.int16).view(torch.bfloat16)
