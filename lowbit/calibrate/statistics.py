"""Statistics of a layer's inputs, whose size does not depend on the number of batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.dist_utils import exchange_device, processes
from lowbit.observers import Ranges
from lowbit.ops.conv import Window

__all__ = ["NEEDS", "Statistics"]

#: The levels of statistics, from cheap to expensive: nothing; E[x^2], E|x| and max|x| of each column; E[x x^T]; and
#: E[p x^T] with the inputs p of the unquantized model.
NEEDS = ("nothing", "squares", "gram", "cross")


class Statistics:
    """Sums over all input rows ``x`` [features] of a layer. The rows of a convolution are patches of all groups.

    Attributes:
        need: One of ``NEEDS``, which includes the levels before it.
        rows: The number of rows so far.
        ranges: Ranges for static input scales; None without.
    """

    def __init__(
        self, features: int, need: str, device: torch.device | str = "cpu", ranges: Ranges | None = None
    ) -> None:
        level = NEEDS.index(need)
        self.need, self.rows, self.ranges = need, 0, ranges
        self._squares = torch.zeros(features, dtype=torch.float64, device=device) if level >= 1 else None
        self._magnitude = torch.zeros_like(self._squares) if self._squares is not None else None
        self._largest = torch.zeros(features, device=device) if level >= 1 else None
        self._gram = torch.zeros(features, features, device=device) if level >= 2 else None
        self._cross = torch.zeros(features, features, device=device) if level >= 3 else None

    def update(
        self,
        x: Tensor,
        plain: Tensor | None = None,
        importance: Tensor | None = None,
        window: Window | None = None,
    ) -> None:
        """Add rows.

        Args:
            x: The rows [..., features], or with ``window`` the input [N, *S, C] of a convolution.
            plain: The same rows in the unquantized model.
            importance: Weights of the rows in the sums of products, [...] or [N, *S']. Ranges do not use them.
            window: The window of a convolution.

        Raises:
            ValueError: ``x`` has NaN or Inf.
        """
        input = x.detach().float()
        x = self._rows(input, window)
        weight = None if importance is None else _factors(importance, x.shape[0])
        counted = x if weight is None else x * weight
        squares = counted.square().sum(0, dtype=torch.float64)
        if not bool(squares.isfinite().all()):
            raise ValueError("an input has NaN or Inf; look for them in the calibration data, or in the model")
        self.rows += x.shape[0]
        if self.ranges is not None:
            self.ranges.update(input)
        if self._squares is not None and self._magnitude is not None and self._largest is not None:
            self._squares += squares
            magnitude = x.abs()
            self._magnitude += magnitude.sum(0, dtype=torch.float64)
            if x.shape[0]:
                self._largest = torch.maximum(self._largest, magnitude.amax(0))
        if self._gram is not None:
            self._gram.addmm_(counted.t(), counted)
        if self._cross is not None:
            assert plain is not None
            p = self._rows(plain.detach().float(), window)
            self._cross.addmm_((p if weight is None else p * weight).t(), counted)

    def _rows(self, x: Tensor, window: Window | None) -> Tensor:
        if window is not None and self.need != "nothing":
            x = window.unfold(x)
        return x.reshape(-1, x.shape[-1])

    @property
    def squares(self) -> Tensor:
        """E[x^2] of each column, fp32 [features]."""
        assert self._squares is not None
        return (self._squares / max(self.rows, 1)).float()

    @property
    def magnitude(self) -> Tensor:
        """E|x| of each column, fp32 [features]."""
        assert self._magnitude is not None
        return (self._magnitude / max(self.rows, 1)).float()

    @property
    def largest(self) -> Tensor:
        """max|x| of each column, fp32 [features]."""
        assert self._largest is not None
        return self._largest

    @property
    def gram(self) -> Tensor:
        """E[x x^T], fp32 [features, features]."""
        assert self._gram is not None
        return self._gram / max(self.rows, 1)

    @property
    def cross(self) -> Tensor:
        """E[p x^T] with p the inputs of the unquantized model, fp32 [features, features]."""
        assert self._cross is not None
        return self._cross / max(self.rows, 1)

    @staticmethod
    def reduce(items: Iterable[Statistics]) -> None:
        """All-reduce the statistics over the processes of ``torch.distributed``."""
        if processes() == 1:
            return
        for item in items:
            rows = torch.tensor(item.rows, dtype=torch.int64, device=exchange_device())
            for total in (rows, item._squares, item._magnitude, item._gram, item._cross):
                if total is not None:
                    dist.all_reduce(total)
            if item._largest is not None:
                dist.all_reduce(item._largest, dist.ReduceOp.MAX)
            item.rows = int(rows)
            if item.ranges is not None:
                item.ranges.reduce()


def _factors(importance: Tensor, rows: int) -> Tensor:
    """The square roots of the weights of the rows: [rows, 1]. All groups of a convolution have the same weight."""
    roots = importance.reshape(-1, 1).sqrt()
    return roots.repeat_interleave(rows // max(roots.shape[0], 1), 0)
