"""What functions on tensors share: where random bits come from, and derivatives that there are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.backends import registry
from lowbit.rounding import Rounding

#: Seed, step, stream, offset and pitch of what draws no random bits.
NO_RANDOM_BITS = (0, 0, 0, 0, None)
_NEAREST = ("nearest", *NO_RANDOM_BITS)


def random_bits(
    rounding: str | Rounding, seed: int | None, step: int, stream: int | str, offset: int, pitch: int | None
) -> tuple[Any, ...]:
    """What ops take for rounding: its name, then seed, step, stream, offset and pitch.

    Stochastic rounding without a seed draws one from torch's generator.
    """
    if rounding == "nearest":
        return _NEAREST
    if isinstance(rounding, Rounding):
        if (seed, step, stream, offset, pitch) != (None, *NO_RANDOM_BITS[1:]):
            raise ValueError(
                f"rounding={rounding} has seed, step, stream, offset and pitch; leave these arguments out beside it"
            )
        return "stochastic", *rounding.words()
    if rounding != "stochastic":
        return rounding, *NO_RANDOM_BITS
    if seed is None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "stochastic rounding inside torch.compile needs seed= (and step=): a compiled call draws none"
            )
        asking = registry.asking()  # ``explain`` leaves the generator alone
        seed = 0 if asking else int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    return rounding, *Rounding(seed, step, stream, offset, pitch).words()


def refuse_tangents(op: str, *arguments: Any) -> None:
    """Forward-mode derivatives (torch.func.jvp, dual numbers) would be lost without a word."""
    if getattr(forward_ad, "_current_level", -1) < 0 or torch.compiler.is_compiling():
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in arguments):
        raise NotImplementedError(f"{op} has no forward-mode derivative; use reverse mode, for instance torch.func.vjp")


def refuse_grad_of_out(op: str, inputs: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        raise RuntimeError(
            f"{op}: out= does not support automatic differentiation, but an argument requires grad; "
            "leave out= away, or work under torch.no_grad()"
        )
