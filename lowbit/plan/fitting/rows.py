"""Counts the rows of a batch, and warns of a forward with more rows than planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.models.batches import arguments
from lowbit.torch_private import FakeTensor
from lowbit.train.micro_batches import samples
from lowbit.user_warnings import warn

__all__ = ["RowWatch", "Rows", "rows_of"]


class Rows(NamedTuple):
    """The number of rows of a batch, and the keyword of the argument with them; None: forward's first tensor."""

    number: int
    keyword: str | None = None


def rows_of(model: nn.Module, batch: Any, rest: bool) -> Rows | None:
    """Return the rows of ``batch`` that forward receives; None if no tensor argument has them.

    Args:
        model: The model, which is not called.
        batch: Batch, as for ``call``.
        rest: Whether the batch may contain more than forward accepts.
    """
    positional, named = arguments(model, batch, rest=rest)
    try:
        count = samples(batch)
    except ValueError:
        return None
    if _rows(positional) == count:
        return Rows(count)
    keyword = next((name for name, value in named.items() if _rows(value) == count), None)
    return None if keyword is None else Rows(count, keyword)


def _rows(value: Any) -> int | None:
    """Return the first dimension of the first tensor that has one."""
    return next((len(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()), None)


class RowWatch:
    """A forward pre-hook that warns once of a training forward with more rows than planned.

    It holds no reference to a model, so that models can be freed.
    """

    def __init__(self, planned: Rows | None, parts: int) -> None:
        self.planned, self.parts = planned, parts
        self._allowed, self._has_warned = 0, False

    @contextmanager
    def allowing(self, batch: Any) -> Iterator[None]:
        """In this context, accept as many rows as ``batch`` has, because its caller was already warned."""
        before, self._allowed = self._allowed, _rows(dict(batch) if hasattr(batch, "keys") else batch) or 0
        try:
            yield
        finally:
            self._allowed = before

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.planned is None or self._has_warned:
            return
        if not (module.training and torch.is_grad_enabled()):
            return
        values = (kwargs.get(self.planned.keyword or ""), args, kwargs)
        if any(
            isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in tree_leaves(values) if isinstance(leaf, Tensor)
        ):
            return  # an estimate
        rows = next(filter(None, map(_rows, values)), 0)
        most = -(-self.planned.number // self.parts)
        if rows <= max(most, self._allowed):
            return
        self._has_warned = True
        if self.parts == 1:
            warn(
                f"plan.apply_: a forward of {type(module).__name__} got {rows} rows, but the plan is for a batch of "
                f"{most}; a step may need more memory than predicted; plan with the largest batch"
            )
            return
        warn(
            f"plan.apply_: a forward of {type(module).__name__} got {rows} rows, but the plan is for "
            f"{self.parts} micro-batches of at most {most} rows; a step may need more memory than predicted; write "
            f"'for part, weight in run.parts(batch): (loss(model(part)) * weight).backward()', or call "
            f"run.step(batch)"
        )
