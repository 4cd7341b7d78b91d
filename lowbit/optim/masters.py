"""Master weights: what is kept beside a parameter of 16 bits of the number that it is rounded from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit import reference

__all__ = ["MAKE", "number", "refresh_", "stored"]

#: What each kind of master is, beside a parameter that nothing was cut off yet.
MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda param: param.float().contiguous(),
    "residual": lambda param: torch.zeros(param.shape, dtype=torch.int8, device=param.device),
}


def number(param: Tensor, master: Tensor) -> Tensor:
    """The fp32 weight that a parameter and its master stand for."""
    return reference.weight(param, master)


def stored(kind: str, weight: Tensor) -> Tensor:
    """The master of a weight in fp32."""
    return weight if kind == "fp32" else reference.split24(weight)[1]


def refresh_(param: Tensor, master: Tensor) -> None:
    """Takes over to an fp32 master what something else has written to the parameter; elsewhere it stays as it is."""
    master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
