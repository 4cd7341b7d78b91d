"""The codes of a weight, made once for all micro-batches of an optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.autograd import in_backward
from lowbit.optim.shards import is_dtensor

if TYPE_CHECKING:
    from lowbit.train.gemms import WeightOperands

__all__ = ["Reuse"]


class Reuse:
    """What a layer remembers of its weight between the micro-batches of a step.

    Codes are kept where the step before had several forwards of the layer, and for as many forwards. So a run without
    accumulation holds none, and steps that no ``torch.optim.Optimizer`` does (which the layer does not see) let none
    grow old. They are dropped as the optimizer has stepped, and made anew for a weight that is another one, or that
    something has written to in place. Weights that are shards outside their forward are never kept whole.
    """

    def __init__(self) -> None:
        self._uses = 0
        self._expected = 0
        self._made: tuple[weakref.ref[Tensor], int, WeightOperands] | None = None

    def step_done(self, weight: Tensor) -> None:
        """The optimizer has stepped."""
        self._expected = 0 if is_dtensor(weight) else self._uses
        self._uses, self._made = 0, None

    def operands(self, weight: Tensor, make: Callable[[], WeightOperands]) -> WeightOperands | None:
        """The operands that are kept of ``weight``, made now if need be; None: they are not kept.

        A forward that a checkpoint recomputes is no use of its own.
        """
        if not torch.is_grad_enabled() or torch._C._functorch.maybe_current_level() is not None:
            return None
        if not in_backward():
            self._uses += 1
        if self._expected < 2 or self._uses > self._expected:
            self._made = None
            return None
        known = self._made
        if known is None or known[0]() is not weight or known[1] != weight._version:
            self._made = known = weakref.ref(weight), weight._version, make()
        return known[2]

    def __deepcopy__(self, memo: Any) -> Reuse:
        return Reuse()

    def __reduce__(self) -> tuple[type[Reuse], tuple[()]]:
        return Reuse, ()
