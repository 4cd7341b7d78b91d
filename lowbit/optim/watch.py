"""What an optimizer warns of: parameters that do not move, states that are not finite; and counts of ends of codes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lowbit import scaling, user_warnings
from lowbit.functional import decode, unpack
from lowbit.optim.kept import Keeping
from lowbit.optim.shards import local
from lowbit.optim.step import Work

__all__ = ["Watch", "all_finite", "saturation"]

#: Elements of a parameter that are compared before and after a step, and the share that should have moved.
_SAMPLE, _MOVED = 4096, 0.1
#: Moments in floats of at most so many elements are looked at in every step on a CPU, and scales 64 times fewer.
_CHEAP = 4096


class Watch:
    """Warnings of one optimizer, each once a parameter.

    Whether a parameter moves is looked at in steps 1, 10, 100 and so on; whether states are finite in each step on a
    CPU, and in those steps on other devices, where looking waits for the device. Float states of large parameters are
    looked at in those steps too.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._warned: set[tuple[str, str]] = set()

    def looks_at(self, work: Work) -> bool:
        """Whether this step is one after which a parameter's elements are compared with what they were."""
        short = work.param.dtype != torch.float32 and work.group["master"] is None
        return short and _sparse(work) and work.param.numel() > 0

    @contextmanager
    def moving(self, works: Sequence[Work]) -> Iterator[None]:
        """Around the step of parameters: warns where rounding undoes most of it."""
        looked = [work for work in works if self.looks_at(work)]
        before = [(_sample(work.param).clone(), _sample(work.grad)) for work in looked]
        yield
        for work, (were, grad) in zip(looked, before, strict=True):
            asked = grad != 0
            moved = int(((_sample(work.param) != were) & asked).sum())
            if work.group["lr"] and moved < _MOVED * int(asked.sum()):
                self._warn(
                    "still", work.layout.name,
                    f"{self._who}: step {work.step} moved {moved} of {int(asked.sum())} elements looked at of "
                    f"{work.layout.name} in {work.param.dtype}: updates are less than half of its last place; use "
                    "master='residual', 'stochastic' or 'fp32'",
                )  # fmt: skip

    def looks_up_to(self, work: Work) -> int:
        """Moments in floats of at most so many elements are looked at after this step."""
        return (1 << 62) if _sparse(work) else _CHEAP

    def finite(self, work: Work) -> None:
        """After a parameter's step: warns where its gradient made its states Inf or NaN."""
        for name in work.layout.moments:
            scale = f"{name}_scale"
            looked = work.local(scale if scale in work.state else name)
            cheap = looked.device.type == "cpu" and 64 * looked.numel() <= max(work.part.numel, 64 * _CHEAP)
            if (cheap or _sparse(work)) and not all_finite(looked):
                self._warn(
                    "finite", work.layout.name,
                    f"{self._who}: the gradient of {work.layout.name} is Inf or NaN at step {work.step}, or too large "
                    "for its states, which hold NaN from now on; skip such steps (lowbit.train.LossScaler does), or go "
                    "back to a checkpoint",
                )  # fmt: skip
                return

    def finite_joined(self, works: Sequence[Work], moments: Sequence[Tensor]) -> None:
        """The same of parameters that have stepped together, each of which is asked only where one is at fault."""
        looked = works[0].param.device.type == "cpu" or _sparse(works[0])
        if looked and not all(all_finite(moment) for moment in moments):
            for work in works:
                self.finite(work)

    def _warn(self, kind: str, name: str, message: str) -> None:
        if (kind, name) not in self._warned:
            self._warned.add((kind, name))
            user_warnings.warn(message)


def all_finite(x: Tensor) -> bool:
    """A sum, which is one pass, tells of Inf and NaN; where it overflows itself, every element is asked."""
    return math.isfinite(x.sum(dtype=torch.float32)) or bool(torch.isfinite(x).all())


def _sparse(work: Work) -> bool:
    return str(work.step).strip("0") == "1"


def _sample(x: Tensor) -> Tensor:
    """At most about 4096 elements of a tensor, evenly chosen."""
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def saturation(optimizer: Keeping) -> dict[str, dict[str, float]]:
    """Of each parameter's quantized states, the share of codes whose magnitude is the largest of their format.

    A block's largest element always has that code. Where much more have it, the states are too coarse: give the
    parameter's group more ``bits``. The keys are names of parameters, then of states, such as ``"exp_avg"``.
    """
    found: dict[str, dict[str, float]] = {}
    for name, param, moments in optimizer.kept():
        shares = {}
        for moment, kept in moments.items():
            if kept.dtype is not None or moment not in optimizer.state[param]:
                continue
            format = scaling.scheme(kept.kind).format
            stored = local(optimizer.state[param][moment]).reshape(1, -1)
            codes = unpack(stored, format.bits, (1, stored.numel() * 8 // format.bits))
            shares[moment] = float((decode(codes, format).abs() == format.max).double().mean())
        if shares:
            found[name] = shares
    return found
