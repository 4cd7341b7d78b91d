"""InMemory: access to the weights of a model during calibration."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

__all__ = ["InMemory"]


class InMemory:
    """The weights of a model that is in memory. ``out_of_core`` has a subclass that reads them from files."""

    #: Whether the quantized weights of a block are released when the next block begins.
    forgets = False

    def load(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Load all tensors of ``model`` outside of ``blocks``, permanently."""

    def held(self, *modules: nn.Module) -> AbstractContextManager[None]:
        """Load the tensors of ``modules`` in this context."""
        return nullcontext()

    def paged(self, blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Load the tensors of each of ``blocks`` while it is called in this context."""
        return nullcontext()
