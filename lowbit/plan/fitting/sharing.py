"""Predicted memory of one process with a sharding strategy, from the estimate of a single process.

The estimate loses the sharded bytes, and gains the buffers of all-gathers and reductions. Times are positions in the
estimate: op ``i`` runs from ``i`` to ``i + 1`` and frees its tensors at ``i + 0.5``. Communication between two ops is
in the rest of this interval.

Source: torch/distributed/fsdp/_fully_shard of torch 2.13: ``FSDPParamGroup.unshard`` and ``wait_for_unshard`` (a
gather buffer besides the parameters to which it is copied, kept in forward until the next unit is gathered),
``pre_backward`` (gathers the next unit while one computes), ``foreach_reduce`` (gradients, and a copy to send);
reducer.cpp of DistributedDataParallel (buckets, which are the gradients with ``gradient_as_bucket_view``);
lowbit/distributed/replicated.py (a bucket that fills, one that is sent, and the shards).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowbit.checkpointing.block_table import blocks_of, parts_of
from lowbit.distributed.replicated import bucket_bytes
from lowbit.distributed.strategies import STRATEGIES, Strategy
from lowbit.distributed.zero import BUCKET_BYTES
from lowbit.memory.estimator import Estimate
from lowbit.memory.ledger import OUTSIDE
from lowbit.memory.usage import Holding
from lowbit.plan.settings import TrainingSettings

__all__ = ["Sharing", "Whole", "share_", "unit_of"]

#: Copies that the communication backend allocates while it gathers or scatters, relative to the transferred bytes:
#: gloo copies (ProcessGroupGloo.cpp: ``newLikeFlat`` of outputs, a clone of inputs), NCCL does not.
_STAGED = {"cpu": 1.0, "cuda": 0.0}

#: Positions after an op, in the order of the events: a unit's gradients are reduced after the last op of its backward,
#: and the next unit's parameters are gathered before its first op.
_RESHARD, _SENDING, _REDUCE, _SENT, _REDUCED = 0.55, 0.58, 0.62, 0.66, 0.70
_GATHER, _STAGED_UNTIL, _COPY, _COPIED = 0.75, 0.80, 0.85, 0.90


class Whole(NamedTuple):
    """Bytes of an unsharded model: parameters, gradients, and the trained ones that a step gathers ``together``."""

    parameters: int
    gradients: int
    together: int


class _Unit(NamedTuple):
    """Parameters that are gathered together: of a block, or all outside of blocks. ``parameters``: their bytes."""

    path: str
    parameters: int


class _Span(NamedTuple):
    """The first and last op of a unit in forward or backward of one micro-batch."""

    unit: _Unit
    first: int
    last: int


@dataclass(frozen=True)
class Sharing:
    """Memory with a sharding strategy.

    Attributes:
        strategy: The row of ``STRATEGIES``.
        shards: Number of processes that share the model.
        units: Paths of the blocks that are gathered one at a time.
        staged: Copies of the communication backend, see ``_STAGED``.
    """

    strategy: Strategy
    shards: int
    units: tuple[str, ...] = ()
    staged: float = field(default=0.0)

    @classmethod
    def of(cls, settings: TrainingSettings, model: nn.Module) -> Sharing:
        """Return the sharding of ``settings`` for this model."""
        device = next((p.device.type for p in model.parameters()), "cpu")
        return cls(STRATEGIES[settings.strategy], settings.group, tuple(blocks_of(model)), _STAGED.get(device, 0.0))

    def part(self, size: float) -> int:
        """Return the size of one shard of ``size`` bytes."""
        return math.ceil(size / self.shards)

    # -- forward and backward --------------------------------------------------------------------------------------
    def applied(self, usage: Estimate) -> Estimate:
        """Return ``usage``, an estimate of forward and backward without an optimizer, for one of the processes."""
        if self.strategy.parameters:
            return usage.holding(self._fully(usage))
        return usage.holding(self._scattered(usage) if self.strategy.gradients else self._in_buckets(usage))

    def _in_buckets(self, usage: Estimate) -> Iterator[Holding]:
        """Yield holdings with gradient buckets: they always exist, and each gradient is copied to its bucket."""
        size = 0
        for holding in usage.holdings:
            if holding.kind == "gradients":
                size += holding.bytes
                holding = holding._replace(kind="temporaries", died=min(holding.died, holding.born + 1.25))
            yield holding
        yield Holding(size, "gradients", OUTSIDE, -1, math.inf)

    def _scattered(self, usage: Estimate) -> Iterator[Holding]:
        """Yield holdings with gradients that are copied to a bucket, reduced to shards and freed during backward."""
        parts = parts_of(usage)
        by_part: list[list[Holding]] = [[] for _ in parts]
        for holding in usage.holdings:
            accumulated = _accumulates(usage, holding)
            if holding.kind == "gradients" or accumulated:
                by_part[next(index for index, part in enumerate(parts) if holding.born <= part[-1])].append(holding)
                holding = holding._replace(kind="temporaries", died=min(holding.died, holding.born + 1.25))
            yield holding
        limit = bucket_bytes(sum(holding.bytes for holding in by_part[0]))
        for number, (part, gradients) in enumerate(zip(parts, by_part, strict=True)):
            buckets = list(_in_order(gradients, limit))
            full = [bucket[-1].born + _SENDING for bucket in buckets]
            for bucket, sent, landed in zip(buckets, full, [*full[1:], part[-1] + _REDUCED], strict=True):
                size = sum(holding.bytes for holding in bucket)
                yield Holding(size, "temporaries", OUTSIDE, bucket[0].born, landed)
                yield Holding(int(self.staged * size), "temporaries", OUTSIDE, sent, landed)
                kind, until = ("temporaries", landed) if number else ("gradients", math.inf)
                yield Holding(self.part(size), kind, OUTSIDE, sent, until)

    def _fully(self, usage: Estimate) -> Iterator[Holding]:
        parts = parts_of(usage)
        spans = [self._spans(usage, part) for part in parts]
        yield from self._gathered(spans)
        ends = [{span.unit.path: span.last for span in backward} for _, backward in spans]
        sizes: dict[tuple[int, str], int] = {}
        for holding in usage.holdings:
            if holding.kind == "parameters":
                yield holding._replace(bytes=self.part(holding.bytes))
                continue
            accumulated = _accumulates(usage, holding)
            if holding.kind != "gradients" and not accumulated:
                yield holding
                continue
            number = next(index for index, part in enumerate(parts) if holding.born <= part[-1])
            unit = self._unit(holding.layer)
            until = ends[number].get(unit, parts[number][-1]) + _REDUCE
            sizes[number, unit] = sizes.get((number, unit), 0) + holding.bytes
            yield holding._replace(died=until)
            if not accumulated:
                yield holding._replace(bytes=self.part(holding.bytes), born=until)
        for number, (_, backward) in enumerate(spans):
            by_unit = {unit: size for (part, unit), size in sizes.items() if part == number}
            yield from self._reduced(backward, by_unit, accumulated=number > 0)

    def _gathered(self, parts: Sequence[tuple[list[_Span], list[_Span]]]) -> Iterator[Holding]:
        """Yield the gathered parameters of the units, and their buffers."""
        reshards = self.strategy.gathered == "a block"
        for forward, backward in parts:
            ends = {span.unit: span.last for span in backward}
            for span, following in zip(forward, [*forward[1:], None], strict=True):
                start = span.first - 1
                # The buffer is freed when the next unit is gathered, the last one at the end of the forward.
                until = forward[0].last + _RESHARD if following is None else following.first - 1 + _COPY
                yield self._held(span.unit, start + _GATHER, until)
                yield self._held(span.unit, start + _GATHER, start + _STAGED_UNTIL, self.staged)
                end = span.last if reshards else ends.get(span.unit, math.inf)
                yield self._held(span.unit, start + _COPY, end + _RESHARD)
            for before, span in zip([None, *backward[:-1]], backward, strict=True) if reshards else ():
                start = span.first - 1
                prefetch = start + _GATHER if before is None else before.first - 1 + _COPIED
                yield self._held(span.unit, prefetch, start + _COPIED)
                yield self._held(span.unit, prefetch, prefetch + _STAGED_UNTIL - _GATHER, self.staged)
                yield self._held(span.unit, start + _COPY, span.last + _RESHARD)

    def _reduced(self, backward: Sequence[_Span], sizes: Mapping[str, int], accumulated: bool) -> Iterator[Holding]:
        """Yield the buffers that reduce the gradients of one micro-batch, with ``sizes`` bytes per unit.

        A copy of a unit's gradients is kept until the next unit is reduced. If gradients are ``accumulated``, the
        reduced shard is a temporary that is added to the existing one.
        """
        order = sorted(backward, key=lambda span: span.last)
        for span, following in zip(order, [*order[1:], None], strict=True):
            size, end = sizes.get(span.unit.path, 0), span.last
            until = end + _REDUCED if following is None else following.last + _RESHARD
            yield self._buffer(span.unit, size, end + _SENDING, until)
            yield self._buffer(span.unit, int(self.staged * size), end + _REDUCE, end + _SENT)
            if accumulated:
                yield self._buffer(span.unit, self.part(size), end + _REDUCE, end + _REDUCED)

    def _buffer(self, unit: _Unit, size: int, born: float, died: float) -> Holding:
        return Holding(size, "temporaries", unit.path, born, died)

    def _held(self, unit: _Unit, born: float, died: float, times: float = 1.0) -> Holding:
        return Holding(int(times * unit.parameters), "weight copies", unit.path, born, died)

    # -- units -----------------------------------------------------------------------------------------------------
    def _unit(self, layer: str) -> str:
        """Return the path of a layer's unit; "" outside of blocks."""
        return unit_of(layer, self.units)

    def _sizes(self, usage: Estimate) -> dict[str, _Unit]:
        sizes = dict.fromkeys(("", *self.units), 0)
        for holding in usage.holdings:
            if holding.kind == "parameters":
                sizes[self._unit(holding.layer)] += holding.bytes
        return {path: _Unit(path, size) for path, size in sizes.items()}

    def _spans(self, usage: Estimate, part: range) -> tuple[list[_Span], list[_Span]]:
        """Return the spans in forward and in backward of one micro-batch, in the order of their starts.

        Parameters outside of blocks are gathered during the whole pass.
        """
        units = self._sizes(usage)
        by_phase: tuple[dict[str, tuple[int, int]], ...] = ({}, {})
        for index in part:
            op = usage.ops[index]
            if op.layer == OUTSIDE:
                continue
            spans = by_phase[op.phase != "forward"]
            for path in {"", self._unit(op.layer)}:
                spans[path] = spans.get(path, (index, index))[0], index
        if "" in by_phase[1]:  # its gradients are reduced at the end
            by_phase[1][""] = by_phase[1][""][0], part[-1]
        forward, backward = (
            [_Span(units[path], *ends) for path, ends in sorted(spans.items(), key=lambda row: (row[1][0], row[0]))]
            for spans in by_phase
        )
        return forward, backward

    # -- the optimizer's step --------------------------------------------------------------------------------------
    def stepping(self, peak: int, states: int, whole: Whole) -> int:
        """Return the peak of the optimizer step.

        Args:
            peak: Peak of the step on the parameters of this process, ``states`` included.
            states: Bytes of its optimizer states.
            whole: Bytes of the unsharded model.
        """
        if self.strategy.parameters or not self.strategy.states:
            return peak
        gradients = self.part(whole.gradients) if self.strategy.gradients else whole.gradients
        replicated = whole.parameters - self.part(whole.parameters) + gradients - self.part(whole.gradients)
        buffers = self.part(whole.together) + whole.together + int(self.staged * whole.together)
        held = whole.parameters + gradients + states
        return max(peak + replicated, held + buffers)


