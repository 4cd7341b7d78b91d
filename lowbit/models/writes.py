"""Models that write to tensors in place: noticed, and run all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["Unchanged", "Written", "despite_writes"]

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
