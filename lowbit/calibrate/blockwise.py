"""Quantizes the weights of a model block by block, each with the inputs from the quantized blocks before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.calibrate.calibration import Calibration, Row
from lowbit.calibrate.choice import Choice
from lowbit.calibrate.identity import digest
from lowbit.calibrate.importance import weigh
from lowbit.calibrate.methods import METHODS, Method, default_method
from lowbit.calibrate.recording import (
    Observed,
    Recorder,
    follows,
    inputs_of,
    observed,
    observed_layers,
    positions,
    stages,
)
from lowbit.calibrate.resume import Finished
from lowbit.calibrate.statistics import NEEDS, Statistics
from lowbit.calibrate.transforms import transform_
from lowbit.calibrate.weights import InMemory
from lowbit.convert.engine import swap
from lowbit.convert.maker import decibel, require_numbers
from lowbit.convert.select import Skip
from lowbit.datafree import DATA_FREE
from lowbit.dist_utils import everywhere
from lowbit.models.batches import feed, kinds
from lowbit.models.blocks import Chain, largest_stack
from lowbit.models.losses import Loss
from lowbit.models.writes import despite_writes
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import LayerRecipes
from lowbit.user_warnings import warn

__all__ = ["Blockwise"]


class Blockwise:
    """One call of ``calibrate``.

    Attributes:
        work: A copy of the model, which shares its tensors and is quantized step by step.
        weights: Access to the weights, in memory or on disk.
        calibration: The result so far. If weights are on disk, only the quantized weights that are still needed.
        chain: The blocks of ``work``, if they follow one another.
        plain: The blocks of the unquantized model, for methods that compare with it.
    """

    def __init__(
        self,
        model: nn.Module,
        data: list[Any],
        recipes: LayerRecipes,
        choice: Choice,
        skip: Skip,
        finished: Finished | None,
        loss: Loss | None = None,
        weights: InMemory | None = None,
    ) -> None:
        self.data, self.choice, self.finished = data, choice, finished
        self.weights = weights or InMemory()
        self.gradient = True
        self.work = observed(model, recipes, skip)
        self.names = {id(module): name for name, module in self.work.named_modules()}
        self.calibration = Calibration(data=digest(data) if data else None)
        self.chain: Chain | None = None
        self.plain: Chain | None = None
        layers = observed_layers(self.work)
        need = max((self._uses(layer) for layer in layers), key=NEEDS.index)
        guided = [layer for layer in layers if self.method_for(layer).guided]
        if loss is not None and not guided:
            raise ValueError("calibrate: only method='guided-gptq' uses a loss; give that method, or no loss")
        self.static = any(layer.recipe.static for layer in layers)
        if need == "nothing" and not self.static and not choice.transforms and not self.weights.forgets:
            return
        self.weights.load(self.work, _blocks(self.work))
        self.chain = self._chain(self.work)
        if self.chain is None and self.weights.forgets:
            raise ValueError(
                f"{type(model).__name__} is not a chain of blocks, and must be calibrated in memory: load it, and call "
                f"lowbit.calibrate and lowbit.quantize_"
            )
        if guided:
            with self.weights.paged(_blocks(self.work)):
                self._weigh(guided, loss)
        comparing = [m for layer in layers if (m := self.method_for(layer)).tune or self._uses(layer) == "cross"]
        if comparing:
            plain = observed(model, recipes, skip)
            self.weights.load(plain, _blocks(plain))
            self.plain = self._chain(plain)
            if self.chain is None or self.plain is None:
                raise ValueError(
                    f"{comparing[0].name} compares each block with the unquantized model, and this model is not a "
                    f"chain of blocks; use method='gptq'"
                )

    def _chain(self, model: nn.Module) -> Chain | None:
        """The blocks of ``model`` with the inputs of the first; None if they are not a chain."""
        blocks = _blocks(model)
        if not blocks:
            return None
        chain = Chain(blocks)
        return chain if everywhere(self._is_chain(chain, model)) else None

    def _is_chain(self, chain: Chain, model: nn.Module) -> bool:
        """Record the calls of the blocks, and check that they are a chain for each kind of batch."""
        with self.weights.held(*chain.blocks[:2]):
            if not chain.record(model, self.data):
                return False
        inside = {id(module) for block in chain.blocks for module in block.modules()}
        outside = [layer for layer in observed_layers(model) if id(layer) not in inside]
        with self.weights.paged(chain.blocks):
            return all(follows(chain, model, self.data[number], number, outside) for number in kinds(self.data))

    def _uses(self, layer: Observed) -> str:
        """The statistics of its inputs that a layer needs. Raises ValueError if the method does not support it."""
        weight = layer.recipe.weight
        method = self.method_for(layer)
        reason = method.refuses(weight)
        if reason is not None:
            raise ValueError(f"layer {layer.name!r}: method {method.name!r} does not support this weight: {reason}")
        if self.data:
            return method.uses
        if method.need != "nothing":
            raise ValueError(f"method {method.name!r} needs data; give batches, or one of {', '.join(DATA_FREE)}")
        if self.choice.transforms:
            raise ValueError(f"{self.choice.transforms[0].name} needs data; give batches")
        if layer.recipe.static:
            raise ValueError(
                f"recipe {layer.recipe.name!r} has static input scales, which need calibration data; give batches, or "
                f"use a recipe with dynamic scales"
            )
        return "nothing"

    def method_for(self, layer: Observed) -> Method:
        return self.choice.weights or default_method(layer.recipe.weight, bool(self.data), self.gradient)

    def _weigh(self, layers: Sequence[Observed], loss: Loss | None) -> None:
        """Compute the importance of input rows. A default method falls back to gptq if there is no gradient."""
        try:
            weigh(self.work, layers, self.data, loss, checkpointed=self.chain is not None)
        except (ValueError, RuntimeError) as error:
            if self.choice.weights is not None or loss is not None:
                raise _worded("guided-gptq", error) from error
            self.gradient = False
            for layer in layers:
                layer.importance = None
            warn(
                f"calibrate: using gptq instead of guided-gptq, because the model's loss has no gradient ({error}); "
                f"give method='gptq', or loss=lambda output, batch: ..."
            )

    # -- blocks -------------------------------------------------------------------------------------------------------
    def all(self, progress: Callable[[str, int, int], None]) -> Calibration:
        """Quantize every layer. The quantized weights stay on disk if the model's weights are."""
        chain = self.chain
        blocks = [] if chain is None else chain.blocks
        for index, block in enumerate(blocks):
            assert chain is not None
            progress("block", index, len(blocks))
            with self.weights.held(*([block] if self.plain is None else [block, self.plain.blocks[index]])):
                self._restore_or_quantize(block, index)
                chain.advance(index)
                if self.plain is not None:
                    self.plain.advance(index)
        progress("block", len(blocks), len(blocks))
        self._restore_or_quantize(self.work, None)
        if not self.weights.forgets or self.finished is None:
            return self.calibration
        self.finished.close(len(blocks) + 1)
        calibration = self.finished.opened()
        assert calibration is not None
        return calibration

    def _restore_or_quantize(self, root: nn.Module, index: int | None) -> None:
        """Quantize block ``index``, or for None the layers outside of blocks, unless an earlier run has done it."""
        before = self.calibration.names()
        number = index if index is not None else 0 if self.chain is None else len(self.chain.blocks)
        part = None if self.finished is None else self.finished.load(number)
        if part is not None:
            self._restore(root, part)
        else:
            self._quantize(root, index)
            if self.finished is not None:
                self.finished.save(number, self.calibration.since(before))
        if self.weights.forgets:
            needed = {layer.weight_name for layer in observed_layers(self.work)}
            weights = self.calibration.weights
            self.calibration.weights = {name: q for name, q in weights.items() if name in needed}

    def _restore(self, block: nn.Module, part: Calibration) -> None:
        """Apply the result of an earlier run to a block."""
        self.calibration.add(part)
        for edit in part.edits:
            owner, _, name = edit.name.rpartition(".")
            self.work.get_submodule(owner).register_parameter(name, nn.Parameter(edit.value, requires_grad=False))
        self._put(block, observed_layers(block))

    def _quantize(self, root: nn.Module, index: int | None) -> None:
        layers = observed_layers(root)
        if not layers:
            return
        if index is not None or self.chain is None:
            for transform in self.choice.transforms:
                self._observe(layers, index, transform.need, None, rotated=False)
                self.calibration.add_edits(transform_(root, transform, self.names))
        if index is not None:
            self._tune(layers, index)
        for stage in self._stages(layers, index):
            need = max((self._uses(layer) for layer in stage), key=NEEDS.index)
            if index is None and need == "cross":
                need = "gram"
            self._observe(stage, index, need, self.choice.inputs.histogram)
            self._replace(root, stage)

    def _tune(self, layers: Sequence[Observed], index: int) -> None:
        """Run the methods that learn the layers of a block together, on its outputs in the unquantized model."""
        chain, plain = self.chain, self.plain
        for method in {m for layer in layers if (m := self.method_for(layer)).tune is not None}:
            assert chain is not None and plain is not None and method.tune is not None
            self._observe(layers, index, method.uses, None)
            learned = [layer for layer in layers if self.method_for(layer) is method and self._reached(layer)]
            targets = [plain.run(index, number) for number in range(len(self.data))]
            learn = partial(method.tune, learned, partial(chain.run, index), targets)
            try:
                with torch.enable_grad():
                    despite_writes(learn)
            except RuntimeError as error:
                raise _worded(method.name, error) from error

    @staticmethod
    def _reached(layer: Observed) -> bool:
        return layer.statistics is not None and layer.statistics.rows > 0

    def _stages(self, layers: Sequence[Observed], index: int | None) -> list[list[Observed]]:
        """The layers of a block in the order of their calls, so that each sees inputs from quantized layers.

        One stage outside of blocks, and if no more than squares are needed, which change little.
        """
        chain = self.chain
        squares = not self.static and all(self._uses(layer) in ("nothing", "squares") for layer in layers)
        if index is None or chain is None or squares:
            return [list(layers)]
        return stages(layers, lambda: chain.run(index, 0))

    def _observe(
        self,
        layers: Sequence[Observed],
        index: int | None,
        need: str,
        histogram: bool | None,
        rotated: bool = True,
    ) -> None:
        """Collect statistics of the inputs in block ``index``, or outside of blocks for None.

        ``rotated``: after the transform of the layer's recipe.
        """
        if need == "nothing" and (histogram is None or not self.static):
            return
        while True:
            recorder = Recorder(layers, need, histogram, rotated)
            for number, batch in enumerate(self.data):
                if index is None:
                    recorder.count(number, batch, partial(self._run_outside, number))
                    continue
                assert self.chain is not None
                plain = self._plain_inputs(layers, index, number) if need == "cross" else None
                run = partial(self.chain.run, index, number)
                recorder.count(number, batch, run, plain, positions(self.chain, index, number))
            if recorder.finish():
                return

    def _plain_inputs(self, layers: Sequence[Observed], index: int, number: int) -> dict[str, list[Tensor]]:
        """The inputs of ``layers`` in the unquantized model, with the factors of the transforms."""
        assert self.plain is not None
        plain = inputs_of(observed_layers(self.plain.blocks[index]), self.plain, index, number)
        for layer in layers:
            if layer.factors is not None and layer.name in plain:
                plain[layer.name] = [x.float() / layer.factors for x in plain[layer.name]]
        return plain

    def _run_outside(self, number: int) -> None:
        if self.chain is None:
            feed(self.work, self.data[number])
            return
        with self.chain.replayed(number):
            feed(self.work, self.data[number])

    # -- a layer ------------------------------------------------------------------------------------------------------
    def _replace(self, root: nn.Module, layers: Sequence[Observed]) -> None:
        """Quantize ``layers`` of ``root``. Warns of layers that no batch reaches."""
        unreached = []
        for layer in layers:
            try:
                if layer.weight_name not in self.calibration.rows:
                    if _without_rows(layer) and self.method_for(layer).uses != "nothing":
                        unreached.append(layer)
                    self._solve(layer)
                self._choose_input_scales(layer)
            except (ValueError, TypeError) as error:
                raise type(error)(f"layer {layer.name!r}: {error}") from error
        _warn_of(unreached)
        self._put(root, layers)

    def _put(self, root: nn.Module, layers: Sequence[Observed]) -> None:
        """Replace ``layers`` by quantized layers."""
        quantized: dict[int, nn.Module] = {}
        for layer in layers:
            scales = self.calibration.input_scales(layer.name, layer.recipe)
            weight = self.calibration.weights[layer.weight_name]
            quantized[id(layer)] = QuantLinear(weight, layer.bias, layer.recipe, scales)
        swap(root, quantized)

    def _solve(self, layer: Observed) -> None:
        scheme, method, statistics = layer.recipe.weight, self.method_for(layer), layer.statistics
        if _without_rows(layer):
            statistics = None
        if statistics is None and method.need != "nothing":
            method = METHODS["search"]
        if statistics is not None and NEEDS.index(statistics.need) < NEEDS.index(method.need):
            method = METHODS["gptq"]
        if method.guided and layer.importance is None:
            method = METHODS["gptq"]
        require_numbers(layer.weight)
        weight = layer.rotated(layer.weight.float())
        q = method.solve(weight, scheme, statistics) if layer.tuned is None else layer.tuned
        error = q.dequantize(torch.float32).sub_(weight)
        self.calibration.weights[layer.weight_name] = replace(q, dtype=layer.plain.dtype)
        self.calibration.rows[layer.weight_name] = Row(
            layer.recipe, method.name, digest(layer.plain), _energy(weight, None), _energy(error, None),
            None if statistics is None or statistics.need == "nothing"
            else decibel(_energy(weight, statistics), _energy(error, statistics)),
        )  # fmt: skip

    def _choose_input_scales(self, layer: Observed) -> None:
        if not layer.recipe.static:
            return
        ranges = None if layer.statistics is None else layer.statistics.ranges
        if ranges is None or not bool((ranges.low <= ranges.high).all()):
            raise ValueError(
                f"no batch reaches it, but its recipe {layer.recipe.name!r} has static input scales, which need data; "
                f"give batches that reach it, or leave it out with skip=..."
            )
        observer = self.choice.inputs
        self.calibration.inputs[layer.name] = ranges.scales(*observer.range(ranges)), observer.name