def share_(model: nn.Module, sharing: Sharing, times: Mapping[Tensor, int]) -> Whole:
    """Replace the parameters of a fake ``model`` by shards, if the strategy steps shards; return the original bytes.

    ``times``: of how many equal parameters one stands for all, if it is not one.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters for _ in range(times.get(p, 1)) if p.requires_grad]
    sizes = [[p.nbytes for p in trained if p.dtype == dtype] for dtype in {p.dtype for p in trained}]
    whole = Whole(
        sum(p.nbytes * times.get(p, 1) for p in parameters),
        sum(map(sum, sizes)),
        max((min(sum(row), max(BUCKET_BYTES, *row)) for row in sizes), default=0),
    )
    if sharing.shards > 1 and sharing.strategy.states:
        shares = {p: nn.Parameter(_rows(p, sharing.shards), p.requires_grad) for p in parameters}
        for module in model.modules():
            module._parameters.update({name: shares[p] for name, p in module._parameters.items() if p is not None})
    return whole


def _rows(parameter: Tensor, shards: int) -> Tensor:
    """Return a tensor like the first shard of rows."""
    if not parameter.dim():
        return torch.empty_like(parameter)
    rows, *rest = parameter.shape
    return parameter.new_empty(-(-rows // shards), *rest)


def _accumulates(usage: Estimate, holding: Holding) -> bool:
    """Return whether this is a gradient that is freed when it is added to the gradient of an earlier micro-batch."""
    if holding.kind != "temporaries" or holding.died == math.inf:
        return False
    last = usage.ops[int(holding.died)]
    return last.phase == "backward" and last.layer == OUTSIDE and last.name == "aten.add_.Tensor"


def _in_order(gradients: Sequence[Holding], limit: int) -> Iterator[list[Holding]]:
    """Yield buckets of gradients, in the order in which they are computed."""
    bucket: list[Holding] = []
    for holding in sorted(gradients, key=lambda holding: holding.born):
        if bucket and sum(member.bytes for member in bucket) + holding.bytes > limit:
            yield bucket
            bucket = []
        bucket.append(holding)
    if bucket:
        yield bucket


def unit_of(layer: str, units: Container[str]) -> str:
    """Return the unit among ``units`` that contains a layer; "" if there is none."""
    path = layer
    while path not in units and "." in path:
        path = path.rpartition(".")[0]
    return path if path in units else ""
