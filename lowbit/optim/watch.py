"""Warnings of optimizers (parameters that do not move, states with Inf or NaN), and saturation of quantized states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lowbit import scaling, user_warnings
from lowbit.functional import decode, unpack
from lowbit.optim.interface import StatefulOptimizer
from lowbit.optim.shards import local
from lowbit.optim.step import Work

__all__ = ["Watch", "all_finite", "saturation"]

#: Number of elements that are compared before and after a step, and the fraction of them that should have changed.
_SAMPLE, _MOVED = 4096, 0.1
#: On a CPU, float moments with at most this many elements are checked in every step, and 64 times fewer scales.
_CHEAP = 4096


class Watch:
    """Warnings of one optimizer, each once per parameter.

    Steps 1, 10, 100 and so on check whether parameters move, and all states. On a CPU, every step also checks small
    states and scales; on other devices that would synchronize.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._warned: set[tuple[str, str]] = set()

    def looks_at(self, work: Work) -> bool:
        """Whether this step compares the parameter before and after."""
        short = work.param.dtype != torch.float32 and work.group["master"] is None
        return short and _sparse(work) and work.param.numel() > 0

    @contextmanager
    def moving(self, works: Sequence[Work]) -> Iterator[None]:
        """Around the step of parameters: warn if rounding undoes most of it."""
        watched = [work for work in works if self.looks_at(work)]
        before = [(_sample(work.param).clone(), _sample(work.grad)) for work in watched]
        yield
        for work, (old, grad) in zip(watched, before, strict=True):
            nonzero = grad != 0
            count, moved = int(nonzero.sum()), int(((_sample(work.param) != old) & nonzero).sum())
            if work.group["lr"] and moved < _MOVED * count:
                self._warn(
                    "still", work.layout.name,
                    f"{self._who}: step {work.step} changed {moved} of {count} sampled elements of {work.layout.name} "
                    f"in {work.param.dtype}: most updates are smaller than half an ulp and are rounded away; use "
                    "master='residual', 'stochastic' or 'fp32'",
                )  # fmt: skip

    def looks_up_to(self, work: Work) -> int:
        """The largest number of elements with which a float moment is checked after this step."""
        return (1 << 62) if _sparse(work) else _CHEAP

    def finite(self, work: Work) -> None:
        """After a parameter's step: warn if its gradient made its states Inf or NaN."""
        for name in work.layout.moments:
            scale = f"{name}_scale"
            state = work.local(scale if scale in work.state else name)
            cheap = state.device.type == "cpu" and 64 * state.numel() <= max(work.part.numel, 64 * _CHEAP)
            if (cheap or _sparse(work)) and not all_finite(state):
                self._warn(
                    "finite", work.layout.name,
                    f"{self._who}: the gradient of {work.layout.name} is Inf or NaN at step {work.step}, or too large "
                    "for its states, which stay NaN from now on; skip such steps (lowbit.train.LossScaler does), or go "
                    "back to a checkpoint",
                )  # fmt: skip
                return

    def finite_joined(self, works: Sequence[Work], moments: Sequence[Tensor]) -> None:
        """``finite`` for parameters that stepped together, checked one by one only if a joined moment is not finite."""
        checks = works[0].param.device.type == "cpu" or _sparse(works[0])
        if checks and not all(all_finite(moment) for moment in moments):
            for work in works:
                self.finite(work)

    def _warn(self, kind: str, name: str, message: str) -> None:
        if (kind, name) not in self._warned:
            self._warned.add((kind, name))
            user_warnings.warn(message)


def all_finite(x: Tensor) -> bool:
    """Whether there is no Inf and no NaN. The sum takes one pass; elements are checked only if it is not finite."""
    return math.isfinite(x.sum(dtype=torch.float32)) or bool(torch.isfinite(x).all())


def _sparse(work: Work) -> bool:
    return str(work.step).strip("0") == "1"


def _sample(x: Tensor) -> Tensor:
    """About ``_SAMPLE`` evenly spaced elements of a tensor, or all if it has fewer."""
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def saturation(optimizer: StatefulOptimizer) -> dict[str, dict[str, float]]:
    """The fraction of codes with the largest magnitude of their format, for each quantized state.

    The largest element of a block always has this code. If the fraction is much higher than one per block, the states
    are too coarse: use more ``bits`` in the parameter's group.

    Args:
        optimizer: An optimizer of ``lowbit.optim``.

    Returns:
        Fractions by the name of the parameter and then of the state, such as ``"exp_avg"``.
    """
    fractions: dict[str, dict[str, float]] = {}
    for name, param, storages in optimizer.stored_states():
        shares = {}
        for moment, storage in storages.items():
            if storage.dtype is not None or moment not in optimizer.state[param]:
                continue
            format = scaling.scheme(storage.kind).format
            stored = local(optimizer.state[param][moment]).reshape(1, -1)
            codes = unpack(stored, format.bits, (1, stored.numel() * 8 // format.bits))
            shares[moment] = float((decode(codes, format).abs() == format.max).double().mean())
        if shares:
            fractions[name] = shares
    return fractions
