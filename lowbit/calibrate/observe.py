"""Counting what the layers of a block are given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lowbit.calibrate.blocks import Chain
from lowbit.calibrate.observed import Observed
from lowbit.calibrate.observers import Ranges
from lowbit.calibrate.statistics import Statistics

__all__ = ["Recorder", "inputs_of", "mask_of", "stages"]


class Recorder:
    """Counts the inputs of ``layers``; those that are given the same tensors have one Statistics.

    ``need``: of what the Statistics are to tell. ``histogram``: whether static ranges need one; None where no layer's
    range is asked for. ``rotated``: whether they are counted after the transform of the layer's recipe.
    """

    def __init__(self, layers: Sequence[Observed], need: str, histogram: bool | None, rotated: bool = True) -> None:
        self.layers, self.need, self.histogram, self.rotated = layers, need, histogram, rotated
        self.journal: list[tuple[Observed, Tensor]] = []
        for layer in layers:
            layer.journal, layer.statistics = self.journal, None

    def count(self, number: int, batch: Any, plain: dict[str, list[Tensor]] | None) -> None:
        """Add the inputs of ``batch``, which the layers have just had, without those of padding."""
        mask = mask_of(batch)
        for layer, inputs in self._owners().values():
            found = layer.statistics
            assert found is not None
            none = [None] * len(inputs)
            plains = none if plain is None else plain[layer.name]
            weights = none if layer.importance is None else layer.importance[number]
            for x, before, weight in zip(inputs, plains, weights, strict=True):
                if mask is not None and layer.window is None and x.shape[:-1] == mask.shape:
                    x = x[mask]
                    before, weight = (None if one is None else one[mask] for one in (before, weight))
                if self.rotated:
                    x, before = layer.rotated(x), None if before is None else layer.rotated(before)
                try:
                    found.update(x, before, weight, layer.window)
                except ValueError as error:
                    raise ValueError(f"layer {layer.name!r}, batch {number}: {error}") from None

    def _owners(self) -> dict[tuple[object, ...], tuple[Observed, list[Tensor]]]:
        """Give each layer the Statistics that it shares with those that had the same inputs, in all batches so far; and
        take the inputs: of each Statistics once, with one of its layers.
        """
        owners: dict[tuple[object, ...], tuple[Observed, list[Tensor]]] = {}
        taken: set[int] = set()
        given = _by_layer(self.journal)
        self.journal.clear()
        for layer in self.layers:
            inputs = given.get(layer, [])
            if layer.statistics is None and not inputs:
                continue
            how = (layer.recipe.output.a, layer.recipe.rotation, layer.window, id(layer.importance))
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
        return Statistics(layer.weight.shape[1], self.need, device, ranges)

    def finish(self) -> None:
        """Sum up what other processes counted, and let go of the layers."""
        for layer in self.layers:
            layer.journal = None
            if layer.statistics is None:
                layer.statistics = self._empty(layer)
        Statistics.reduce({id(one): one for layer in self.layers if (one := layer.statistics) is not None}.values())


def mask_of(batch: Any) -> Tensor | None:
    """Where a batch of tokens is no padding, bool [B, T], where it says so; as transformers names it."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def inputs_of(layers: Sequence[Observed], chain: Chain, index: int, number: int) -> dict[str, list[Tensor]]:
    """What the layers of block ``index`` are given in batch ``number``."""
    return {layer.name: inputs for layer, inputs in _by_layer(_calls(layers, lambda: chain.run(index, number))).items()}


def stages(layers: Sequence[Observed], run: Callable[[], object]) -> list[list[Observed]]:
    """The layers in the order in which ``run`` calls them, those together that are given the same tensors; at last
    those that it does not call.
    """
    given = {layer: tuple(map(id, inputs)) for layer, inputs in _by_layer(_calls(layers, run)).items()}
    found: dict[tuple[int, ...], list[Observed]] = {}
    for layer, inputs in given.items():
        found.setdefault(inputs, []).append(layer)
    rest = [layer for layer in layers if layer not in given]
    return [*found.values(), *([rest] if rest else [])]


def _calls(layers: Sequence[Observed], run: Callable[[], object]) -> list[tuple[Observed, Tensor]]:
    journal: list[tuple[Observed, Tensor]] = []
    for layer in layers:
        layer.journal = journal
    run()
    for layer in layers:
        layer.journal = None
    return journal


def _by_layer(journal: Iterable[tuple[Observed, Tensor]]) -> dict[Observed, list[Tensor]]:
    found: dict[Observed, list[Tensor]] = {}
    for layer, x in journal:
        found.setdefault(layer, []).append(x)
    return found
