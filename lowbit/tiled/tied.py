"""The gradient of a weight that embeddings share with a last layer: one tensor, into which each use adds its part.

By autograd alone the gradient of the embedding, that of the last layer and their sum, each as large as the weight, may
be alive together. Here the first of them is the sum, and rows are added to it block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowbit.torch_private import graph_task, is_fake

__all__ = ["Lookups", "Tie", "can_share"]

#: Blocks of a weight to which rows are added one after another. What they need beside the weight's gradient is a block.
_BLOCKS = 32


class Tie:
    """The uses of ``weight`` ``[rows, features]`` in one graph, which share its gradient.

    In backward each use adds its part to one sum and gives autograd nothing. ``token`` is an input of all of them, so
    that autograd asks for its gradient after the last of them; the sum is handed to ``weight`` then. Parts are added
    in the order in which autograd adds them, and no bit differs from its sum of them.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.sum = weight, _Sum()
        self.token: Tensor = _End.apply(weight, self.sum)  # type: ignore[no-untyped-call]

    def serves(self, weight: Tensor) -> bool:
        """Whether another forward may use it: backward has not begun, and the weight has not moved."""
        here = self.token.device == weight.device and self.token.dtype == weight.dtype
        return self.weight is weight and here and not self.sum.begun

    def matrix(self) -> Tensor:
        """The weight, for a use whose backward makes a new tensor as its gradient."""
        return _Matrix.apply(self.weight, self.token, self)  # type: ignore[no-any-return,no-untyped-call]

    def lookup(self, ids: Tensor, padding_idx: int | None, by_frequency: bool) -> Tensor:
        """``F.embedding(ids, weight, padding_idx, scale_grad_by_freq=by_frequency)``."""
        return _Lookup.apply(  # type: ignore[no-any-return,no-untyped-call]
            self.weight, self.token, ids, padding_idx, by_frequency, self
        )


class Lookups(TorchFunctionMode):
    """Within it, an embedding from ``weight`` is a lookup of the Tie that ``tie()`` answers with.

    Embeddings with ``max_norm``, which write into the weight, and sparse ones stay as they are.
    """

    def __init__(self, weight: Tensor, tie: Callable[[], Tie]) -> None:
        super().__init__()
        self.weight, self.tie = weight, tie

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._embedding if func is nn.functional.embedding else func
        return run(*args, **(kwargs or {}))

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        """With the parameters of ``F.embedding``."""
        if weight is not self.weight or max_norm is not None or sparse:
            return nn.functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return self.tie().lookup(input, padding_idx, scale_grad_by_freq)


def can_share(weight: Tensor) -> bool:
    """Whether uses of ``weight`` that come now give it a gradient, and a plain one in its own dtype."""
    if torch.compiler.is_compiling() or not (weight.requires_grad and torch.is_grad_enabled()):
        return False
    plain = type(weight) in (Tensor, nn.Parameter) or is_fake(weight)
    return plain and (not weight.is_leaf or weight.grad_dtype in (None, weight.dtype))


class _Sum:
    """The sum of one backward pass. What an interrupted one has left is not of the next."""

    def __init__(self) -> None:
        self.begun, self._task = False, -1
        self._total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add what nothing else holds."""
        total = self._opened()
        self._total = gradient if total is None else total.add_(gradient)

    def add_rows(self, weight: Tensor, ids: Tensor, gradient: Tensor, padding_idx: int, by_frequency: bool) -> None:
        """Add the gradient of a lookup, ``gradient`` ``[..., features]`` of ``ids`` ``[...]``."""
        total = self._opened()
        if total is None:
            self._total = torch.ops.aten.embedding_dense_backward(gradient, ids, len(weight), padding_idx, by_frequency)
        else:
            _add_rows_(total, ids, gradient.contiguous(), padding_idx, by_frequency)

    def take(self) -> Tensor | None:
        total, self._total = self._opened(), None
        return total

    def _opened(self) -> Tensor | None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "memory.fuse_loss_: the gradient of an embedding that shares its weight with the last layer has no "
                "gradient of its own, and backward was called with create_graph=True; call "
                "lowbit.memory.unfuse_loss_(model)"
            )
        task = graph_task()
        if task != self._task:
            self._task, self._total = task, None
        self.begun = True
        return self._total


def _add_rows_(total: Tensor, ids: Tensor, gradient: Tensor, padding_idx: int, by_frequency: bool) -> None:
    """Add to blocks of ``total`` those of the dense gradient, by the kernel that makes it as a whole."""
    step = -(-len(total) // _BLOCKS)
    for start in range(0, len(total), step):
        block = total[start : start + step]
        count = len(block)
        inside = (ids >= start) & (ids < start + count) & (ids != padding_idx)
        place = torch.where(inside, ids - start, count)  # as padding, others are left out
        block += torch.ops.aten.embedding_dense_backward(gradient, place, count + 1, count, by_frequency)[:count]


# -- nodes of the graph ------------------------------------------------------------------------------------------------
class _End(torch.autograd.Function):
    """Makes the token. Its backward comes after those of all uses."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Sum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sum = total
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.sum.take(), None


class _Matrix(torch.autograd.Function):
    """The weight itself. That it depends on the weight, too, shows what looks at views that it is the parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, token: Tensor, tie: Tie) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tie = tie
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        if grad is not None:
            ctx.tie.sum.add(grad)
        return None, None, None


class _Lookup(torch.autograd.Function):
    """Saves what ``F.embedding`` saves, so that a checkpoint may have either in its place."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, token: Tensor, ids: Tensor, padding_idx: int | None, by_frequency: bool, tie: Tie
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        padding = -1 if padding_idx is None else padding_idx % len(weight)
        ctx.options, ctx.tie = (padding, by_frequency), tie
        return nn.functional.embedding(ids, weight, padding_idx, scale_grad_by_freq=by_frequency)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        if grad is not None:
            ctx.tie.sum.add_rows(ctx.tie.weight, *ctx.saved_tensors, grad, *ctx.options)
        return (None,) * 6