def _without_rows(layer: Observed) -> bool:
    """Whether there are statistics of the layer's inputs, without any rows."""
    return layer.statistics is not None and not layer.statistics.rows


def _warn_of(unreached: Sequence[Observed]) -> None:
    """Warn of layers that no batch reaches: once per mixture of experts, otherwise per layer."""
    by_mixture: dict[str, list[str]] = {}
    for layer in unreached:
        by_mixture.setdefault(_mixture(layer.name), []).append(layer.name)
    for mixture, names in by_mixture.items():
        if len(names) == 1:
            warn(f"calibrate: no batch reaches {names[0]}; its weight is chosen without data")
        else:
            warn(
                f"calibrate: no batch reaches {len(names)} layers in {mixture}, such as "
                f"{names[0]}; their weights are chosen without data; give more batches to reach them"
            )


def _mixture(name: str) -> str:
    """The module that contains the experts or blocks: the name before the number of an expert."""
    stack, _, number = name.partition("#")  # stacked experts are MODULE#NUMBER
    if number:
        return stack
    words = name.split(".")
    numbers = [position for position, word in enumerate(words) if word.isdigit()]
    if not numbers:
        return name
    return ".".join(words[: numbers[-1] - (numbers[-1] == len(words) - 1)])


def _worded(method: str, error: Exception) -> Exception:
    """The error of a method that needs gradients; an error of torch gets a remedy."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return error
    return RuntimeError(f"{method} needs gradients of the model, and torch says: {error}; method='gptq' needs none")


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The largest stack of blocks of ``model``; empty if it contains a block twice."""
    blocks = largest_stack(model)
    return blocks if len({id(block) for block in blocks}) == len(blocks) else []


def _energy(matrix: Tensor, statistics: Statistics | None) -> float:
    """The sum of squares of ``matrix``, or with ``statistics`` the mean squared output of a layer with this weight."""
    if statistics is None:
        return float(matrix.square().sum(dtype=torch.float64))
    if NEEDS.index(statistics.need) >= NEEDS.index("gram"):
        return float(((matrix @ statistics.gram) * matrix).sum(dtype=torch.float64))
    return float((matrix.square() @ statistics.squares).sum(dtype=torch.float64))
