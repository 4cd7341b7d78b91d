"""In-place writes of models: detect them, undo them for buffers, and run backward despite them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["HeldBuffers", "Unchanged", "Written", "despite_writes", "held_buffers"]

Result = TypeVar("Result")


class Unchanged:
    """True while the tensors of a tree have not been written to since it was created."""

    def __init__(self, tree: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        self.before = [(tensor, tensor.clone() if tensor.is_inference() else tensor._version) for tensor in tensors]

    def __bool__(self) -> bool:
        return all(
            tensor.equal(before) if isinstance(before, Tensor) else tensor._version == before
            for tensor, before in self.before
        )


class HeldBuffers:
    """A snapshot of a model's buffers: the tensors, and copies of their values.

    A forward may write to a buffer or replace it (``self.t = 2 * self.t``).
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._tensors = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
        self._values = {buffer: buffer.clone() for buffer in model.buffers()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers; may be called several times."""
        for current, buffers in self._tensors:
            current.clear()
            current.update(buffers)
        for buffer, values in self._values.items():
            buffer.copy_(values)


@contextmanager
def held_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of ``model`` at the end of a ``with`` block."""
    buffers = HeldBuffers(model)
    try:
        yield
    finally:
        buffers.restore()


class Written(Exception):
    """A block writes to its inputs, so it cannot be computed again."""


def despite_writes(run: Callable[[], Result], otherwise: Callable[[], Result] | None = None) -> Result:
    """``run()``, which computes gradients. If the model overwrites tensors that backward needs, run ``otherwise()``
    (default: ``run`` again) with such tensors copied first.
    """
    try:
        return run()
    except Written:
        pass
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return (otherwise or run)()
