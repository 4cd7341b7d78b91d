"""The part of the training state that one call of a layer reads: random keys, and the histories of delayed scaling."""

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
    """An operand's entries in the State: CRC-32 of its stream, row of ``keys``, row of ``amax`` (None: no history)."""

    stream: int
    key: int
    row: int | None


@dataclass(frozen=True)
class View:
    """The part of the State that one call of a layer reads, in forward and backward.

    Attributes:
        keys: random keys, int64 ``[2, 2]``.
        amax: amax histories, fp32 ``[operands, steps]``.
        pending: fp32 ``[1]`` per operand: largest magnitude in the current step.
        slots: slots of the layer's operands, by role.
        records: whether to record magnitudes; False without gradients, as in evaluation.
    """

    keys: Tensor
    amax: Tensor
    pending: list[Tensor]
    slots: Mapping[str, OperandSlot]
    records: bool

    def quantize(self, x: Tensor, cast: Cast, role: str, factors: Tensor | None = None) -> Quantized:
        """Quantize ``x [rows, cols]``, multiplied by ``factors`` if given, with ``cast``; ``role`` is the operand."""
        slot = self.slots[role]
        drawn = Rounding(self.keys[slot.key], stream=slot.stream)
        if cast.rounding == "eden":
            return corrected(x if factors is None else x * factors, cast.scheme, drawn)
        if cast.rule != "amax":
            return quantized(x, cast, factors)
        rounding = drawn if cast.rounding == "stochastic" else "nearest"
        if slot.row is not None and factors is not None:
            x, factors = x * factors, None  # the history has the amax of the product
        scale = None if slot.row is None else self._delayed_scale(x, cast, slot.row)
        return quantize(x, cast.scheme, scale, rounding=rounding, factors=factors)

    def quantize_dual(
        self, x: Tensor, casts: tuple[Cast, Cast], roles: tuple[str, str], block: int | None
    ) -> tuple[Quantized, Quantized]:
        """Quantize ``x`` with both casts, the second after a blockwise transform.

        Both roles must be activations, or both weights, because their random bits share one key.
        """
        slots = [self.slots[role] for role in roles]
        first, second = (
            slot.stream if cast.rounding == "stochastic" else None for cast, slot in zip(casts, slots, strict=True)
        )
        return quantize_both(x, casts[0].scheme, casts[1].scheme, block, self.keys[slots[0].key], (first, second))

    def signs(self, role: str, device: torch.device) -> Tensor:
        """Random signs for both operands of a matmul, from the stream after the gradient's, whose role is ``role``."""
        slot = self.slots[role]
        return random_signs(Rounding(self.keys[slot.key], stream=slot.stream + 1 & 0xFFFFFFFF), device)

    def _delayed_scale(self, x: Tensor, cast: Cast, row: int) -> Tensor:
        """fp32 ``[1, 1]`` from the history, or from ``x`` if the history is empty; NaN if ``x`` is not finite.

        As docs/numerics.md section 5, except for the source of the amax. Non-finite magnitudes are not recorded.
        Recording keeps the maximum, so recording a tensor twice changes nothing.
        """
        empty = torch.zeros((), device=x.device)
        now = torch.linalg.vector_norm(x.detach(), torch.inf).float() if x.numel() else empty
        if self.records:
            record = record_ if torch.compiler.is_compiling() or transformed() else record_eagerly
            pending = self.pending[row]
            record(pending, now.to(pending.device))
        past = self.amax[row, : cast.history].max()
        amax = torch.where(past > 0, past, now)
        scale = amax / torch.full_like(amax, cast.scheme.amax_divisor)
        scale = scale.clamp(min=2.0**-126).where(amax > 0, cast.scheme.zero_scale)
        return scale.where(now.isfinite(), torch.nan).reshape(1, 1)
