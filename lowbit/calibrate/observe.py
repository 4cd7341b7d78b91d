"""Counting what the layers of a block are given."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from lowbit.calibrate.blocks import Chain
from lowbit.calibrate.observed import Observed
from lowbit.calibrate.observers import Ranges
from lowbit.calibrate.statistics import Statistics

__all__ = ["Recorder", "inputs_of"]


class Recorder:
    """Counts the inputs of ``layers``; those that are given the same tensors have one Statistics.

    ``need``: of what the Statistics are to tell. ``histogram``: whether static ranges need one; None where no layer's
    range is asked for.
    """

    def __init__(self, layers: Sequence[Observed], need: str, histogram: bool | None) -> None:
        self.layers, self.need, self.histogram = layers, need, histogram
        for layer in layers:
            layer.keeps, layer.inputs, layer.statistics = True, [], None

    def count(self, number: int, plain: dict[str, list[Tensor]] | None) -> None:
        """Add the inputs of batch ``number``, which the layers have just had."""
        for layer, inputs in self._owners().values():
            found = layer.statistics
            assert found is not None
            for x, before in zip(inputs, [None] * len(inputs) if plain is None else plain[layer.name], strict=True):
                try:
                    found.update(x, before)
                except ValueError as error:
                    raise ValueError(f"layer {layer.name!r}, batch {number}: {error}") from None

    def _owners(self) -> dict[tuple[object, ...], tuple[Observed, list[Tensor]]]:
        """Give each layer the Statistics that it shares with those that had the same inputs, in all batches so far; and
        take the inputs: of each Statistics once, with one of its layers.
        """
        owners: dict[tuple[object, ...], tuple[Observed, list[Tensor]]] = {}
        taken: set[int] = set()
        for layer in self.layers:
            inputs, layer.inputs = layer.inputs, []
            if layer.statistics is None and not inputs:
                continue
            key = (id(layer.statistics), layer.recipe.output.a, *map(id, inputs))
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
        features, device = layer.weight.shape[1], layer.weight.device
        ranges = None
        if self.histogram is not None and layer.recipe.static and layer.recipe.input is not None:
            ranges = Ranges(layer.recipe.input, features, histogram=self.histogram, device=device)
        return Statistics(features, self.need, device, ranges)

    def finish(self) -> None:
        """Sum up what other processes counted, and let go of the layers."""
        for layer in self.layers:
            layer.keeps = False
            if layer.statistics is None:
                layer.statistics = self._empty(layer)
        Statistics.reduce({id(one): one for layer in self.layers if (one := layer.statistics) is not None}.values())


def inputs_of(layers: Sequence[Observed], chain: Chain, index: int, number: int) -> dict[str, list[Tensor]]:
    """What the layers of block ``index`` are given in batch ``number``."""
    for layer in layers:
        layer.keeps, layer.inputs = True, []
    chain.run(index, number)
    for layer in layers:
        layer.keeps = False
    return {layer.name: layer.inputs for layer in layers}
