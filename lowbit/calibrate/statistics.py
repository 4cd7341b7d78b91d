"""What calibration keeps of a layer's inputs: its size does not depend on how many batches were seen."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.dist_utils import exchange_device, processes
from lowbit.observers import Ranges
from lowbit.ops.conv import Window

__all__ = ["NEEDS", "Statistics"]

#: What a method may ask for, from cheap to dear: nothing; E[x^2], E|x| and max|x| of each column; E[x x^T]; and that
#: with the inputs that the unquantized model has.
NEEDS = ("nothing", "squares", "gram", "cross")


class Statistics:
    """Sums over all rows ``x`` [features] that a layer was given; of a convolution rows are patches of all groups.

    ``need``: one of ``NEEDS``; what comes before it in ``NEEDS`` is there too. ``rows``: how many were seen.
    ``ranges``: what static input scales are made of; None where there are none.
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
        """Add rows ``x`` [..., features], or with ``window`` the patches of ``x`` [N, *S, C]; ``plain``: what the
        unquantized model has in their place; ``importance`` [...], or [N, *S']: how often each row counts, in sums of
        products. Ranges are those of ``x`` itself.

        Raises ValueError for NaN and Inf.
        """
        given = x.detach().float()
        x = self._rows(given, window)
        weight = None if importance is None else _factors(importance, x.shape[0])
        counted = x if weight is None else x * weight
        squares = counted.square().sum(0, dtype=torch.float64)
        if not bool(squares.isfinite().all()):
            raise ValueError("an input holds NaN or Inf; look for them in the calibration data, or in the model")
        self.rows += x.shape[0]
        if self.ranges is not None:
            self.ranges.update(given)
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
            before = self._rows(plain.detach().float(), window)
            self._cross.addmm_((before if weight is None else before * weight).t(), counted)

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
    def reduce(several: Iterable[Statistics]) -> None:
        """Make each the sum over the processes of ``torch.distributed``, where there are several of these."""
        if processes() == 1:
            return
        for one in several:
            rows = torch.tensor(one.rows, dtype=torch.int64, device=exchange_device())
            for total in (rows, one._squares, one._magnitude, one._gram, one._cross):
                if total is not None:
                    dist.all_reduce(total)
            if one._largest is not None:
                dist.all_reduce(one._largest, dist.ReduceOp.MAX)
            one.rows = int(rows)
            if one.ranges is not None:
                one.ranges.reduce()


def _factors(importance: Tensor, rows: int) -> Tensor:
    """The square root of how often each of ``rows`` counts: [rows, 1]; all groups of a convolution count the same."""
    found = importance.reshape(-1, 1).sqrt()
    return found.repeat_interleave(rows // max(found.shape[0], 1), 0)
