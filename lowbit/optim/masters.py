"""Master weights of 16-bit parameters: the bits that rounding cuts off.

``store_short`` saves those bits when an fp32 parameter is converted to 16 bits. The optimizer's first step then
creates master weights that are equal to the fp32 weights, not to the rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit import reference
from lowbit.optim.shards import Part, local
from lowbit.torch_private import is_fake

__all__ = [
    "Remainder", "attach", "blank", "first", "forget", "number", "of", "store_short", "stored", "unchanged", "widened",
]  # fmt: skip


#: The attribute of a parameter with its ``Remainder``.
_REMAINDER = "_lowbit_remainder"
#: Elements that are processed at a time, so that temporaries stay small compared with a large weight.
_CHUNK = 1 << 20
_MAGNITUDE, _INF = 0x7FFFFFFF, 0x7F800000


def blank(master: str, param: Tensor) -> Tensor:
    """The master weight of a parameter that was not rounded."""
    if master == "fp32":
        return param.float().contiguous()
    return torch.zeros(param.shape, dtype=torch.int8, device=param.device)


def number(param: Tensor, master: Tensor) -> Tensor:
    """The fp32 weight from a parameter and its master weight."""
    return reference.weight(param, master)


def stored(master: str, weight: Tensor) -> Tensor:
    """The master weight of an fp32 weight."""
    return weight if master == "fp32" else reference.split24(weight)[1]


# -- from fp32 to 16 bits ----------------------------------------------------------------------------------------------
@dataclass
class Remainder:
    """The bits of fp32 weights that 16-bit parameters lack, until an optimizer stores them.

    Attributes:
        bits: Bit pattern of the fp32 weight minus pattern of the parameter in fp32, without signs, in the shape of the
            full parameter. For bf16, int8 in units of 256, as with ``master="residual"``. For fp16, int16 in units of
            1. None after an optimizer took them.
    """

    bits: Tensor | None

    def __deepcopy__(self, memo: dict[int, object]) -> Remainder:
        # An op, so that the copy is fake under a fake tensor mode.
        return Remainder(None if self.bits is None else self.bits.clone())


@torch.no_grad()
def store_short(param: Tensor, dtype: torch.dtype) -> Remainder:
    """Round an fp32 parameter in place to ``dtype``, bf16 or fp16, and store the cut-off bits if it is trained.

    With bf16, parameter and remainder have the weight's 24 leading bits. With fp16 they have all 32, if the magnitude
    is at least fp16's smallest normal number.
    """
    weight, like = param.data, torch.int8 if dtype == torch.bfloat16 else torch.int16
    short = weight.to(dtype)
    stores = param.requires_grad and not weight.is_meta
    bits = torch.empty(weight.shape, dtype=like, device=weight.device) if stores else None
    if bits is not None and not is_fake(weight):
        pieces = (x.reshape(-1).split(_CHUNK) for x in (weight, short))
        for cut, wide, narrow in zip(bits.view(-1).split(_CHUNK), *pieces, strict=True):
            cut.copy_(_difference(wide, narrow))
    param.data = short
    remainder = Remainder(bits)
    attach(param, remainder)
    return remainder


def _difference(wide: Tensor, narrow: Tensor) -> Tensor:
    """The values of ``Remainder.bits`` in int32."""
    exact, rounded = (x.contiguous().view(torch.int32) & _MAGNITUDE for x in (wide, narrow.float()))
    finite = (exact < _INF) & (rounded < _INF)
    if narrow.dtype == torch.bfloat16:
        # Rounded to 24 bits, nearest even. At 128 units, a tie, the sum would round to the other neighbour.
        difference = ((exact + 0x7F + ((exact >> 8) & 1)) >> 8) - (rounded >> 8)
        return torch.where(finite, difference.clamp(-127, 127), 0)
    return torch.where(finite, (exact - rounded).clamp(-(1 << 15), (1 << 15) - 1), 0)


def attach(param: Tensor, remainder: Remainder) -> None:
    """Attach a remainder to a parameter, its copy or its shard. It is valid until the parameter is written to."""
    known = getattr(param, _REMAINDER, None)
    if known is None or known[0] is not remainder:
        setattr(param, _REMAINDER, (remainder, param._version))


def of(param: Tensor) -> Remainder | None:
    """The remainder of a parameter; None if there is none, an optimizer took it, or the parameter was written to."""
    remainder, version = getattr(param, _REMAINDER, (None, 0))
    return None if remainder is None or remainder.bits is None or version != param._version else remainder


def forget(param: Tensor) -> None:
    """Drop the remainder of a parameter: an optimizer took it, or does not need it."""
    known = getattr(param, _REMAINDER, None)
    if known is not None:
        known[0].bits = None
        delattr(param, _REMAINDER)


@contextmanager
def unchanged(params: Iterable[Tensor]) -> Iterator[None]:
    """Context in which parameters are overwritten with their own values: their remainders stay valid."""
    remainders = {param: remainder for param in params if (remainder := of(param)) is not None}
    yield
    for param, remainder in remainders.items():
        delattr(param, _REMAINDER)
        attach(param, remainder)


def widened(param: Tensor) -> Tensor:
    """The fp32 weight that a parameter was rounded from, or the parameter in fp32 if it has no remainder."""
    remainder, shard = of(param), local(param)
    return shard.float() if remainder is None or remainder.bits is None else _wide(shard, remainder.bits)


def first(master: str, param: Tensor, part: Part) -> Tensor:
    """This process' shard of a parameter's master weight before the first step."""
    remainder, shard = of(param), local(param)
    if remainder is None or remainder.bits is None:
        return blank(master, shard)
    bits = remainder.bits.to(shard.device)
    if bits.shape != shard.shape:
        bits = part.shard_of(bits).clone()
    return bits if master == "residual" else _wide(shard, bits)


def _wide(param: Tensor, bits: Tensor) -> Tensor:
    """The fp32 weight from a 16-bit parameter and its cut-off bits."""
    pattern = param.float().contiguous().view(torch.int32)
    units = 256 if bits.dtype == torch.int8 else 1
    magnitude = torch.add(pattern & _MAGNITUDE, bits.int(), alpha=units).clamp_(min=0)
    return (magnitude | (pattern & ~_MAGNITUDE)).view(torch.float32)
