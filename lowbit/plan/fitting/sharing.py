"""What one of several processes holds in a step: the estimate of one process, with what a way to shard takes away from
it and what it gathers and reduces.

Times are those of the estimate: op ``i`` runs from ``i`` to ``i + 1``, what it frees goes at ``i + 0.5``. What a
process does between two ops lies in what is left before the next one.

Source: torch/distributed/fsdp/_fully_shard of torch 2.13: ``FSDPParamGroup.unshard`` and ``wait_for_unshard`` (a
buffer of what is gathered beside the parameters that it is copied to, kept in forward until the next are gathered),
``pre_backward`` (gathers the next while one computes), ``foreach_reduce`` (gradients, and a copy of them to be sent);
reducer.cpp of DistributedDataParallel (buckets, which are the gradients under ``gradient_as_bucket_view``).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowbit.checkpointing.block_table import blocks_of, parts_of
from lowbit.distributed.strategies import STRATEGIES, Strategy
from lowbit.distributed.zero import BUCKET_BYTES
from lowbit.memory.estimator import Estimate
from lowbit.memory.ledger import OUTSIDE
from lowbit.memory.usage import Holding
from lowbit.plan.settings import TrainingSettings

__all__ = ["Sharing", "Whole", "share_", "unit_of"]

#: By the type of a device, what its backend holds of its own while it gathers or scatters, as a multiple of the whole
#: that is sent: gloo copies it (ProcessGroupGloo.cpp: ``newLikeFlat`` of outputs, a clone of inputs), NCCL does not.
_STAGED = {"cpu": 1.0, "cuda": 0.0}

#: Moments after an op, in the order in which a process comes by them: gradients of a unit are reduced after the last op
#: of its backward, and parameters of the next are gathered before its first.
_RESHARD, _SENDING, _REDUCE, _SENT, _REDUCED = 0.55, 0.58, 0.62, 0.66, 0.70
_GATHER, _STAGED_UNTIL, _COPY, _COPIED = 0.75, 0.80, 0.85, 0.90


class Whole(NamedTuple):
    """Bytes of a model that is not shared: of ``parameters``, of ``gradients``, and of the parameters that
    ``zero1`` gathers ``together``.
    """

    parameters: int
    gradients: int
    together: int


class _Unit(NamedTuple):
    """What is gathered at once: a block, or all parameters outside of blocks. ``parameters``: bytes."""

    path: str
    parameters: int


class _Span(NamedTuple):
    """The ops, first and last, in which a unit is whole, in forward or in backward of one part."""

    unit: _Unit
    first: int
    last: int


@dataclass(frozen=True)
class Sharing:
    """Bytes by ``strategy`` of STRATEGIES, in which ``shards`` processes have a share each. ``units``: the paths of
    what is gathered at once.
    """

    strategy: Strategy
    shards: int
    units: tuple[str, ...] = ()
    staged: float = field(default=0.0)

    @classmethod
    def of(cls, settings: TrainingSettings, model: nn.Module) -> Sharing:
        """That of the settings, for this model."""
        device = next((p.device.type for p in model.parameters()), "cpu")
        return cls(STRATEGIES[settings.strategy], settings.group, tuple(blocks_of(model)), _STAGED.get(device, 0.0))

    def part(self, size: float) -> int:
        """The share of so many bytes."""
        return math.ceil(size / self.shards)

    # -- forward and backward --------------------------------------------------------------------------------------
    def applied(self, usage: Estimate) -> Estimate:
        """``usage``, which is of forward and backward without an optimizer, as one of the processes has it."""
        return usage.holding(self._fully(usage) if self.strategy.parameters else self._in_buckets(usage))

    def _in_buckets(self, usage: Estimate) -> Iterator[Holding]:
        """Buckets are there all the time; a gradient is copied to its bucket as soon as it is there."""
        size = 0
        for holding in usage.holdings:
            if holding.kind == "gradients":
                size += holding.bytes
                holding = holding._replace(kind="temporaries", died=min(holding.died, holding.born + 1.25))
            yield holding
        yield Holding(size, "gradients", OUTSIDE, -1, math.inf)

    def _fully(self, usage: Estimate) -> Iterator[Holding]:
        parts = parts_of(usage)
        spans = [self._spans(usage, part) for part in parts]
        yield from self._gathered(spans)
        ends = [{span.unit.path: span.last for span in backward} for _, backward in spans]
        sizes: dict[tuple[int, str], int] = {}
        for one in usage.holdings:
            if one.kind == "parameters":
                yield one._replace(bytes=self.part(one.bytes))
                continue
            again = _adds_up(usage, one)
            if one.kind != "gradients" and not again:
                yield one
                continue
            number = next(index for index, part in enumerate(parts) if one.born <= part[-1])
            unit = self._unit(one.layer)
            until = ends[number].get(unit, parts[number][-1]) + _REDUCE
            sizes[number, unit] = sizes.get((number, unit), 0) + one.bytes
            yield one._replace(died=until)
            if not again:
                yield one._replace(bytes=self.part(one.bytes), born=until)
        for number, (_, backward) in enumerate(spans):
            mine = {unit: size for (of, unit), size in sizes.items() if of == number}
            yield from self._reduced(backward, mine, again=number > 0)

    def _gathered(self, parts: Sequence[tuple[list[_Span], list[_Span]]]) -> Iterator[Holding]:
        """What units gather, and the buffers through which it comes."""
        every_time = self.strategy.gathered == "a block"
        for forward, backward in parts:
            ends = {span.unit: span.last for span in backward}
            for span, following in zip(forward, [*forward[1:], None], strict=True):
                begun = span.first - 1
                # The buffer is kept until the next is gathered, that of the last until the model has answered.
                until = forward[0].last + _RESHARD if following is None else following.first - 1 + _COPY
                yield self._held(span.unit, begun + _GATHER, until)
                yield self._held(span.unit, begun + _GATHER, begun + _STAGED_UNTIL, self.staged)
                kept = span.last if every_time else ends.get(span.unit, math.inf)
                yield self._held(span.unit, begun + _COPY, kept + _RESHARD)
            for before, span in zip([None, *backward[:-1]], backward, strict=True) if every_time else ():
                begun = span.first - 1
                ahead = begun + _GATHER if before is None else before.first - 1 + _COPIED
                yield self._held(span.unit, ahead, begun + _COPIED)
                yield self._held(span.unit, ahead, ahead + _STAGED_UNTIL - _GATHER, self.staged)
                yield self._held(span.unit, begun + _COPY, span.last + _RESHARD)

    def _reduced(self, backward: Sequence[_Span], sizes: Mapping[str, int], again: bool) -> Iterator[Holding]:
        """Through what gradients of so many bytes a unit are summed in one part: a copy, which is kept until the next
        unit is reduced, and where there is a share already (``again``) one that is added to it.
        """
        order = sorted(backward, key=lambda span: span.last)
        for span, following in zip(order, [*order[1:], None], strict=True):
            size, end = sizes.get(span.unit.path, 0), span.last
            until = end + _REDUCED if following is None else following.last + _RESHARD
            yield self._buffer(span.unit, size, end + _SENDING, until)
            yield self._buffer(span.unit, int(self.staged * size), end + _REDUCE, end + _SENT)
            if again:
                yield self._buffer(span.unit, self.part(size), end + _REDUCE, end + _REDUCED)

    def _buffer(self, unit: _Unit, size: int, born: float, died: float) -> Holding:
        return Holding(size, "temporaries", unit.path, born, died)

    def _held(self, unit: _Unit, born: float, died: float, times: float = 1.0) -> Holding:
        return Holding(int(times * unit.parameters), "weight copies", unit.path, born, died)

    # -- units -----------------------------------------------------------------------------------------------------
    def _unit(self, layer: str) -> str:
        """The path of the unit that a layer is of; empty for what is outside of blocks."""
        return unit_of(layer, self.units)

    def _sizes(self, usage: Estimate) -> dict[str, _Unit]:
        sizes = dict.fromkeys(("", *self.units), 0)
        for holding in usage.holdings:
            if holding.kind == "parameters":
                sizes[self._unit(holding.layer)] += holding.bytes
        return {path: _Unit(path, size) for path, size in sizes.items()}

    def _spans(self, usage: Estimate, part: range) -> tuple[list[_Span], list[_Span]]:
        """In the order of their beginning, the spans in forward and in backward of one part. What is outside of blocks
        is whole as long as the model runs.
        """
        units = self._sizes(usage)
        found: tuple[dict[str, tuple[int, int]], ...] = ({}, {})
        for index in part:
            op = usage.ops[index]
            if op.layer == OUTSIDE:
                continue
            spans = found[op.phase != "forward"]
            for path in {"", self._unit(op.layer)}:
                spans[path] = spans.get(path, (index, index))[0], index
        if "" in found[1]:  # whose gradients are reduced at the end
            found[1][""] = found[1][""][0], part[-1]
        forward, backward = (
            [_Span(units[path], *ends) for path, ends in sorted(one.items(), key=lambda row: (row[1][0], row[0]))]
            for one in found
        )
        return forward, backward

    # -- the optimizer's step --------------------------------------------------------------------------------------
    def stepping(self, peak: int, states: int, whole: Whole) -> int:
        """The most that is held in a step of the optimizer, which holds ``peak`` on what it steps here, ``states``
        included.
        """
        if self.strategy.parameters or not self.strategy.states:
            return peak
        beside = whole.parameters - self.part(whole.parameters) + whole.gradients - self.part(whole.gradients)
        moved = self.part(whole.together) + whole.together + int(self.staged * whole.together)
        held = whole.parameters + whole.gradients + states
        return max(peak + beside, held + moved)


def share_(model: nn.Module, sharing: Sharing) -> Whole:
    """Let ``model``, which is fake, have a share of each parameter, in place, where processes step shares; returns what
    it had.
    """
    parameters = list(model.parameters())
    sizes = {dtype: [p.nbytes for p in parameters if p.dtype == dtype] for dtype in {p.dtype for p in parameters}}
    whole = Whole(
        sum(map(sum, sizes.values())),
        sum(p.nbytes for p in parameters if p.requires_grad),
        max(min(sum(row), max(BUCKET_BYTES, *row)) for row in sizes.values()),
    )
    if sharing.shards > 1 and sharing.strategy.states:
        shares = {p: nn.Parameter(_rows(p, sharing.shards), p.requires_grad) for p in parameters}
        for module in model.modules():
            module._parameters.update({name: shares[p] for name, p in module._parameters.items() if p is not None})
    return whole


def _rows(parameter: Tensor, shards: int) -> Tensor:
    """A tensor like the first share of rows."""
    if not parameter.dim():
        return torch.empty_like(parameter)
    rows, *rest = parameter.shape
    return parameter.new_empty(-(-rows // shards), *rest)


def _adds_up(usage: Estimate, holding: Holding) -> bool:
    """Whether it is a gradient that goes as it is added to that of an earlier part."""
    if holding.kind != "temporaries" or holding.died == math.inf:
        return False
    last = usage.ops[int(holding.died)]
    return last.phase == "backward" and last.layer == OUTSIDE and last.name == "aten.add_.Tensor"


def unit_of(layer: str, units: Container[str]) -> str:
    """The unit among ``units`` that a layer is of or in; empty where there is none."""
    path = layer
    while path not in units and "." in path:
        path = path.rpartition(".")[0]
    return path if path in units else ""
