"""Counting what the layers of a block are given."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.calibrate.batches import feed, mask_of
from lowbit.calibrate.chain import Chain, same
from lowbit.calibrate.observed import Journal, Observed
from lowbit.calibrate.observers import Ranges, processes
from lowbit.calibrate.statistics import Statistics

__all__ = ["Recorder", "follows", "inputs_of", "stages"]


class Recorder:
    """Counts the inputs of ``layers``; layers with the same inputs share one Statistics.

    ``need``: the statistics that a method requires, one of ``statistics.NEEDS``. ``histogram``: whether the observer of
    static ranges needs a histogram; None where no static ranges are wanted. ``rotated``: whether inputs are counted
    after the transform of the layer's recipe.
    """

    def __init__(self, layers: Sequence[Observed], need: str, histogram: bool | None, rotated: bool = True) -> None:
        self.layers, self.need, self.histogram, self.rotated = layers, need, histogram, rotated
        self.copies = False
        self.strayed: set[Observed] = set()
        for layer in layers:
            layer.statistics = None

    def count(
        self,
        number: int,
        batch: Any,
        run: Callable[[], object],
        plain: Mapping[str, list[Tensor]] | None = None,
        positions: frozenset[int] = frozenset(),
    ) -> None:
        """Add what the layers are given in ``run`` of ``batch``, without padding. ``plain``: what they are given in the
        unquantized model. ``positions``: how many rows of a layer that is not given some of them can only have.
        """
        mask = mask_of(batch)
        journal = Journal.of(self.layers, run, self.copies)
        self.copies = journal.copies
        for layer, inputs in self._owners(journal.by_layer()).values():
            found = layer.statistics
            assert found is not None
            weights = None if layer.importance is None else layer.importance[number]
            plains = plain.get(layer.name, []) if plain is not None and found.need == "cross" else None
            if not _same_rows(layer, inputs, weights, plains, positions):
                self.strayed.add(layer)
                continue
            none = [None] * len(inputs)
            for x, before, weight in zip(inputs, plains or none, weights or none, strict=True):
                if mask is not None and layer.window is None and x.shape[:-1] == mask.shape:
                    x = x[mask]
                    before, weight = (None if one is None else one[mask] for one in (before, weight))
                if self.rotated:
                    x, before = layer.rotated(x), None if before is None else layer.rotated(before)
                try:
                    found.update(x, before, weight, layer.window)
                except ValueError as error:
                    raise ValueError(f"layer {layer.name!r}, batch {number}: {error}") from None

    def _owners(
        self, given: Mapping[Observed, list[Tensor]]
    ) -> dict[tuple[object, ...], tuple[Observed, list[Tensor]]]:
        """Give each layer the Statistics that it shares with those that had the same inputs, in all batches so far; and
        take the inputs: of each Statistics once, with one of its layers.
        """
        owners: dict[tuple[object, ...], tuple[Observed, list[Tensor]]] = {}
        taken: set[int] = set()
        for layer in self.layers:
            inputs = given.get(layer, [])
            if layer.statistics is None and not inputs:
                continue
            how = (layer.recipe.output.a, layer.recipe.rotation, layer.window, layer.picks, id(layer.importance))
            key = (id(layer.statistics), *how, *map(id, inputs))
            if key in owners:
                layer.statistics = owners[key][0].statistics
                continue
            owners[key] = layer, inputs
            if layer.statistics is None:
                layer.statistics = self._empty(layer)
            elif id(layer.statistics) in taken:  # until now the two layers had the same inputs
                layer.statistics = copy.deepcopy(layer.statistics)
            taken.add(id(layer.statistics))
        return owners

    def _empty(self, layer: Observed) -> Statistics:
        device = layer.weight.device
        ranges = None
        if self.histogram is not None and layer.recipe.static and layer.recipe.input is not None:
            ranges = Ranges(layer.recipe.input, layer.features, histogram=self.histogram, device=device)
        need = "gram" if layer.picks and self.need == "cross" else self.need
        return Statistics(layer.weight.shape[1], need, device, ranges)

    def finish(self) -> bool:
        """Sum up what other processes counted. False where the rows of a layer were not those that its importance, or
        the inputs in the unquantized model, are of: it does without them now, and all is to be counted once more.
        """
        strayed = [layer in self.strayed for layer in self.layers]
        if processes() > 1:
            votes = torch.tensor(strayed, dtype=torch.int32)
            dist.all_reduce(votes, dist.ReduceOp.MAX)
            strayed = votes.bool().tolist()
        for layer, astray in zip(self.layers, strayed, strict=True):
            if astray:
                layer.picks, layer.importance = True, None
            if layer.statistics is None:
                layer.statistics = self._empty(layer)
        if any(strayed):
            return False
        Statistics.reduce({id(one): one for layer in self.layers if (one := layer.statistics) is not None}.values())
        return True


def _same_rows(
    layer: Observed,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    plains: Sequence[Tensor] | None,
    positions: frozenset[int],
) -> bool:
    """Whether ``weights`` and ``plains``, which are of an earlier run, are of the rows that ``inputs`` are.

    Experts are given other tokens once the layers before the router are quantized, and may by chance be given as many.
    """
    if weights is None and plains is None:
        return True
    if any(other is not None and len(other) != len(inputs) for other in (weights, plains)):
        return False
    if layer.window is not None:
        return True
    rows = [math.prod(x.shape[:-1]) for x in inputs]
    if plains is not None and [tuple(x.shape) for x in plains] != [tuple(x.shape) for x in inputs]:
        return False
    if weights is not None and [weight.numel() for weight in weights] != rows:
        return False
    return not positions or all(any(count % whole == 0 for whole in positions) for count in rows)


def inputs_of(layers: Sequence[Observed], chain: Chain, index: int, number: int) -> dict[str, list[Tensor]]:
    """What the layers of block ``index`` are given in batch ``number``."""
    given = Journal.of(layers, lambda: chain.run(index, number)).by_layer()
    return {layer.name: inputs for layer, inputs in given.items()}


def follows(chain: Chain, model: nn.Module, batch: Any, layers: Sequence[Observed]) -> bool:
    """Whether ``chain`` gives its blocks, and ``layers``, which are outside of them, what ``model`` gives them when it
    is called as a whole, with ``batch``, the first one.
    """
    last: Tensor | None = None

    def whole() -> None:
        nonlocal last
        last = chain.whole(model, batch)

    def replayed() -> None:
        with chain.replayed(0):
            feed(model, batch)

    given = Journal.of(layers, whole, copies=True).by_layer()
    if last is None:
        return False
    first, chain.hidden[0] = chain.hidden[0], last
    try:
        return same(given, Journal.of(layers, replayed, copies=True).by_layer())
    finally:
        chain.hidden[0] = first


def stages(layers: Sequence[Observed], run: Callable[[], object]) -> list[list[Observed]]:
    """The layers in the order in which ``run`` calls them, those together that are given the same tensors; at last
    those that it does not call.
    """
    given = {layer: tuple(map(id, inputs)) for layer, inputs in Journal.of(layers, run).by_layer().items()}
    found: dict[tuple[int, ...], list[Observed]] = {}
    for layer, inputs in given.items():
        found.setdefault(inputs, []).append(layer)
    rest = [layer for layer in layers if layer not in given]
    return [*found.values(), *([rest] if rest else [])]
