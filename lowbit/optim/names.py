"""Table of optimizers by name: ``adamw`` and ``sgd`` are torch's, names with a bit width (``adamw8bit``) lowbit's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lowbit.name_tables import did_you_mean
from lowbit.optim.adafactor import Adafactor
from lowbit.optim.adamw import AdamW
from lowbit.optim.apollo import Apollo
from lowbit.optim.galore import GaLore
from lowbit.optim.lion import Lion
from lowbit.optim.muon import Muon
from lowbit.optim.sgd import SGD

__all__ = ["FAMILIES", "OPTIMIZERS", "NamedOptimizer", "find_optimizer", "with_masters"]


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer, and its usual settings relative to AdamW's."""

    family: str
    """Name without bit width: ``adamw`` for ``adamw8bit``."""
    make: Callable[..., torch.optim.Optimizer]
    """``make(params, **settings)`` takes the settings of the optimizer's class."""
    lr: float = 1.0
    """Learning rate relative to AdamW's."""
    decay: float = 1.0
    """Weight decay relative to AdamW's. ``lr * decay`` is 1, so weights shrink as fast as with AdamW."""


_SGD = NamedOptimizer("sgd", partial(torch.optim.SGD, lr=1e-3, momentum=0.9), lr=10.0, decay=0.1)

#: lowbit's optimizers, each for all bit widths. Muon needs ``match_rms_adamw`` to use AdamW's learning rate.
FAMILIES = (
    NamedOptimizer("adamw", AdamW),
    NamedOptimizer("lion", Lion, lr=0.1, decay=10.0),
    NamedOptimizer("sgd", partial(SGD, lr=1e-3, momentum=0.9), _SGD.lr, _SGD.decay),
    NamedOptimizer("muon", partial(Muon, adjust_lr_fn="match_rms_adamw")),
    NamedOptimizer("adafactor", Adafactor, lr=10.0, decay=0.1),
    NamedOptimizer("galore", GaLore),
    NamedOptimizer("apollo", Apollo),
    NamedOptimizer("apollomini", partial(Apollo, rank=1)),
)

OPTIMIZERS: dict[str, NamedOptimizer] = {
    "adamw": NamedOptimizer("adamw", partial(torch.optim.AdamW, fused=True)),
    "sgd": _SGD,
    **{
        f"{row.family}{bits}bit": NamedOptimizer(row.family, partial(row.make, bits=bits), row.lr, row.decay)
        for row in FAMILIES
        for bits in (32, 16, 8, 4)
    },
}


def find_optimizer(name: str) -> NamedOptimizer:
    """The row of ``OPTIMIZERS`` with this name.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"unknown optimizer {name!r}{did_you_mean(name, OPTIMIZERS)}; known are {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]


def with_masters(name: str, master: str) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that creates this optimizer with masters of 16-bit parameters.

    torch's optimizers have none, so lowbit's optimizer with states in 32 bits replaces them.

    Raises:
        ValueError: The name is unknown.
    """
    row = find_optimizer(name)
    low_bit = name if name.endswith("bit") else f"{row.family}32bit"
    return partial(OPTIMIZERS[low_bit].make, master=master)
