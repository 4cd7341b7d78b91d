"""Optimizers by name: ``adamw`` and ``sgd`` are torch's; names that end in bits, as ``adamw8bit``, are lowbit's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lowbit.name_tables import did_you_mean
from lowbit.optim.adafactor import Adafactor
from lowbit.optim.adamw import AdamW
from lowbit.optim.lion import Lion
from lowbit.optim.muon import Muon
from lowbit.optim.sgd import SGD

__all__ = ["OPTIMIZERS", "NamedOptimizer", "find_optimizer"]


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer, and how its usual settings compare with AdamW's."""

    family: str
    """Its name without bits, such as ``adamw`` of ``adamw8bit``."""
    make: Callable[..., torch.optim.Optimizer]
    """``make(params, **settings)``, with the settings of the optimizer's class."""
    lr: float = 1.0
    """Learning rate relative to AdamW's."""
    decay: float = 1.0
    """Weight decay relative to AdamW's: ``lr`` times ``decay`` is 1, so that weights shrink as fast as with AdamW."""


_SGD = NamedOptimizer("sgd", partial(torch.optim.SGD, lr=1e-3, momentum=0.9), lr=10.0, decay=0.1)

#: Those of lowbit, each for all its bits. Muon takes AdamW's learning rate with ``match_rms_adamw`` alone.
_FAMILIES = (
    NamedOptimizer("adamw", AdamW),
    NamedOptimizer("lion", Lion, lr=0.1, decay=10.0),
    NamedOptimizer("sgd", partial(SGD, lr=1e-3, momentum=0.9), _SGD.lr, _SGD.decay),
    NamedOptimizer("muon", partial(Muon, adjust_lr_fn="match_rms_adamw")),
    NamedOptimizer("adafactor", Adafactor, lr=10.0, decay=0.1),
)

OPTIMIZERS: dict[str, NamedOptimizer] = {
    "adamw": NamedOptimizer("adamw", partial(torch.optim.AdamW, fused=True)),
    "sgd": _SGD,
    **{
        f"{row.family}{bits}bit": NamedOptimizer(row.family, partial(row.make, bits=bits), row.lr, row.decay)
        for row in _FAMILIES
        for bits in (32, 16, 8, 4)
    },
}


def find_optimizer(name: str) -> NamedOptimizer:
    """The optimizer of that name. Raises ValueError for an unknown name."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"unknown optimizer {name!r}{did_you_mean(name, OPTIMIZERS)}; known are {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]
