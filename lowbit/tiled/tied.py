"""The shared gradient of a weight that embeddings and the last layer use: each use adds its part to one tensor.

With autograd alone, the gradient of the embedding, that of the last layer and their sum may exist at once, each as
large as the weight. Here the first gradient becomes the sum, and rows are added to it block by block.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowbit.torch_private import graph_task, is_fake

__all__ = ["Lookups", "Tie", "Ties", "can_share"]

#: Number of row blocks that are added one after another. Temporary memory is one block.
_BLOCKS = 32


class Tie:
    """The uses of ``weight`` ``[rows, features]`` in one graph, which share its gradient.

    In backward each use adds its part to one sum and returns no gradient to autograd. ``token`` is an input of every
    use, so autograd requests its gradient after the last use. The sum is then passed to ``weight``. Parts are added in
    the order of autograd, so the sum is bit-identical to autograd's.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.sum = weight, _Sum()
        self.token: Tensor = _End.apply(weight, self.sum)  # type: ignore[no-untyped-call]

    def serves(self, weight: Tensor) -> bool:
        """Return whether another forward may use it: backward has not begun, and dtype and device are the same."""
        matches = self.token.device == weight.device and self.token.dtype == weight.dtype
        return self.weight is weight and matches and not self.sum.begun

    def matrix(self) -> Tensor:
        """Return the weight for a use whose backward creates a new tensor as its gradient."""
        return _Matrix.apply(self.weight, self.token, self)  # type: ignore[no-any-return,no-untyped-call]

    def lookup(self, ids: Tensor, padding_idx: int | None, by_frequency: bool) -> Tensor:
        """``F.embedding(ids, weight, padding_idx, scale_grad_by_freq=by_frequency)``."""
        return _Lookup.apply(  # type: ignore[no-any-return,no-untyped-call]
            self.weight, self.token, ids, padding_idx, by_frequency, self
        )


class Ties(threading.local):
    """The tie of a weight in each thread. Forwards share it until backward begins."""

    def __init__(self) -> None:
        self._last: Callable[[], Tie | None] = lambda: None

    def __reduce__(self) -> Any:
        return Ties, ()

    @overload
    def of(self, weight: Tensor) -> Tie: ...
    @overload
    def of(self, weight: Tensor, create: bool) -> Tie | None: ...
    def of(self, weight: Tensor, create: bool = True) -> Tie | None:
        """Return the tie of ``weight``. If there is none, return a new one, or None without ``create``."""
        tie = self._last()
        if tie is None or not tie.serves(weight):
            tie = Tie(weight) if create else None
            self._last = self._last if tie is None else weakref.ref(tie)
        return tie


class Lookups(TorchFunctionMode):
    """Context in which embeddings from ``weight`` are lookups of the Tie that ``tie()`` returns.

    Embeddings with ``max_norm``, which write to the weight, and sparse ones are not affected.
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
        """Takes the parameters of ``F.embedding``."""
        if weight is not self.weight or max_norm is not None or sparse:
            return nn.functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return self.tie().lookup(input, padding_idx, scale_grad_by_freq)


def can_share(weight: Tensor) -> bool:
    """Return whether uses of ``weight`` give it a gradient that is a plain tensor in its own dtype."""
    if torch.compiler.is_compiling() or not (weight.requires_grad and torch.is_grad_enabled()):
        return False
    plain = type(weight) in (Tensor, nn.Parameter) or is_fake(weight)
    return plain and (not weight.is_leaf or weight.grad_dtype in (None, weight.dtype))


class _Sum:
    """The sum of one backward pass. The rest of an interrupted pass is dropped."""

    def __init__(self) -> None:
        self.begun, self._task = False, -1
        self._total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient``, which nothing else references."""
        total = self._opened()
        self._total = gradient if total is None else total.add_(gradient)

    def add_rows(self, weight: Tensor, ids: Tensor, gradient: Tensor, padding_idx: int, by_frequency: bool) -> None:
        """Add the gradient of a lookup: ``gradient`` ``[..., features]`` for ``ids`` ``[...]``."""
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
                "memory.fuse_loss_: an embedding that shares its weight with the last layer has no second-order "
                "gradient, and backward was called with create_graph=True; call lowbit.memory.unfuse_loss_(model)"
            )
        task = graph_task()
        if task != self._task:
            self._task, self._total = task, None
        self.begun = True
        return self._total


def _add_rows_(total: Tensor, ids: Tensor, gradient: Tensor, padding_idx: int, by_frequency: bool) -> None:
    """Add the dense gradient of a lookup to ``total``, block by block, with torch's kernel for dense gradients."""
    step = -(-len(total) // _BLOCKS)
    for start in range(0, len(total), step):
        block = total[start : start + step]
        count = len(block)
        inside = (ids >= start) & (ids < start + count) & (ids != padding_idx)
        local_ids = torch.where(inside, ids - start, count)  # ids outside of the block count as padding
        block += torch.ops.aten.embedding_dense_backward(gradient, local_ids, count + 1, count, by_frequency)[:count]


# -- nodes of the graph ------------------------------------------------------------------------------------------------
class _End(torch.autograd.Function):
    """Creates the token. Its backward runs after that of all uses."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Sum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sum = total
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.sum.take(), None


class _Matrix(torch.autograd.Function):
    """Returns a view of the weight, so that code which inspects views finds the parameter."""

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
    """An embedding. It saves the same tensors as ``F.embedding``, so that a checkpoint may replay either."""

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
