"""Where the weights of a model are while it is calibrated."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

__all__ = ["InMemory"]


class InMemory:
    """The weights of a model that holds them all, all the time."""

    #: Whether what was found for one block is let go of when the next one begins.
    forgets = False

    def load(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Take up all tensors of ``model`` outside of ``blocks``, for good."""

    def held(self, *modules: nn.Module) -> AbstractContextManager[None]:
        """Inside, ``modules`` have their tensors."""
        return nullcontext()

    def paged(self, blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Inside, each of ``blocks`` has its tensors while it is called."""
        return nullcontext()
