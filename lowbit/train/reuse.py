"""The codes of a weight, made once for all micro-batches of an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowbit.autograd import in_backward, transformed
from lowbit.optim.shards import is_dtensor
from lowbit.torch_private import is_fake, without_modes

if TYPE_CHECKING:
    from lowbit.train.gemms import WeightOperands

__all__ = ["Reuse"]

#: Rows and columns of a weight that are compared.
_SAMPLED = 16


class Reuse:
    """What a layer remembers of its weight between the micro-batches of a step.

    Codes are kept where the step before had several forwards of the layer, and for as many forwards. So a run without
    accumulation holds none, and steps that no ``torch.optim.Optimizer`` does (which the layer does not see) let none
    grow old. They are dropped as the optimizer has stepped, and made again for a weight that is another one or has
    changed. Writes to ``weight.data`` raise no version: on the CPU a sample of the numbers tells, and elsewhere
    ``allowed`` must be False where something writes so between micro-batches. Weights that are shards outside their
    forward are never kept whole.
    """

    def __init__(self, allowed: bool = True) -> None:
        self.allowed = allowed
        self._uses = 0
        self._expected = 0
        self._made: _Made | None = None

    def step_done(self, weight: Tensor) -> None:
        """An optimizer has stepped; of several that step in turn, the layer had its forwards before the first."""
        self._expected = 0 if is_dtensor(weight) else self._uses or self._expected
        self._uses, self._made = 0, None

    def operands(self, weight: Tensor, make: Callable[[], WeightOperands]) -> WeightOperands | None:
        """The operands that are kept of ``weight``, made now if need be; None: they are not kept.

        A forward that a checkpoint recomputes is no use of its own.
        """
        if not self.allowed or not torch.is_grad_enabled() or transformed():
            return None
        if not in_backward():
            self._uses += 1
        if self._expected < 2 or self._uses > self._expected:
            self._made = None
            return None
        # A selective checkpoint counts the ops that it sees, and would see these in one of its two passes alone.
        with without_modes():
            if self._made is None or not self._made.is_of(weight):
                self._made = _Made.of(weight, make())
        return self._made.operands

    def __deepcopy__(self, memo: Any) -> Reuse:
        return Reuse(self.allowed)

    def __reduce__(self) -> tuple[type[Reuse], tuple[bool]]:
        return Reuse, (self.allowed,)


class _Made(NamedTuple):
    """Operands, and the weight that they were made of: its id, where its numbers are, and some of them."""

    weight: int
    version: int
    place: int
    sample: Tensor | None
    operands: WeightOperands

    @classmethod
    def of(cls, weight: Tensor, operands: WeightOperands) -> _Made:
        return cls(id(weight), weight._version, _place(weight), _sample(weight), operands)

    def is_of(self, weight: Tensor) -> bool:
        same = (self.weight, self.version, self.place) == (id(weight), weight._version, _place(weight))
        now = _sample(weight) if same else None
        return same and (now is None or (self.sample is not None and torch.equal(now, self.sample)))


def _place(weight: Tensor) -> int:
    """The address of its numbers; 0 where it has none."""
    return 0 if is_fake(weight) else weight.data_ptr()


def _sample(weight: Tensor) -> Tensor | None:
    """Numbers from all over the matrix; None on another device than the CPU, where looking would wait for it, and of
    weights without numbers.
    """
    if weight.device.type != "cpu" or is_fake(weight):
        return None
    rows, cols = (max(1, extent // _SAMPLED) for extent in weight.shape)
    return weight.detach()[::rows, ::cols].clone()
