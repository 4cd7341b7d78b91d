"""Master weights: what is kept beside a parameter of 16 bits of the number that it is rounded from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit import reference

__all__ = ["MAKE", "number", "stored"]

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
