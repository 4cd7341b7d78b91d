"""What one call of one layer sees of the training's state: random bits, and histories of delayed scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.autograd import transformed
from lowbit.functional.dual import quantize_both
from lowbit.functional.quantizers import quantize
from lowbit.recipes import Cast
from lowbit.rounding import Rounding
from lowbit.tensor.quantized import Quantized
from lowbit.train.eden import corrected, random_signs
from lowbit.train.moves import record_, record_eagerly
from lowbit.train.rules import quantized

__all__ = ["OperandSlot", "View"]


class OperandSlot(NamedTuple):
    """What an operand of a layer has in the State: the CRC-32 of its stream, its rows of ``keys`` and of ``amax``."""

    stream: int
    key: int
    row: int | None


@dataclass(frozen=True)
class View:
    """What one call of one layer sees of the State, in its forward and its backward.

    ``records``: whether magnitudes are remembered; not where no gradient is wanted, as in evaluation.
    """

    keys: Tensor
    amax: Tensor
    pending: list[Tensor]
    slots: Mapping[str, OperandSlot]
    records: bool

    def quantize(self, x: Tensor, cast: Cast, role: str, factors: Tensor | None = None) -> Quantized:
        """``x [rows, cols]``, or its product with ``factors``, as ``cast`` says; ``role``: which operand it is."""
        slot = self.slots[role]
        drawn = Rounding(self.keys[slot.key], stream=slot.stream)
        if cast.rounding == "eden":
            return corrected(x if factors is None else x * factors, cast.scheme, drawn)
        if cast.rule != "amax":
            return quantized(x, cast, factors)
        rounding = drawn if cast.rounding == "stochastic" else "nearest"
        if slot.row is not None and factors is not None:
            x, factors = x * factors, None  # whose amax is remembered
        scale = None if slot.row is None else self._delayed_scale(x, cast, slot.row)
        return quantize(x, cast.scheme, scale, rounding=rounding, factors=factors)

    def quantize_dual(
        self, x: Tensor, casts: tuple[Cast, Cast], roles: tuple[str, str], block: int | None
    ) -> tuple[Quantized, Quantized]:
        """``x`` as both casts say, the second after a transform in blocks; all roles are of activations or of weights,
        whose random bits have one key.
        """
        slots = [self.slots[role] for role in roles]
        first, second = (
            slot.stream if cast.rounding == "stochastic" else None for cast, slot in zip(casts, slots, strict=True)
        )
        return quantize_both(x, casts[0].scheme, casts[1].scheme, block, self.keys[slots[0].key], (first, second))

    def signs(self, role: str, device: torch.device) -> Tensor:
        """The random signs of both operands of a product; ``role``: its gradient's, whose next stream they have."""
        slot = self.slots[role]
        return random_signs(Rounding(self.keys[slot.key], stream=slot.stream + 1 & 0xFFFFFFFF), device)

    def _delayed_scale(self, x: Tensor, cast: Cast, row: int) -> Tensor:
        """fp32 ``[1, 1]`` of the history, or of ``x`` while there is none; NaN where ``x`` is not finite.

        By docs/numerics.md section 5 but for where the amax comes from. What is not finite is not remembered, and the
        maximum is kept, so that recording a tensor twice is recording it once.
        """
        empty = torch.zeros((), device=x.device)
        now = torch.linalg.vector_norm(x.detach(), torch.inf).float() if x.numel() else empty
        if self.records:
            record = record_ if torch.compiler.is_compiling() or transformed() else record_eagerly
            held = self.pending[row]
            record(held, now.to(held.device))
        past = self.amax[row, : cast.history].max()
        amax = torch.where(past > 0, past, now)
        scale = amax / torch.full_like(amax, cast.scheme.amax_divisor)
        scale = scale.clamp(min=2.0**-126).where(amax > 0, cast.scheme.zero_scale)
        return scale.where(now.isfinite(), torch.nan).reshape(1, 1)
