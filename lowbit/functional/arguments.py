"""What functions on tensors share: where random bits come from, and derivatives that there are not."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit.backends import registry

#: Seed, step, stream, offset and pitch of what draws no random bits.
NO_RANDOM_BITS = (0, 0, 0, 0, None)


def random_bits(
    rounding: str, seed: int | None, step: int, stream: int | str, offset: int, pitch: int | None
) -> tuple[Any, ...]:
    """What ops take for rounding; without a seed, stochastic rounding draws one from torch's generator."""
    if rounding != "stochastic":
        return NO_RANDOM_BITS
    if seed is None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "stochastic rounding inside torch.compile needs seed= (and step=): a compiled call draws none"
            )
        asking = registry.asking()  # ``explain`` leaves the generator alone
        seed = 0 if asking else int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    words = crc32(stream.encode()) if isinstance(stream, str) else stream
    return (
        _word("seed", seed, 64), _word("step", step, 32), _word("stream", words, 32), _word("offset", offset, 64),
        None if pitch is None else _word("pitch", pitch, 64),
    )  # fmt: skip


def refuse_tangents(op: str, *arguments: Any) -> None:
    """Forward-mode derivatives (torch.func.jvp, dual numbers) would be lost without a word."""
    if getattr(forward_ad, "_current_level", -1) < 0 or torch.compiler.is_compiling():
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in arguments):
        raise NotImplementedError(f"{op} has no forward-mode derivative; use reverse mode, for instance torch.func.vjp")


def _word(name: str, word: int, bits: int) -> int:
    """A word of 32 or 64 bits, signed or not, as the signed 64-bit integer that op schemas carry."""
    if not -(1 << bits - 1) <= word < 1 << bits:
        raise ValueError(f"{name}: expected an integer of {bits} bits, got {word}; take it modulo 2**{bits}")
    return word - (1 << 64) if word >= 1 << 63 else word
