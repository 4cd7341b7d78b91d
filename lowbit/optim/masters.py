"""Master weights: what is kept beside a 16-bit parameter of the number that it was rounded from.

``store_short`` keeps those bits from the moment a parameter is stored in 16 bits until the optimizer's first step, so
that masters begin as the fp32 weights and not as the rounded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit import reference
from lowbit.optim.shards import Part, local
from lowbit.torch_private import is_fake

__all__ = ["Remainder", "attach", "blank", "first", "forget", "number", "of", "store_short", "stored", "widened"]

#: What each kind of master is, beside a parameter that nothing was cut off yet.
_MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda param: param.float().contiguous(),
    "residual": lambda param: torch.zeros(param.shape, dtype=torch.int8, device=param.device),
}

#: The attribute of a parameter that has its ``Remainder``.
_REMAINDER = "_lowbit_remainder"
#: Elements whose patterns are computed at a time: temporaries stay small beside a large weight.
_CHUNK = 1 << 20
_MAGNITUDE, _INF = 0x7FFFFFFF, 0x7F800000


def blank(kind: str, param: Tensor) -> Tensor:
    """A master of a kind beside a parameter that nothing was cut off."""
    return _MAKE[kind](param)


def number(param: Tensor, master: Tensor) -> Tensor:
    """The fp32 weight that a parameter and its master stand for."""
    return reference.weight(param, master)


def stored(kind: str, weight: Tensor) -> Tensor:
    """The master of a weight in fp32."""
    return weight if kind == "fp32" else reference.split24(weight)[1]


# -- from fp32 to 16 bits ----------------------------------------------------------------------------------------------
@dataclass
class Remainder:
    """The bits of fp32 weights that 16 bits lack, until an optimizer has them.

    Attributes:
        bits: Differences of the two fp32 patterns' magnitudes, in the shape of the whole parameter: of bf16 int8, in
            units of 256 as in a master of ``"residual"``; of fp16 int16, in units of 1. None once handed over.
    """

    bits: Tensor | None

    def __deepcopy__(self, memo: dict[int, object]) -> Remainder:
        # By an op, so that a copy made within a mode of fake tensors is fake.
        return Remainder(None if self.bits is None else self.bits.clone())


@torch.no_grad()
def store_short(param: Tensor, dtype: torch.dtype) -> Remainder:
    """Round an fp32 parameter to nearest in ``dtype``, bf16 or fp16, in place, and keep what was cut off if it trains.

    Of bf16 the two hold the weight's 24 leading bits; of fp16 all 32 where it is at least fp16's least normal number.
    """
    weight, like = param.data, torch.int8 if dtype == torch.bfloat16 else torch.int16
    short = weight.to(dtype)
    keeps = param.requires_grad and not weight.is_meta
    bits = torch.empty(weight.shape, dtype=like, device=weight.device) if keeps else None
    if bits is not None and not is_fake(weight):
        pieces = (x.reshape(-1).split(_CHUNK) for x in (weight, short))
        for cut, wide, narrow in zip(bits.view(-1).split(_CHUNK), *pieces, strict=True):
            cut.copy_(_difference(wide, narrow))
    param.data = short
    remainder = Remainder(bits)
    attach(param, remainder)
    return remainder


def _difference(wide: Tensor, narrow: Tensor) -> Tensor:
    """The pattern of ``wide`` less that of ``narrow``, as ``Remainder.bits``, int32."""
    whole, rounded = (x.contiguous().view(torch.int32) & _MAGNITUDE for x in (wide, narrow.float()))
    finite = (whole < _INF) & (rounded < _INF)
    if narrow.dtype == torch.bfloat16:
        # Rounded to 24 bits, nearest even. At 128 units, a tie, the sum would round to the other neighbour.
        difference = ((whole + 0x7F + ((whole >> 8) & 1)) >> 8) - (rounded >> 8)
        return torch.where(finite, difference.clamp(-127, 127), 0)
    return torch.where(finite, (whole - rounded).clamp(-(1 << 15), (1 << 15) - 1), 0)


def attach(param: Tensor, remainder: Remainder) -> None:
    """Let a parameter, its copy or its share, have what was cut off, until something writes to it."""
    known = getattr(param, _REMAINDER, None)
    if known is None or known[0] is not remainder:
        setattr(param, _REMAINDER, (remainder, param._version))


def of(param: Tensor) -> Remainder | None:
    """What was cut off a parameter; None where nothing was, or an optimizer has it, or the weight was written to."""
    remainder, version = getattr(param, _REMAINDER, (None, 0))
    return None if remainder is None or remainder.bits is None or version != param._version else remainder


def forget(param: Tensor) -> None:
    """Drop what was cut off a parameter: an optimizer has it, or has no use for it."""
    known = getattr(param, _REMAINDER, None)
    if known is not None:
        known[0].bits = None
        delattr(param, _REMAINDER)


def widened(param: Tensor) -> Tensor:
    """The fp32 weight that a parameter was stored in 16 bits from, or the parameter in fp32."""
    remainder, mine = of(param), local(param)
    return mine.float() if remainder is None or remainder.bits is None else _wide(mine, remainder.bits)


def first(kind: str, param: Tensor, part: Part) -> Tensor:
    """This process' part of a parameter's master of a kind, before the first step."""
    remainder, mine = of(param), local(param)
    if remainder is None or remainder.bits is None:
        return blank(kind, mine)
    bits = remainder.bits.to(mine.device)
    if bits.shape != mine.shape:
        bits = part.of_whole(bits).clone()
    return bits if kind == "residual" else _wide(mine, bits)


def _wide(param: Tensor, bits: Tensor) -> Tensor:
    """The fp32 numbers of 16-bit ones with what was cut off them."""
    pattern = param.float().contiguous().view(torch.int32)
    units = 256 if bits.dtype == torch.int8 else 1
    magnitude = torch.add(pattern & _MAGNITUDE, bits.int(), alpha=units).clamp_(min=0)
    return (magnitude | (pattern & ~_MAGNITUDE)).view(torch.float32)
