"""Checks and conversions of arguments shared by the functions on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.backends import registry
from lowbit.rounding import Rounding

#: The rounding arguments of ops for rounding to nearest, which needs no random bits.
_NEAREST = ("nearest", None, 0, 0, None)


def random_bits(rounding: str | Rounding, x: Tensor) -> tuple[Any, ...]:
    """The rounding arguments of ops: rounding name, ``rng``, stream, offset and pitch.

    Raises:
        TypeError: ``rounding`` has the wrong type, or its seed is neither an integer, a tensor nor None.
    """
    if rounding == "nearest":
        return _NEAREST
    if rounding == "stochastic":
        rounding = Rounding()
    if isinstance(rounding, str):
        return rounding, *_NEAREST[1:]
    if not isinstance(rounding, Rounding):
        raise TypeError(
            f"rounding must be 'nearest', 'stochastic' or a lowbit.Rounding(seed), got {type(rounding).__name__}"
        )
    seed = rounding.seed
    if isinstance(seed, int):
        rng = torch.tensor(rounding.seed_and_step(), device=x.device)
    elif seed is None:
        if not torch.compiler.is_compiling() and registry.asking():  # ``explain`` must not advance the generator
            rng = torch.zeros(2, dtype=torch.int64, device=x.device)
        else:
            rng = torch.randint(-(1 << 63), (1 << 63) - 1, (2,), device=x.device)
    elif isinstance(seed, Tensor):
        rng = seed
    else:
        raise TypeError(
            f"Rounding: a seed is an integer, an int64 tensor [seed, step] or None, got {type(seed).__name__}"
        )
    return "stochastic", rng, *rounding.place()


def refuse_tangents(op: str, *arguments: Any) -> None:
    """Raises NotImplementedError if an argument has a tangent, which would be dropped silently."""
    if getattr(forward_ad, "_current_level", -1) < 0 or torch.compiler.is_compiling():
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in arguments):
        raise NotImplementedError(f"{op} has no forward-mode derivative; use reverse mode, for instance torch.func.vjp")


def refuse_grad_of_out(op: str, inputs: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        raise RuntimeError(
            f"{op}: out= does not support automatic differentiation, but an argument requires grad; "
            "drop out=, or call it under torch.no_grad()"
        )
