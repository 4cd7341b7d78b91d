"""Optimizers by name: ``adamw`` and ``sgd`` are torch's; names that end in bits, as ``adamw8bit``, are lowbit's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lowbit.named import did_you_mean
from lowbit.optim.adafactor import Adafactor
from lowbit.optim.adamw import AdamW
from lowbit.optim.lion import Lion
from lowbit.optim.muon import Muon
from lowbit.optim.sgd import SGD

__all__ = ["BY_NAME", "by_name"]

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": AdamW, "lion": Lion, "sgd": partial(SGD, lr=1e-3, momentum=0.9), "muon": Muon, "adafactor": Adafactor,
}  # fmt: skip

#: What makes each of parameters.
BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    **{f"{name}{bits}bit": partial(make, bits=bits) for name, make in _CLASSES.items() for bits in (32, 16, 8, 4)},
}


def by_name(name: str) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer of that name of parameters. Raises ValueError for a name that is none."""
    if name not in BY_NAME:
        raise ValueError(f"unknown optimizer {name!r}{did_you_mean(name, BY_NAME)}; known are {', '.join(BY_NAME)}")
    return BY_NAME[name]
