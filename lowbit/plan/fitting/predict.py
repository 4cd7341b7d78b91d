"""What a step of each combination of settings takes: bytes by estimates, seconds by a roofline.

An estimate of every combination and every size of part would take minutes. Forward and backward hold the same beside
the states of any optimizer, and grow linearly with the rows of a part. So few estimates give all; what is chosen is
estimated as a whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit.memory import Estimate, estimate, micro_batches
from lowbit.memory.accumulate import samples
from lowbit.memory.offload.bandwidth import bandwidth
from lowbit.optim.offload import TOGETHER
from lowbit.plan.fitting.run import accumulate
from lowbit.plan.settings import Settings, make_optimizer, prepare_model_

__all__ = ["Prediction", "Predictor"]


class Prediction(NamedTuple):
    """``peak_bytes`` and ``seconds`` of a step by ``settings``. ``whole``: by an estimate of this very step."""

    settings: Settings
    peak_bytes: int
    seconds: float
    moment: str = ""
    whole: bool = False


class _Part(NamedTuple):
    """Forward and backward of one part: bytes, and seconds."""

    peak: int
    seconds: float


class _Step(NamedTuple):
    """An optimizer's step: the bytes of its states, the most that is held, and seconds."""

    states: int
    peak: int
    seconds: float


@dataclass
class Predictor:
    """Predictions for one model, batch and loss."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None

    def __post_init__(self) -> None:
        self.rows = samples(self.batch)
        self._weights = sum(p.nbytes for p in self.model.parameters())
        self._parts: dict[Settings, list[tuple[int, int, _Part]]] = {}
        self._steps: dict[Settings, _Step] = {}

    def parts(self) -> list[int]:
        """The numbers of parts that a batch may be taken in: powers of two."""
        return [1 << k for k in range(self.rows.bit_length()) if 1 << k <= self.rows]

    def predicted(self, settings: Settings) -> Prediction:
        """By sums of what is known of its parts."""
        part, step = self._part(settings), self._step(settings)
        states = 0 if settings.offload_states else step.states
        seconds = settings.micro * part.seconds + step.seconds + self._moved(settings, step.states)
        return Prediction(settings, max(part.peak + states, self._stepping(settings)), seconds)

    def whole(self, settings: Settings) -> Prediction:
        """By an estimate of the step itself; of states that lie elsewhere by sums."""
        found = self.predicted(settings)
        if settings.offload_states:
            part = self._estimated(settings, settings.micro, None)
            peak = max(part.peak_bytes, self._stepping(settings))
            return found._replace(peak_bytes=peak, moment=str(part.moment), whole=True)
        usage = self._estimated(settings, settings.micro, settings)
        return found._replace(peak_bytes=usage.peak_bytes, moment=str(usage.moment), whole=True)

    def _stepping(self, settings: Settings) -> int:
        """The most that is held while the optimizer steps; states that lie elsewhere come a few at a time."""
        step = self._step(settings)
        if not settings.offload_states:
            return step.peak
        there = min(1.0, 2 * TOGETHER / max(self._weights, 1))
        return step.peak - step.states + int(there * step.states)

    def _moved(self, settings: Settings, states: int) -> float:
        if not settings.offload_states:
            return 0.0
        device = next(self.model.parameters()).device
        at = bandwidth("cpu" if device.type == "cuda" else tempfile.gettempdir())
        return states * (1 / at.read + 1 / at.write)

    def _part(self, settings: Settings) -> _Part:
        """Of one part of so many; three are estimated, others are on the line of the last two."""
        key = replace(settings, bits=32, offload_states=False, micro=1)
        if key not in self._parts:
            counts = [count for count in (1, 2, 4) if count <= self.rows]
            self._parts[key] = [(count, -(-self.rows // count), self._measured(key, count)) for count in counts]
        known = self._parts[key]
        for count, _, part in known:
            if count == settings.micro:
                return part
        (_, more, large), (_, less, small) = known[-2:]
        rows = -(-self.rows // settings.micro)
        slope = (rows - less) / max(more - less, 1)
        return _Part(
            int(small.peak + slope * (large.peak - small.peak)),
            max(small.seconds + slope * (large.seconds - small.seconds), 0.0),
        )

    def _measured(self, settings: Settings, count: int) -> _Part:
        usage = self._estimated(settings, count, None)
        return _Part(usage.peak_bytes, usage.seconds / min(count, 2))

    def _step(self, settings: Settings) -> _Step:
        key = Settings(mixed=settings.mixed, bits=settings.bits)
        if key not in self._steps:
            usage = self._estimated(key, self.rows, key)
            kinds: dict[str, int] = {}
            for holding in usage.held_at(0):
                kinds[holding.kind] = kinds.get(holding.kind, 0) + holding.bytes
            states = kinds.get("optimizer state", 0) + kinds.get("master copies", 0)
            self._steps[key] = _Step(states, usage.by_phase.get("step", 0), usage.seconds_by_phase.get("step", 0.0))
        return self._steps[key]

    def _estimated(self, settings: Settings, count: int, optimizer: Settings | None) -> Estimate:
        """Of a step in ``count`` parts, of which two show what all take."""
        *_, (largest, _) = micro_batches(self.batch, count)
        return estimate(
            self.model, largest, self.loss,
            optimizer=None if optimizer is None else lambda params: make_optimizer(params, settings),
            prepare=lambda model: prepare_model_(model, settings), micro_batches=min(count, 2),
            accumulate=accumulate,
        )  # fmt: skip
