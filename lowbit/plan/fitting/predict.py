"""What a step of each combination of settings takes: bytes by estimates, seconds by the sum of what its ops take here.

An estimate of every combination would take minutes. Forward and backward hold the same beside the states of any
optimizer, grow linearly with the rows of a part, and are the sum of their blocks. So few estimates give all: of each
arithmetic with each uniform policy of checkpoints the whole batch and half of it, and of each optimizer its step.
What is chosen is estimated as a whole.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lowbit.checkpointing.block_table import KEEP, BlockTable, block_table, blocks_of, options_of, parts_of
from lowbit.checkpointing.policies import POLICIES
from lowbit.memory.estimator import Estimate, estimate_step
from lowbit.optim.offload import CHUNK_BYTES, LEAST_BYTES
from lowbit.plan.checkpoints import Option, best, choices_of, peak_of
from lowbit.plan.fitting.adapt import RANDOM_BYTES, copies_of_buffers
from lowbit.plan.fitting.comparison import Comparison, compare, is_mean_of_cross_entropies
from lowbit.plan.fitting.link import DEFAULTS, exchange_seconds
from lowbit.plan.fitting.sharing import Sharing, share_
from lowbit.plan.fitting.streaming import Streaming
from lowbit.plan.settings import (
    ARITHMETIC,
    PLACEMENT,
    STEPPING,
    TrainingSettings,
    accumulate,
    make_optimizer,
    offloading,
    prepare_model_,
)
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import least_rows, recompute_
from lowbit.storage.bandwidth import bandwidth
from lowbit.train.micro_batches import largest_part, samples

__all__ = ["Prediction", "Predictor"]

logger = logging.getLogger(__name__)


#: The least rows by which precisions are compared, where a batch has as many and may be taken in parts.
_COMPARED_ROWS = 4

#: The fields of a ``BlockTable`` that are seconds.
_TIMES = frozenset({"seconds", "recomputation"})


class Prediction(NamedTuple):
    """``peak_bytes`` and ``seconds`` of a step by ``settings``. ``whole``: by an estimate of this very step."""

    settings: TrainingSettings
    peak_bytes: int
    seconds: float
    peak_event: str = ""
    whole: bool = False


class _Step(NamedTuple):
    """An optimizer's step: the bytes of its states, of those that stay where they are when states are offloaded, the
    most that is held, seconds, and the bytes of all parameters and gradients.
    """

    states: int
    small: int
    peak: int
    seconds: float
    parameters: int
    gradients: int


@dataclass
class _Line:
    """Forward and backward of one part by its rows: of the whole batch, of its first half, and with gradients there, of
    its second half. ``single``: what the ``least`` rows of a part take of the time of half a batch, as each op takes
    some time at least.

    Bytes of other parts are on the line through whole and half. Times are on the line through half and the least, and
    at least in proportion, since fewer rows are no faster a row.
    """

    rows: int
    whole: BlockTable
    first: BlockTable | None = None
    second: BlockTable | None = None
    single: float = 0.0
    least: int = 1

    def at(self, count: int) -> BlockTable:
        """One of so many parts."""
        if count == 1 or self.first is None or self.second is None:
            return self.whole
        half, rows = -(-self.rows // 2), -(-self.rows // count)
        fewer = (half - rows) / max(self.rows - half, 1)
        more = (rows - self.least) / max(half - self.least, 1)
        time = max(rows / half, self.single + (1 - self.single) * more)

        def on_line(field: str) -> Any:
            whole, first, second = (getattr(t, field) for t in (self.whole, self.first, self.second))
            return second * time if field in _TIMES else np.maximum(second - fewer * (whole - first), 0.0)

        return BlockTable(**{field.name: on_line(field.name) for field in fields(BlockTable)})


@dataclass
class Predictor:
    """Predictions for one subject."""

    subject: Subject
    #: Bytes a second that one of several processes sends.
    bandwidth: float = DEFAULTS["cpu"]
    #: What the model trains by already; predictions are then of these settings with others of ``LIVE``.
    trains: TrainingSettings | None = None
    #: Whether the batch may be taken in parts.
    parts: bool = True

    def __post_init__(self) -> None:
        self.model = self.subject.model
        self.rows, self.least = samples(self.subject.batch), least_rows(self.model)
        self._passes: dict[Any, Estimate] = {}
        self._tables: dict[Any, BlockTable] = {}
        self.blocks = blocks_of(self.model)
        self._weights = sum(p.nbytes for p in self.model.parameters())
        self._lines: dict[tuple[TrainingSettings, str], _Line] = {}
        self._steps: dict[TrainingSettings, _Step] = {}
        self._streams: dict[TrainingSettings, int] = {}
        self._elsewhere: dict[tuple[TrainingSettings, int], int] = {}
        #: Whether the loss is of the kind whose changes were recorded; None before the first estimate.
        self.is_recorded: bool | None = None

    def _look(self, value: Tensor) -> None:
        if self.is_recorded is None:
            self.is_recorded = is_mean_of_cross_entropies(value)

    @property
    def on_cpu(self) -> bool:
        """Whether the model trains in the process' own memory."""
        return self.subject.device.type == "cpu"

    def counts(self) -> list[int]:
        """The numbers of parts that a batch may be taken in: powers of two, and three times these."""
        if not self._splits:
            return [1]
        powers, most = [1 << k for k in range(self.rows.bit_length())], max(self.rows // self.least, 1)
        return sorted(count for count in {*powers, *(3 * power for power in powers)} if count <= most)

    def applies(self, policy: str | None) -> bool:
        """Whether the model has what the policy of checkpoints looks for."""
        return policy is None or bool(POLICIES[policy].choose(self.model))

    @cached_property
    def _splits(self) -> bool:
        """Whether the batch may be, and can be, taken in parts: the model may expect what no part is."""
        if not self.parts or self.rows < 2 * self.least:
            return False
        try:
            for count in {2, self.rows // self.least}:
                self._estimated(TrainingSettings(), count, None)
        except Exception:  # of whatever code the model and the loss have; the whole batch shows what is wrong with both
            logger.debug("fit: the batch is kept whole, since a part of it fails", exc_info=True)
            return False
        return True

    # -- predictions -------------------------------------------------------------------------------------------------
    def predicted(self, settings: TrainingSettings) -> Prediction:
        """By sums of tables."""
        if isinstance(settings.checkpoint, tuple):
            return self._predicted_by_block(settings, settings.checkpoint)
        table = self._table(settings, settings.checkpoint or KEEP)
        held = table.peak
        if settings.offload_activations:
            held = max((*table.inside, *table.outside)) if self.blocks else self._held_elsewhere(settings)
        return self._prediction(settings, held, table.seconds, float(table.kept.sum()))

    def by_block(self, settings: TrainingSettings, limit: int) -> Prediction | None:
        """Of settings with the options of each block that hold at most ``limit`` and take the least time; None where
        none do.
        """
        if self._stepping(settings) > limit:
            return None
        names = best(*self._choices(settings), limit - self._states_beside(settings))
        return None if names is None else self._predicted_by_block(settings, tuple(names))

    def _predicted_by_block(self, settings: TrainingSettings, names: tuple[str, ...]) -> Prediction:
        options, outside = self._choices(settings)
        chosen = [next(o for o in row if o.name == name) for row, name in zip(options, names, strict=True)]
        seconds = self._table(settings, KEEP).seconds + sum(option.seconds for option in chosen)
        kept = sum(option.saved for option in chosen)
        return self._prediction(replace(settings, checkpoint=names), peak_of(chosen, outside), seconds, kept)

    def _choices(self, settings: TrainingSettings) -> tuple[list[list[Option]], list[int]]:
        return choices_of({name: self._table(settings, name) for name in self.options})

    def least_seconds(self, settings: TrainingSettings) -> float:
        """What a step takes at least, with these settings and any checkpoints."""
        table = self._table(settings, KEEP)
        compute = settings.micro_batches * table.seconds + self._step(settings).seconds
        moved = self._states_moved(settings) + self._weights_moved(settings)
        return compute + moved + self._exchanged(settings, table.seconds)

    def step_seconds(self, settings: TrainingSettings) -> float:
        """What the optimizer's step takes."""
        return self._step(settings).seconds

    def whole(self, settings: TrainingSettings) -> Prediction:
        """By an estimate of the step itself; the time of what lies elsewhere by sums."""
        apart = settings.offload_states or settings.gpus > 1  # the step is known by itself
        usage = self._estimated(settings, settings.micro_batches, None if apart else settings)
        if settings.offload_weights:
            usage = Streaming.of(self.model).applied(usage)
        parts, step = parts_of(usage), self._step(settings)
        passes = [sum(usage.op_seconds[index] for index in part) for part in parts]
        seconds = sum(passes) + max(settings.micro_batches - len(passes), 0) * passes[-1] + step.seconds
        seconds += self._states_moved(settings) + self._weights_moved(settings)
        if settings.offload_activations:
            assert not isinstance(settings.checkpoint, tuple), "options of blocks are not combined with it"
            kept = self._table(settings, settings.checkpoint or KEEP).kept
            seconds += settings.micro_batches * self._moved(float(kept.sum()))
        seconds += self._exchanged(settings, passes[-1])
        if settings.gpus > 1:
            usage = Sharing.of(settings, self.model).applied(usage)
        peak, peak_event = usage.peak_bytes, str(usage.peak_event)
        if apart:
            peak += self._states_beside(settings)
            stepping = self._stepping(settings)
            peak, peak_event = max((peak, peak_event), (stepping, "step of (optimizer)"))
        return Prediction(settings, peak, seconds, peak_event, whole=True)

    def compared(self, settings: TrainingSettings, name: str, most: int) -> Comparison:
        """The loss of a few rows in fp32 and in the precision of settings, see ``compare``."""
        small = [count for count in self.counts() if self.rows // count >= _COMPARED_ROWS]
        count = max(settings.micro_batches, *small, 1)
        batch = self.subject.batch
        part = replace(self.subject, batch=batch if count == 1 else largest_part(batch, count))
        return compare(part, settings, name, most)

    @cached_property
    def options(self) -> list[str]:
        """What may be done with each block."""
        return [name for name in options_of(self.model, self.blocks) if name == KEEP or self.applies(name)]

    def _prediction(self, settings: TrainingSettings, held: float, seconds: float, kept: float) -> Prediction:
        """From what one part holds and takes, and what it keeps for backward."""
        step = self._step(settings)
        moved = self._moved(kept) if settings.offload_activations else 0.0
        return Prediction(
            settings,
            int(max(held + self._states_beside(settings), self._stepping(settings))),
            settings.micro_batches * (seconds + moved) + step.seconds + self._states_moved(settings)
            + self._weights_moved(settings) + self._exchanged(settings, seconds),
        )  # fmt: skip

    def _exchanged(self, settings: TrainingSettings, compute: float) -> float:
        """Seconds that a step takes longer for what processes send; ``compute``: of one part."""
        parameters = self._step(settings).parameters
        return exchange_seconds(settings, parameters, compute, self.bandwidth, self.subject.device.type == "cuda")

    # -- offload -----------------------------------------------------------------------------------------------------
    def _states_beside(self, settings: TrainingSettings) -> int:
        """The bytes of states that are held in forward and backward."""
        step = self._step(settings)
        return step.small if settings.offload_states else step.states

    def _stepping(self, settings: TrainingSettings) -> int:
        """The most that is held while the optimizer steps; states that lie elsewhere come a few at a time."""
        step = self._step(settings)
        if not settings.offload_states:
            return step.peak
        there = min(1.0, 2 * CHUNK_BYTES / max(self._weights, 1))
        offloading = step.states - step.small
        if settings.offload_weights:
            offloading += self._streamed(settings) + step.gradients
        return step.peak - offloading + int(there * offloading)

    def _states_moved(self, settings: TrainingSettings) -> float:
        return self._moved(self._step(settings).states) if settings.offload_states else 0.0

    def _weights_moved(self, settings: TrainingSettings) -> float:
        """Seconds: weights come for forward and for backward of each part, gradients go and come, weights go once."""
        if not settings.offload_weights:
            return 0.0
        weights = self._streamed(settings)
        return self._moved(
            (settings.micro_batches + 0.5) * weights + settings.micro_batches * self._step(settings).gradients
        )

    def _streamed(self, settings: TrainingSettings) -> int:
        """The bytes of weights that lie elsewhere."""
        arithmetic = _only(settings, *ARITHMETIC)
        if arithmetic not in self._streams:
            self._streams[arithmetic] = Streaming.of(self.model).moved(self._estimated(arithmetic, 1, None))
        return self._streams[arithmetic]

    def _moved(self, size: float) -> float:
        """Seconds for bytes to go and come back."""
        at = bandwidth("cpu" if self.subject.device.type == "cuda" else tempfile.gettempdir())
        return size * (1 / at.read + 1 / at.write)

    def _held_elsewhere(self, settings: TrainingSettings) -> float:
        """The most that a part holds with activations elsewhere, of a model without blocks: on the line through the
        whole batch and half of it.
        """
        arithmetic = _only(settings, *ARITHMETIC, *PLACEMENT)
        kept = replace(arithmetic, checkpoint=settings.checkpoint, offload_activations=True)
        counts = [1] if settings.micro_batches == 1 else [1, 2]
        for count in counts:
            if (kept, count) not in self._elsewhere:
                self._elsewhere[kept, count] = self._passed(kept, count).peak_bytes
        if settings.micro_batches == 1:
            return self._elsewhere[kept, 1]
        half, rows = -(-self.rows // 2), -(-self.rows // settings.micro_batches)
        fewer = (half - rows) / max(self.rows - half, 1)
        return self._elsewhere[kept, 2] - fewer * max(self._elsewhere[kept, 1] - self._elsewhere[kept, 2], 0)

    # -- estimates ---------------------------------------------------------------------------------------------------
    def _table(self, settings: TrainingSettings, policy: str) -> BlockTable:
        """Of one part, with one policy for all blocks."""
        arithmetic = _only(settings, *ARITHMETIC, *PLACEMENT)
        key = arithmetic, policy
        if key not in self._lines:
            self._lines[key] = self._line(arithmetic, policy)
        at = *key, settings.micro_batches
        if at not in self._tables:
            self._tables[at] = self._lines[key].at(settings.micro_batches)
        return self._tables[at]

    def _line(self, arithmetic: TrainingSettings, policy: str) -> _Line:
        checkpoint: Any = None if policy == KEEP else policy
        if policy != KEEP and POLICIES[policy].block is not None:
            checkpoint = (policy,) * len(self.blocks)
        settings = replace(arithmetic, checkpoint=checkpoint)
        whole = block_table(self._passed(settings, 1), self.blocks)
        if not self._splits:
            return _Line(self.rows, whole)
        halves = self._passed(settings, 2)
        first, second = (block_table(halves, self.blocks, part) for part in parts_of(halves))
        if policy != KEEP:  # with checkpoints it is about the same
            self._table(arithmetic, KEEP)
            single = self._lines[arithmetic, KEEP].single
        else:
            single = self._least_part(settings) / max(second.seconds, 1e-12)
        return _Line(self.rows, whole, first, second, single, self.least)

    def _least_part(self, settings: TrainingSettings) -> float:
        """Seconds that a part of the least rows takes, with gradients there."""
        usage = self._passed(settings, self.rows // self.least)
        return sum(usage.op_seconds[index] for index in parts_of(usage)[-1])

    def _passed(self, settings: TrainingSettings, count: int) -> Estimate:
        """Forward and backward in so many parts, as one process has them. Ways share what one process alone has."""
        if settings.gpus == 1:
            found = self._estimated(settings, count, None)
            return Streaming.of(self.model).applied(found) if settings.offload_weights else found
        alone = (
            replace(settings, gpus=1, strategy=TrainingSettings.strategy, group_size=None),
            settings.working_copies,
            count,
        )
        if alone not in self._passes:
            self._passes[alone] = self._estimated(settings, count, None)
        return Sharing.of(settings, self.model).applied(self._passes[alone])

    def _step(self, settings: TrainingSettings) -> _Step:
        key = _only(settings, *STEPPING, *PLACEMENT)
        if key not in self._steps:
            sharing = Sharing.of(key, self.model)
            wholes = []
            usage = self._estimated(key, 1, key, _gradients_alone, lambda model: wholes.append(share_(model, sharing)))
            kinds = ("optimizer state", "master copies")
            sizes = [holding.bytes for holding in usage.held_at(0) if holding.kind in kinds]
            states, small = sum(sizes), sum(size for size in sizes if size < LEAST_BYTES)
            peak, whole = usage.by_phase.get("step", 0), wholes[0]
            if key.gpus > 1:
                peak = sharing.stepping(peak, states, whole)
            self._steps[key] = _Step(
                states, small, peak, usage.seconds_by_phase.get("step", 0.0), whole.parameters, whole.gradients
            )
        return self._steps[key]

    def _estimated(
        self,
        settings: TrainingSettings,
        count: int,
        optimizer: TrainingSettings | None,
        passes: Callable[[nn.Module, Any, Any], object] | None = None,
        prepare: Callable[[nn.Module], object] = lambda model: None,
    ) -> Estimate:
        """Of a step in ``count`` parts, of which two show what all take; the batch they are of is held whole.
        ``passes``: in place of forward and backward. ``prepare``: called on the model that is trained by the settings.
        """
        away = offloading(settings, tempfile.gettempdir())
        passes = passes or partial(accumulate, rest=self.subject.loss is not None, look=self._look)

        copies: dict[Tensor, Tensor] = {}
        random: list[Tensor] = []

        def within(model: nn.Module, batch: Any, loss: Any) -> None:
            copies.clear()
            copies.update(copies_of_buffers(model))
            random[:] = [torch.empty(RANDOM_BYTES, dtype=torch.uint8)]
            largest = batch if count == 1 else largest_part(batch, count)
            for _ in range(min(count, 2)):
                with away:
                    passes(model, largest, loss)

        def prepared(model: nn.Module) -> None:
            if self.trains is None:
                prepare_model_(model, settings)
            elif self.trains.checkpoint != settings.checkpoint:
                recompute_(model, settings.checkpoint)
            prepare(model)

        return estimate_step(
            self.model, self.subject.batch, self.subject.loss,
            optimizer=None if optimizer is None else lambda params: make_optimizer(params, settings),
            prepare=prepared, accumulate=within,
        )  # fmt: skip


def _only(settings: TrainingSettings, *names: str) -> TrainingSettings:
    """Settings with these fields, and the defaults of all others."""
    return TrainingSettings(**{name: getattr(settings, name) for name in names})


def _gradients_alone(model: nn.Module, batch: Any, loss: Any) -> None:
    """In place of forward and backward: what an optimizer's step takes does not depend on them."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
