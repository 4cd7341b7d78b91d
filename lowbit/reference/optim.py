"""The step of an optimizer whose state is codes (section 11)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.reference.codec import Rng, cast, require_subnormals
from lowbit.reference.quantize import dequantize, quantize
from lowbit.scaling import Scheme


class Moment(NamedTuple):
    """Codes ``[rows, cols]`` (one a byte) and scales of a moment, and what they are kept in."""

    codes: Tensor
    scale: Tensor
    scheme: Scheme


def adamw(
    param: Tensor, grad: Tensor, avg: Moment, rms: Moment, factors: tuple[float, ...], rng: Rng | None
) -> tuple[Tensor, Moment, Moment]:
    """The next parameter, in its dtype, and moments; ``param, grad: [rows, cols]``."""
    decay, mix, keep, mix_square, correction, eps, rate = factors
    require_subnormals(param)
    g, (m, r) = grad.float(), (_numbers(moment) for moment in (avg, rms))
    m = m + (g - m) * mix
    r = _root((r * r) * keep + (g * g) * mix_square)
    p = param.float() * decay - (m / (r * correction + eps)) * rate
    return cast(p, param.dtype), _stored(m, avg.scheme, rng), _stored(r, rms.scheme, rng)


def _root(x: Tensor) -> Tensor:
    """The correctly rounded root, which torch's own is not everywhere: rounding twice from fp64 changes nothing."""
    return x.double().sqrt().float()


def _numbers(moment: Moment) -> Tensor:
    return dequantize(moment.codes, moment.scheme, moment.scale, None, None, torch.float32)


def _stored(x: Tensor, scheme: Scheme, rng: Rng | None) -> Moment:
    codes, scale, _ = quantize(x, scheme, None, rng)
    return Moment(codes, scale, scheme)
