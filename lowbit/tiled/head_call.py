"""``HeadCall``: one call of a last layer, whose logits may or may not be computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.torch_private import before_backward

__all__ = ["REMEDY", "HeadCall", "watched_calls"]

#: The end of error messages.
REMEDY = "call lowbit.memory.unfuse_loss_(model)"


class HeadCall:
    """One call of a last layer.

    Attributes:
        weight: The layer's weight ``[classes, features]``.
        bias: Its bias ``[classes]``, or None.
        dtype: The dtype in which the layer multiplies.
        path: Path of the layer in its model.
        fused: Whether a cross-entropy was computed without logits.
        reader: Name of the first operation that read logits; None if none did.
        before_backward: Functions of gradients, which run when a backward pass reaches the logits or a fused loss.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, path: str = "",
        warn: Callable[[str], object] = lambda name: None,
    ) -> None:  # fmt: skip
        self.weight, self.bias, self.dtype, self.path, self._warn = weight, bias, dtype, path, warn
        self.fused = False
        self.reader: str | None = None
        self.before_backward: list[Callable[[Any], object]] = []
        if _WATCHED.calls is not None:
            self._warn = lambda name: None
            _WATCHED.calls.append(self)

    def read_by(self, name: str) -> None:
        """Record that an operation reads logits. If this is before any fused loss, warn."""
        if self.reader is None:
            self.reader = name
            if not self.fused:
                self._warn(name)

    def reached(self, gradients: Any) -> None:
        """Run ``before_backward``."""
        for run in self.before_backward:
            run(gradients)

    def announced(self, result: Tensor) -> Tensor:
        """Return ``result``, at whose backward ``reached`` runs first."""
        before_backward(result, self.reached)
        return result

    def multiplied(self, hidden: Tensor) -> Tensor:
        """Return the logits of ``hidden``, as the layer does."""
        with self.without_autocast(hidden):
            return self.announced(F.linear(*self.operands(hidden)))

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``hidden``, weight and bias in ``dtype``."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return hidden.to(self.dtype), self.weight.to(self.dtype), bias

    def without_autocast(self, hidden: Tensor) -> AbstractContextManager[Any]:
        """Return a context without autocast, since operands are cast to ``dtype`` explicitly."""
        return torch.autocast(hidden.device.type, enabled=False)


class _Watched(threading.local):
    calls: list[HeadCall] | None = None


_WATCHED = _Watched()


@contextmanager
def watched_calls() -> Iterator[list[HeadCall]]:
    """Context whose value lists the calls of fused last layers. They do not warn."""
    before, _WATCHED.calls = _WATCHED.calls, []
    try:
        yield _WATCHED.calls
    finally:
        _WATCHED.calls = before
