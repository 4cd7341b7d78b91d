"""Models that write to tensors in place: noticed, and run all the same."""

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
    """Knows of tensors whether they have been written to since."""

    def __init__(self, tree: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        self.before = [(tensor, tensor.clone() if tensor.is_inference() else tensor._version) for tensor in tensors]

    def __bool__(self) -> bool:
        return all(
            tensor.equal(before) if isinstance(before, Tensor) else tensor._version == before
            for tensor, before in self.before
        )


class HeldBuffers:
    """The buffers of a model as they are now: which tensors, and a copy of their numbers.

    A forward may write to a buffer or put another tensor in its place (``self.t = 2 * self.t``).
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._tensors = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
        self._numbers = {buffer: buffer.clone() for buffer in model.buffers()}

    @torch.no_grad()
    def restore(self) -> None:
        """Make the buffers what they were, any number of times."""
        for place, buffers in self._tensors:
            place.clear()
            place.update(buffers)
        for buffer, numbers in self._numbers.items():
            buffer.copy_(numbers)


@contextmanager
def held_buffers(model: nn.Module) -> Iterator[None]:
    """Within, a model may be run without a trace: afterwards its buffers are what they were."""
    held = HeldBuffers(model)
    try:
        yield
    finally:
        held.restore()


class Written(Exception):
    """A block writes to what it is given, so that it cannot be computed a second time."""


def despite_writes(run: Callable[[], Result], otherwise: Callable[[], Result] | None = None) -> Result:
    """``run()``, which takes gradients; where the model writes to tensors that these need, ``otherwise()``, by default
    the same, with such tensors copied first.
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
