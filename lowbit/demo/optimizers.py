"""The optimizers that ``lowbit train`` knows by name, and what their learning rate is beside AdamW's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowbit import optim
from lowbit.named import did_you_mean
from lowbit.optim.shards import local

__all__ = ["OPTIMIZERS", "Named", "find", "state_bytes"]


@dataclass(frozen=True)
class Named:
    """``make(groups, lr=...)``; ``factor`` times the learning rate of AdamW is its own, and ``decay`` times the decay."""

    make: Callable[..., torch.optim.Optimizer]
    factor: float = 1.0
    decay: float = 1.0


#: Each class, and what makes of its name with ``8bit`` or ``4bit`` behind it one with such states.
_CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], float, float]] = {
    "adamw": (partial(optim.AdamW, betas=(0.9, 0.95)), 1.0, 1.0),
    "lion": (partial(optim.Lion, betas=(0.9, 0.98)), 0.1, 10.0),
    "sgd": (partial(optim.SGD, momentum=0.9), 10.0, 0.1),
    "muon": (partial(optim.Muon, adjust_lr_fn="match_rms_adamw", betas=(0.9, 0.95)), 1.0, 1.0),
}

#: ``adamw`` is torch's in fp32; names with a number are lowbit's with states of so many bits.
OPTIMIZERS: dict[str, Named] = {
    "adamw": Named(partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)),
    **{
        f"{name}{bits}bit": Named(partial(make, bits=bits), factor, decay)
        for name, (make, factor, decay) in _CLASSES.items()
        for bits in (32, 16, 8, 4)
    },
}


def find(name: str) -> Named:
    """Raises ValueError for a name that is none."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"unknown optimizer {name!r}{did_you_mean(name, OPTIMIZERS)}; known are {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that an optimizer keeps beside parameters and gradients, in this process."""
    states: Any = optimizer.state.values()
    return sum(local(t).nbytes for state in states for t in state.values() if isinstance(t, torch.Tensor))
