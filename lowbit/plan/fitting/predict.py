"""Predicted memory and time of a step for every combination of settings, from a few estimates.

An estimate of every combination would take minutes. The memory of forward and backward does not depend on the
optimizer, is linear in the rows of a micro-batch, and is the sum over the blocks. So a few estimates suffice: for each
arithmetic and each uniform checkpointing policy the whole batch and half of it, and for each optimizer its step. The
chosen settings are estimated as a whole.
"""

from __future__ import annotations

import logging
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.checkpointing.block_table import KEEP, BlockTable, block_table, blocks_of, options_of, parts_of
from lowbit.checkpointing.policies import POLICIES
from lowbit.memory.estimator import Estimate, can_run, estimate_step
from lowbit.memory.fake import fake_model, fake_tensors, outlined_model
from lowbit.memory.fewer_blocks import Hidden, Unlike
from lowbit.optim.offload import CHUNK_BYTES
from lowbit.plan.checkpoints import Option, best, choices_of, peak_of
from lowbit.plan.fitting.adapt import RANDOM_BYTES, copies_of_buffers
from lowbit.plan.fitting.comparison import Comparison, compare, is_mean_of_cross_entropies
from lowbit.plan.fitting.line import Line
from lowbit.plan.fitting.link import DEFAULTS, exchange_seconds
from lowbit.plan.fitting.rough import Rough, products_of, total
from lowbit.plan.fitting.sharing import Sharing, share_
from lowbit.plan.fitting.stepping import COUNTS, Blocks, Step, step_of
from lowbit.plan.fitting.streaming import Streaming
from lowbit.plan.settings import (
    ARITHMETIC,
    PLACEMENT,
    PREPARE,
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

#: Fewest rows for the comparison of precisions, if the batch has as many and may be split.
_COMPARED_ROWS = 4

#: Fields that change no op of forward or backward.
_APART = frozenset({"optimizer", "bits", "master", "offload_states", "offload_weights", "resident", "micro_batches"})
_FIELDS = tuple(one.name for one in fields(TrainingSettings))

#: Fields that change the layers before all others.
_OF_BASE = frozenset({"base", "adapters"})

#: Number of estimates that are kept.
_KEPT = 6


class Prediction(NamedTuple):
    """Predicted peak and time of a step. ``whole``: whether this step itself was estimated."""

    settings: TrainingSettings
    peak_bytes: int
    seconds: float
    peak_event: str = ""
    whole: bool = False


@dataclass
class Predictor:
    """Predictions for one subject."""

    subject: Subject
    #: Bytes per second that one of several processes sends.
    bandwidth: float = DEFAULTS["cpu"]
    #: Settings that the model already trains with; predictions may then differ from them only in fields of ``LIVE``.
    trains: TrainingSettings | None = None
    #: Whether the batch may be split into micro-batches.
    parts: bool = True

    def __post_init__(self) -> None:
        self.model = self.subject.model
        self.rows, self.least = samples(self.subject.batch), least_rows(self.model)
        self._passes: dict[Any, Estimate] = {}
        self._tables: dict[Any, BlockTable] = {}
        self.blocks = blocks_of(self.model)
        self._weights = sum(p.nbytes for p in self.model.parameters())
        self._lines: dict[tuple[TrainingSettings, str], Line] = {}
        self._steps: dict[TrainingSettings, Step] = {}
        self._streams: dict[tuple[TrainingSettings, int], int] = {}
        self._offloaded: dict[tuple[TrainingSettings, int], int] = {}
        self._copies: dict[tuple[Any, ...], nn.Module] = {}
        hidden = Hidden(self.model)
        self._hidden = hidden if hidden.cuts else None
        self._unlike = set[TrainingSettings]()  # settings, without their checkpoints, with which alike blocks differ
        self._recent: OrderedDict[Any, Estimate] = OrderedDict()
        #: Whether the loss is of the kind for which changes are recorded; None before the first estimate.
        self.is_recorded: bool | None = None

    def _look(self, value: Tensor) -> None:
        if self.is_recorded is None:
            self.is_recorded = is_mean_of_cross_entropies(value)

    @property
    def on_cpu(self) -> bool:
        """Whether the model trains on the CPU."""
        return self.subject.device.type == "cpu"

    def counts(self) -> list[int]:
        """Return the possible numbers of micro-batches: powers of two, and three times these."""
        if not self._splits:
            return [1]
        powers, most = [1 << k for k in range(self.rows.bit_length())], max(self.rows // self.least, 1)
        return sorted(count for count in {*powers, *(3 * power for power in powers)} if count <= most)

    def applies(self, policy: str | None) -> bool:
        """Return whether the model has modules that the checkpointing policy selects."""
        return policy is None or bool(POLICIES[policy].choose(self.model))

    def rough_seconds(self, arithmetic: TrainingSettings) -> float:
        """Return about the seconds of forward and backward of the whole batch, without an estimate of the model."""
        return self._rough.seconds(arithmetic)

    @cached_property
    def _rough(self) -> Rough:
        usage = self._estimated(TrainingSettings(), 1)
        products = products_of(self.model, usage)
        subject = self.subject if products is None else Subject(products.layers, products.rows, total)
        subject = replace(subject, target=self.subject.target)
        return Rough(sum(usage.op_seconds), products, Predictor(subject, parts=False).seconds_of_passes)

    def seconds_of_passes(self, settings: TrainingSettings) -> float:
        """Return the seconds of one forward and backward of the whole batch."""
        return sum(self._estimated(settings, 1).op_seconds)

    def of_plain(self, arithmetic: TrainingSettings) -> tuple[float, float]:
        """Return peak and seconds of forward and backward without checkpoints."""
        table = self._table(arithmetic, KEEP)
        return table.peak, table.seconds

    @cached_property
    def _splits(self) -> bool:
        """Whether the batch may be split, and the model and the loss accept a part of it."""
        if not self.parts or self.rows < 2 * self.least:
            return False
        try:
            for count in {2, self.rows // self.least}:
                self._estimated(TrainingSettings(), count)
        except Exception:  # user code; if the whole batch fails too, its estimate raises
            logger.debug("fit: the batch is not split, because a part of it fails", exc_info=True)
            return False
        return True

    # -- predictions -------------------------------------------------------------------------------------------------
    def predicted(self, settings: TrainingSettings) -> Prediction:
        """Return a prediction from sums of tables."""
        if isinstance(settings.checkpoint, tuple):
            return self._predicted_by_block(settings, settings.checkpoint)
        table = self._table(settings, settings.checkpoint or KEEP)
        held = table.peak
        if settings.offload_activations:
            held = max((*table.inside, *table.outside)) if self.blocks else self._offloaded_peak(settings)
        return self._prediction(settings, held, table.seconds, float(table.kept.sum()))

    def by_block(self, settings: TrainingSettings, limit: int) -> Prediction | None:
        """Return the prediction with the fastest per-block options whose peak is at most ``limit``, or None."""
        if self._stepping(settings) > limit:
            return None
        names = best(*self._choices(settings), limit - self._resident_states(settings))
        return None if names is None else self._predicted_by_block(settings, tuple(names))

    def _predicted_by_block(self, settings: TrainingSettings, names: tuple[str, ...]) -> Prediction:
        options, outside = self._choices(settings)
        chosen = [next(o for o in row if o.name == name) for row, name in zip(options, names, strict=True)]
        seconds = self._table(settings, KEEP).seconds + sum(option.seconds for option in chosen)
        saved = sum(option.saved for option in chosen)
        return self._prediction(replace(settings, checkpoint=names), peak_of(chosen, outside), seconds, saved)

    def _choices(self, settings: TrainingSettings) -> tuple[list[list[Option]], list[int]]:
        return choices_of({name: self._table(settings, name) for name in self.options})

    def least_seconds(self, settings: TrainingSettings) -> float:
        """Return a lower bound of the step time with these settings and any checkpoints."""
        table = self._table(settings, KEEP)
        compute = settings.micro_batches * table.seconds + self._step(settings).seconds
        moved = self._states_moved(settings) + self._weights_moved(settings)
        return compute + moved + self._exchanged(settings, table.seconds)

    def step_seconds(self, settings: TrainingSettings) -> float:
        """Return the time of the optimizer step."""
        return self._step(settings).seconds

    def whole(self, settings: TrainingSettings) -> Prediction:
        """Return the prediction from an estimate of this step. The time of offload and communication is added."""
        usage = self._usage(settings)
        parts, step = parts_of(usage), self._step(settings)
        passes = [sum(usage.op_seconds[index] for index in part) for part in parts]
        seconds = sum(passes) + max(settings.micro_batches - len(passes), 0) * passes[-1] + step.seconds
        seconds += self._states_moved(settings) + self._weights_moved(settings)
        if settings.offload_activations:
            assert not isinstance(settings.checkpoint, tuple), (
                "per-block options are not combined with offloaded activations"
            )
            saved = self._table(settings, settings.checkpoint or KEEP).kept
            seconds += settings.micro_batches * self._moved(float(saved.sum()))
        seconds += self._exchanged(settings, passes[-1])
        peak, peak_event = self._peak(settings, usage)
        return Prediction(settings, peak, seconds, peak_event, whole=True)

    def whole_peak(self, settings: TrainingSettings) -> int:
        """Return the peak of ``whole`` without timing the ops of forward and backward."""
        return self._peak(settings, self._usage(settings))[0]

    def _usage(self, settings: TrainingSettings) -> Estimate:
        """Return an estimate of forward and backward of this step."""
        usage = self._estimated(settings, settings.micro_batches)
        return self._streaming(settings).applied(usage) if settings.offload_weights else usage

    def _peak(self, settings: TrainingSettings, usage: Estimate) -> tuple[int, str]:
        """Return the peak bytes of a step with this ``_usage``, and the event at the peak."""
        if settings.gpus > 1:
            usage = Sharing.of(settings, self.model).applied(usage)
        passes = usage.peak_bytes + self._resident_states(settings)
        return max((passes, str(usage.peak_event)), (self._stepping(settings), "step of (optimizer)"))

    def compared(self, settings: TrainingSettings, name: str, most: int) -> Comparison:
        """Compare the loss of a few rows in fp32 and in the precision of the settings, see ``compare``."""
        small = [count for count in self.counts() if self.rows // count >= _COMPARED_ROWS]
        count = max(settings.micro_batches, *small, 1)
        batch = self.subject.batch
        part = replace(self.subject, batch=batch if count == 1 else largest_part(batch, count))
        return compare(part, settings, name, most)

    @cached_property
    def options(self) -> list[str]:
        """The checkpointing options of a block."""
        return [name for name in options_of(self.model, self.blocks) if name == KEEP or self.applies(name)]

    def _prediction(self, settings: TrainingSettings, held: float, seconds: float, saved: float) -> Prediction:
        """Return the prediction from the peak, the time and the saved bytes of one micro-batch."""
        step = self._step(settings)
        moved = self._moved(saved) if settings.offload_activations else 0.0
        return Prediction(
            settings,
            int(max(held + self._resident_states(settings), self._stepping(settings))),
            settings.micro_batches * (seconds + moved) + step.seconds + self._states_moved(settings)
            + self._weights_moved(settings) + self._exchanged(settings, seconds),
        )  # fmt: skip

    def _exchanged(self, settings: TrainingSettings, compute: float) -> float:
        """Return the seconds that communication adds to a step. ``compute``: seconds of one micro-batch."""
        whole, overlaps = self._step(settings).whole, self.subject.device.type == "cuda"
        return exchange_seconds(settings, whole.parameters, whole.gradients, compute, self.bandwidth, overlaps)

    # -- offload -----------------------------------------------------------------------------------------------------
    def _resident_states(self, settings: TrainingSettings) -> int:
        """Return the bytes of optimizer states during forward and backward."""
        step = self._step(settings)
        return step.small if settings.offload_states else step.states

    def _stepping(self, settings: TrainingSettings) -> int:
        """Return the peak of the optimizer step. Offloaded states are loaded a few at a time."""
        step = self._step(settings)
        if not settings.offload_states:
            return step.peak
        if settings.offload_weights and self.subject.device.type == "cuda":
            # Streamed parameters step in host memory.
            return int(step.peak * max(1 - self._streamed(settings) / max(step.whole.parameters, 1), 0.0))
        resident = min(1.0, 2 * CHUNK_BYTES / max(self._weights, 1))
        offloaded = step.states - step.small
        if settings.offload_weights:
            offloaded += self._streamed(settings) + step.whole.gradients
        return step.peak - offloaded + int(resident * offloaded)

    def _states_moved(self, settings: TrainingSettings) -> float:
        return self._moved(self._step(settings).states) if settings.offload_states else 0.0

    def _weights_moved(self, settings: TrainingSettings) -> float:
        """Return the seconds to load weights for each forward and backward, move gradients, and store weights once."""
        if not settings.offload_weights:
            return 0.0
        weights = self._streamed(settings)
        return self._moved(
            (settings.micro_batches + 0.5) * weights + settings.micro_batches * self._step(settings).whole.gradients
        )

    def _streamed(self, settings: TrainingSettings) -> int:
        """Return the bytes of offloaded weights."""
        arithmetic = _only(settings, *ARITHMETIC)
        key = arithmetic, settings.resident
        if key not in self._streams:
            self._streams[key] = self._streaming(settings).moved(self._estimated(arithmetic, 1))
        return self._streams[key]

    def _streaming(self, settings: TrainingSettings) -> Streaming:
        return Streaming.of(self.model, self.subject.device, settings.resident)

    def _moved(self, size: float) -> float:
        """Return the seconds to write and read ``size`` bytes."""
        target = self.subject.target
        if target is not None:
            return size * 2 / target.host
        rates = bandwidth("cpu" if self.subject.device.type == "cuda" else tempfile.gettempdir())
        return size * (1 / rates.read + 1 / rates.write)

    def _offloaded_peak(self, settings: TrainingSettings) -> float:
        """Return the peak of a micro-batch with offloaded activations, for a model without blocks.

        It is interpolated between the whole batch and half of it.
        """
        arithmetic = _only(settings, *ARITHMETIC, *PLACEMENT)
        offloaded = replace(arithmetic, checkpoint=settings.checkpoint, offload_activations=True)
        peaks = {}
        for count in [1] if settings.micro_batches == 1 else [1, 2]:
            key = offloaded, count
            if key not in self._offloaded:
                self._offloaded[key] = self._passed(offloaded, count).peak_bytes
            peaks[count] = self._offloaded[key]
        if settings.micro_batches == 1:
            return peaks[1]
        half, rows = -(-self.rows // 2), -(-self.rows // settings.micro_batches)
        below = (half - rows) / max(self.rows - half, 1)
        return peaks[2] - below * max(peaks[1] - peaks[2], 0)

    def most_resident(self, chosen: Prediction, limit: int) -> Prediction:
        """Return the prediction with as many blocks in memory as fit, if the weights of blocks are offloaded."""
        if not chosen.settings.offload_weights:
            return chosen
        low, high = chosen.settings.resident, len(self.blocks) - 1
        while low < high:  # memory grows with the number
            middle = (low + high + 1) // 2
            fits = self.whole_peak(replace(chosen.settings, resident=middle)) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        return chosen if low == chosen.settings.resident else self.whole(replace(chosen.settings, resident=low))

    # -- estimates ---------------------------------------------------------------------------------------------------
    def _table(self, settings: TrainingSettings, policy: str) -> BlockTable:
        """Return the table of one micro-batch, with one policy for all blocks."""
        arithmetic = _only(settings, *ARITHMETIC, *PLACEMENT)
        key = arithmetic, policy
        if key not in self._lines:
            self._lines[key] = self._line(arithmetic, policy)
        with_count = *key, settings.micro_batches
        if with_count not in self._tables:
            self._tables[with_count] = self._lines[key].at(settings.micro_batches)
        return self._tables[with_count]

    def _line(self, arithmetic: TrainingSettings, policy: str) -> Line:
        checkpoint: Any = None if policy == KEEP else policy
        if policy != KEEP and POLICIES[policy].block is not None:
            checkpoint = (policy,) * len(self.blocks)
        settings = replace(arithmetic, checkpoint=checkpoint)
        whole = block_table(self._passed(settings, 1), self.blocks)
        if not self._splits:
            return Line(self.rows, whole)
        plain = TrainingSettings()
        is_plain = arithmetic == plain and policy == KEEP
        if policy != KEEP:
            self._table(arithmetic, KEEP)
            without_checkpoints = self._lines[arithmetic, KEEP]
            if without_checkpoints.is_proportional:
                return without_checkpoints.with_whole(whole)
        halves = self._passed(settings, 2)
        first, second = (block_table(halves, self.blocks, part, timed=is_plain) for part in parts_of(halves))
        if is_plain:
            single = self._least_seconds(settings) / max(second.seconds, 1e-12)
            return Line(self.rows, whole, first, second, single, self.least)
        # Fewer rows take about as much less time as in plain training.
        self._table(plain, KEEP)
        of_plain = self._lines[plain, KEEP]
        part = of_plain.half_seconds
        second = replace(second, seconds=whole.seconds * part, recomputation=whole.recomputation * part)
        return Line(self.rows, whole, first, second, of_plain.single, self.least)

    def _least_seconds(self, settings: TrainingSettings) -> float:
        """Return the seconds of a micro-batch of the fewest rows, when gradients already exist."""
        usage = self._passed(settings, self.rows // self.least)
        return sum(usage.op_seconds[index] for index in parts_of(usage)[-1])

    def _passed(self, settings: TrainingSettings, count: int) -> Estimate:
        """Return the estimate of forward and backward in ``count`` micro-batches on one process.

        Sharding strategies share the estimate of a single process.
        """
        if settings.gpus == 1:
            usage = self._estimated(settings, count)
            return self._streaming(settings).applied(usage) if settings.offload_weights else usage
        single = (
            replace(settings, gpus=1, strategy=TrainingSettings.strategy, group_size=None),
            settings.working_copies,
            count,
        )
        if single not in self._passes:
            self._passes[single] = self._estimated(settings, count)
        return Sharing.of(settings, self.model).applied(self._passes[single])

    def _step(self, settings: TrainingSettings) -> Step:
        key = _only(settings, *STEPPING, *PLACEMENT)
        if key not in self._steps:
            sharing = Sharing.of(key, self.model)
            if self._alike is None:
                step = self._stepped(key, sharing, None)
            else:
                step = self._alike.extended(*(self._stepped(key, sharing, count) for count in COUNTS))
            if key.gpus > 1:
                step = step._replace(peak=sharing.stepping(step.peak, step.states, step.whole))
            self._steps[key] = step
        return self._steps[key]

    def _stepped(self, settings: TrainingSettings, sharing: Sharing, count: int | None) -> Step:
        """Return the step over ``count`` of the alike blocks; None: over all."""
        sizes = []
        hidden = (
            self._hidden if count is not None and self._hidden is not None and len(self._hidden.cuts) == 1 else None
        )

        def prepare(model: nn.Module) -> None:
            unsharded = share_(model, sharing, {} if hidden is None else hidden.times(model))
            if self._alike is not None and count is not None:
                self._alike.freeze_(model, count)
            sizes.append((unsharded, sum(p.nbytes for p in model.parameters() if p.requires_grad)))

        usage = self._run(settings, 1, settings, _gradients_alone, prepare, hidden)
        return step_of(usage, *sizes[-1])

    @cached_property
    def _alike(self) -> Blocks | None:
        return Blocks.of(self.model)

    def _estimated(self, settings: TrainingSettings, count: int) -> Estimate:
        """Return the estimate of forward and backward in ``count`` micro-batches; the last few are kept.

        At most two of the micro-batches are run, because the others are alike. Memory holds the whole batch.
        """
        key = _only(settings, *(name for name in _FIELDS if name not in _APART)), count
        if key not in self._recent:
            self._recent[key] = self._estimate(settings, count)
            if len(self._recent) > _KEPT:
                self._recent.popitem(last=False)
        return self._recent[key]

    def _estimate(self, settings: TrainingSettings, count: int) -> Estimate:
        hidden = self._need_not_run(settings)
        if hidden is not None:
            try:
                return self._run(settings, count, hidden=hidden)
            except Unlike as unlike:
                logger.debug("fit: every block is estimated: %s", unlike)
                if settings == TrainingSettings():
                    self._hidden = None
                self._unlike.add(replace(settings, checkpoint=None))
        return self._run(settings, count)

    def _need_not_run(self, settings: TrainingSettings) -> Hidden | None:
        """Return the blocks that a copy of the model may lack for an estimate of forward and backward, if any."""
        if self._hidden is None or self.trains is not None or replace(settings, checkpoint=None) in self._unlike:
            return None
        if isinstance(settings.checkpoint, tuple):
            hidden = self._hidden.among(dict(zip(self.blocks, settings.checkpoint, strict=True)))
            return hidden if hidden.cuts else None
        by_block = settings.checkpoint is None or POLICIES[settings.checkpoint].block is not None
        return self._hidden if by_block else None

    def _run(
        self,
        settings: TrainingSettings,
        count: int,
        optimizer: TrainingSettings | None = None,
        passes: Callable[[nn.Module, Any, Any], object] | None = None,
        prepare: Callable[[nn.Module], object] = lambda model: None,
        hidden: Hidden | None = None,
    ) -> Estimate:
        """Estimate a step on a copy of the model.

        Args:
            settings: Settings of the step.
            count: Number of micro-batches.
            optimizer: Settings of the optimizer, or None for no optimizer step.
            passes: Called as ``passes(model, batch, loss)`` instead of forward and backward.
            prepare: Called on the prepared copy of the model.
            hidden: Blocks that the copy does not have.
        """
        offload = offloading(settings, tempfile.gettempdir())
        # Nothing runs forward in the first case, and in the second it is known that the blocks differ.
        every_block = passes is _gradients_alone or replace(settings, checkpoint=None) in self._unlike
        passes = passes or partial(accumulate, rest=self.subject.loss is not None, look=self._look)
        if hidden is not None and isinstance(settings.checkpoint, tuple):
            rows = zip(self.blocks, settings.checkpoint, strict=True)
            settings = replace(settings, checkpoint=tuple(name for path, name in rows if path not in hidden.paths))
        model, device = self._copy(settings, hidden), self.subject.device
        names = PREPARE if model is self.model else PREPARE.keys() - _OF_BASE

        copies: dict[Tensor, Tensor] = {}
        random: list[Tensor] = []

        def within(model: nn.Module, batch: Any, loss: Any) -> None:
            copies.clear()
            copies.update(copies_of_buffers(model))
            random[:] = [torch.empty(RANDOM_BYTES, dtype=torch.uint8)]
            largest = batch if count == 1 else largest_part(batch, count)
            for _ in range(min(count, 2)):
                with offload:
                    passes(model, largest, loss)

        def prepared(model: nn.Module) -> None:
            if self.trains is None:
                prepare_model_(model, settings, names)
            elif self.trains.checkpoint != settings.checkpoint:
                recompute_(model, settings.checkpoint)
            prepare(model)

        return estimate_step(
            model, self.subject.batch, self.subject.loss,
            optimizer=None if optimizer is None else lambda params: make_optimizer(params, settings),
            prepare=prepared, accumulate=within, measured=can_run(self.model, device), absent=hidden,
            every_block=every_block,
            device=self.subject.target or (None if model is self.model or device.type == "meta" else device),
        )  # fmt: skip

    def _copy(self, settings: TrainingSettings, hidden: Hidden | None) -> nn.Module:
        """Return the model, or a copy without data that has no hidden blocks, but adapters and a quantized base.

        It takes longer to make these than to estimate a step.
        """
        key = settings.base, settings.adapters, None if hidden is None else frozenset(hidden.paths)
        if key == (None, None, None) or self.trains is not None:
            return self.model
        if key not in self._copies:
            with torch.inference_mode(False), fake_tensors() as mode:
                with nullcontext() if hidden is None else hidden.left_out():
                    copied = fake_model(self.model, mode, None)
                prepare_model_(copied, settings, _OF_BASE)
            if len(self._copies) == _KEPT:
                self._copies.clear()
            self._copies[key] = outlined_model(copied)
        return self._copies[key]


def _only(settings: TrainingSettings, *names: str) -> TrainingSettings:
    """Return settings with these fields, and defaults for all others."""
    return TrainingSettings(**{name: getattr(settings, name) for name in names})


def _gradients_alone(model: nn.Module, batch: Any, loss: Any) -> None:
    """Create gradients without forward and backward, for an estimate of the optimizer step alone."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
