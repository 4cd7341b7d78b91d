"""Reuse: caches the codes of a weight for all micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowbit.autograd import in_backward, transformed
from lowbit.torch_private import is_fake, without_modes

if TYPE_CHECKING:
    from lowbit.train.gemms import WeightOperands

__all__ = ["Reuse"]

#: Number of rows and columns of a weight that are compared to detect writes.
_SAMPLED = 16


class Reuse:
    """Cache of a layer's quantized weight between the micro-batches of a step.

    Codes are cached if the previous step had several forwards of the layer, and for as many forwards. So a run without
    accumulation caches nothing, and updates by code that is no ``torch.optim.Optimizer``, which the layer cannot
    notice, do not leave stale codes. The cache is dropped when the optimizer steps, and rebuilt if the weight was
    replaced or changed.

    Writes to ``weight.data`` do not change a tensor's version. On the CPU a sample of the values detects them. On other
    devices set ``allowed`` to False if code writes that way between micro-batches. Weights that are sharded outside
    their forward are never cached.
    """

    def __init__(self, allowed: bool = True) -> None:
        self.allowed = allowed
        self._uses = 0
        self._expected = 0
        self._entry: _Entry | None = None

    def step_done(self, sharded: bool) -> None:
        """Called after an optimizer step. If several optimizers step, the layer's forwards were before the first."""
        self._expected = 0 if sharded else self._uses or self._expected
        self._uses, self._entry = 0, None

    def operands(self, weight: Tensor, make: Callable[[], WeightOperands]) -> WeightOperands | None:
        """The cached operands of ``weight``, computed if needed; None if they are not cached.

        A checkpoint's recomputation does not count as a forward.
        """
        if not self.allowed or not torch.is_grad_enabled() or transformed():
            return None
        if not in_backward():
            self._uses += 1
        if self._expected < 2 or self._uses > self._expected:
            self._entry = None
            return None
        # A selective checkpoint counts ops, and would see these in only one of its two passes.
        with without_modes():
            if self._entry is None or not self._entry.is_of(weight):
                self._entry = _Entry.of(weight, make())
        return self._entry.operands

    def __deepcopy__(self, memo: Any) -> Reuse:
        return Reuse(self.allowed)

    def __reduce__(self) -> tuple[type[Reuse], tuple[bool]]:
        return Reuse, (self.allowed,)


class _Entry(NamedTuple):
    """Operands with the identity of their weight: id, version, address, and a sample of its values.

    A view of a parameter, as nn.MultiheadAttention makes one per projection, is another tensor in each forward. Its
    parameter has the id, and its address says which part of it the view is.
    """

    weight: int
    version: int
    address: int
    sample: Tensor | None
    operands: WeightOperands

    @classmethod
    def of(cls, weight: Tensor, operands: WeightOperands) -> _Entry:
        return cls(_owner(weight), weight._version, _address(weight), _sample(weight), operands)

    def is_of(self, weight: Tensor) -> bool:
        same = (self.weight, self.version, self.address) == (_owner(weight), weight._version, _address(weight))
        now = _sample(weight) if same else None
        return same and (now is None or (self.sample is not None and torch.equal(now, self.sample)))


def _owner(weight: Tensor) -> int:
    """The id of the weight, or of the tensor that it is a view of."""
    return id(weight if weight._base is None else weight._base)


def _address(weight: Tensor) -> int:
    """Address of the weight's first element; 0 if it has no storage."""
    return 0 if is_fake(weight) else weight.data_ptr()


def _sample(weight: Tensor) -> Tensor | None:
    """A grid of values of the weight. None on devices that reading would synchronize, and for fake weights."""
    if weight.device.type != "cpu" or is_fake(weight):
        return None
    rows, cols = (max(1, extent // _SAMPLED) for extent in weight.shape)
    return weight.detach()[::rows, ::cols].clone()
