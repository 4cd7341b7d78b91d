"""calibrate: codes and scales of a model's weights, chosen with data, one block of the model after the other."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.calibrate.blocks import Chain, feed
from lowbit.calibrate.calibration import Calibration, Row, digest
from lowbit.calibrate.methods import METHODS, Method, default_method, find
from lowbit.calibrate.observed import Observed, Observer
from lowbit.calibrate.statistics import NEEDS, Statistics
from lowbit.casts import refuse_beyond
from lowbit.convert.engine import Task, convert, swap, uncompiled
from lowbit.convert.maker import measured, require_numbers
from lowbit.convert.select import DEFAULT_SKIP, plain_layers, protections
from lowbit.memory.checkpoint import find_blocks
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Plan, Recipe, plan

__all__ = ["calibrate"]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any] | None,
    recipe: str | Recipe | Plan | Mapping[str, str | Recipe | None],
    method: str | Method | None = None,
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    progress: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Choose codes and scales for the weights of ``model``, which stays as it is, and return them.

    ``batches``: what the model is called with: a tensor as it is, a tuple by position, a dict by keyword. A few
    thousand tokens, or some hundred images, of what the model will see. None, or none: only for methods that need no
    data. ``recipe``, ``skip``: as for ``quantize_``. ``method``: one of ``lowbit.calibrate.METHODS``; None: the best
    one known for each weight. ``progress(what, done, total)`` is called before each block.

    A model that is a stack of blocks is taken one block after the other. The inputs that a block's layers are measured
    by are those that the quantized blocks before it give, and no more than one block's are held. Other models are taken
    whole.

    Raises ValueError: as ``quantize_``; for a method that needs data without any, or that has nothing to offer for a
    weight; for NaN or Inf in a layer's inputs. TypeError for batches of other types.
    Warns of layers that no batch reaches; their weights are chosen without data.
    """
    started = time.perf_counter()
    chosen = plan(recipe)
    for one in chosen.recipes:
        refuse_beyond(one, "calibrate", ("output.a", "output.b"))
    data = [] if batches is None else list(batches)
    run = _Run(uncompiled(model), data, chosen, None if method is None else find(method), skip)
    run.all(progress or (lambda what, done, total: None))
    run.found.seconds = time.perf_counter() - started
    return run.found


class _Run:
    """One call of ``calibrate``. ``work``: a copy of the model, sharing its tensors, that is quantized on the way."""

    def __init__(
        self, model: nn.Module, data: list[Any], plan: Plan, method: Method | None, skip: Iterable[str]
    ) -> None:
        skip = skip if skip is DEFAULT_SKIP or isinstance(skip, str) else tuple(skip)
        self.data, self.method = data, method
        self.work = _observed(model, plan, skip)
        self.found = Calibration(data=digest(data) if data else None)
        self.chain: Chain | None = None
        self.plain: Chain | None = None  # of the model as it was, where a method compares with it
        layers = _layers(self.work)
        self.need = max((self._uses(layer) for layer in layers), key=NEEDS.index)
        if self.need == "nothing":
            return
        self.chain = _chain(self.work, data)
        if self.need == "cross":
            self.plain = _chain(_observed(model, plan, skip), data)
            if self.chain is None or self.plain is None:
                raise ValueError(
                    "ls-gptq compares blocks that follow one another with those of the unquantized model, and this "
                    "model is no such stack; use method='gptq'"
                )

    def _uses(self, layer: Observed) -> str:
        """What is to be known of a layer's inputs. Raises ValueError where the method cannot serve the layer."""
        weight = layer.recipe.weight
        method = self.method_for(layer)
        reason = method.refuses(weight)
        if reason is not None:
            raise ValueError(f"layer {layer.name!r}: method {method.name!r} cannot serve it: {reason}")
        if self.data:
            return method.uses
        if method.need != "nothing":
            raise ValueError(f"method {method.name!r} needs data; give batches, or one of {_without_data()}")
        return "nothing"

    def method_for(self, layer: Observed) -> Method:
        """How the layer's weight is chosen."""
        return self.method or default_method(layer.recipe.weight, bool(self.data))

    # -- the way through the model ------------------------------------------------------------------------------------
    def all(self, progress: Callable[[str, int, int], None]) -> None:
        """Solve every layer."""
        chain = self.chain
        blocks = [] if chain is None else chain.blocks
        for index, block in enumerate(blocks):
            assert chain is not None
            progress("block", index, len(blocks))
            layers = _layers(block)
            if layers:
                self._observe(layers, index)
                self._replace(block, layers)
            chain.advance(index)
            if self.plain is not None:
                self.plain.advance(index)
        progress("block", len(blocks), len(blocks))
        rest = _layers(self.work)
        if rest:
            self._observe(rest, None)
            self._replace(self.work, rest)

    def _observe(self, layers: Sequence[Observed], index: int | None) -> None:
        """Run the batches through block ``index``, or through what is outside of the blocks, and count the inputs."""
        needs = {self._uses(layer) for layer in layers}
        if needs == {"nothing"}:
            return
        need = max(needs, key=NEEDS.index)
        if index is None and need == "cross":
            need = "gram"
        recorder = _Recorder(layers, need)
        for number in range(len(self.data)):
            if index is None:
                self._run_outside(number)
                recorder.count(number, None)
                continue
            assert self.chain is not None
            plain = None
            if need == "cross":
                assert self.plain is not None
                plain = _inputs(_layers(self.plain.blocks[index]), self.plain, index, number)
            self.chain.run(index, number)
            recorder.count(number, plain)
        recorder.finish()

    def _run_outside(self, number: int) -> None:
        if self.chain is None:
            feed(self.work, self.data[number])
            return
        with self.chain.replayed(number):
            feed(self.work, self.data[number])

    # -- a layer ------------------------------------------------------------------------------------------------------
    def _replace(self, root: nn.Module, layers: Sequence[Observed]) -> None:
        """Solve the layers of ``root`` and put quantized ones in their place."""
        made: dict[int, nn.Module] = {}
        for layer in layers:
            if layer.name not in self.found.rows:
                self._solve(layer)
            made[id(layer)] = QuantLinear(self.found.weights[layer.name], layer.bias, layer.recipe)
        swap(root, made)

    def _solve(self, layer: Observed) -> None:
        scheme, method, statistics = layer.recipe.weight, self.method_for(layer), layer.statistics
        if statistics is not None and not statistics.rows:
            warnings.warn(f"calibrate: no batch reaches {layer.name}; its weight is chosen without data", stacklevel=5)
            statistics = None
        if statistics is None and method.need != "nothing":
            method = METHODS["search"]
        if statistics is not None and NEEDS.index(statistics.need) < NEEDS.index(method.need):
            method = METHODS["gptq"]
        try:
            require_numbers(layer.weight)
            weight = layer.weight.float()
            q = method.solve(weight, scheme, statistics)
        except (ValueError, TypeError) as error:
            raise type(error)(f"layer {layer.name!r}: {error}") from error
        wrong = q.dequantize(torch.float32).sub_(weight)
        self.found.weights[layer.name] = replace(q, dtype=layer.weight.dtype)
        self.found.rows[layer.name] = Row(
            layer.recipe, method.name, digest(layer.weight), _decibel(weight, wrong, None),
            None if statistics is None else _decibel(weight, wrong, statistics),
        )  # fmt: skip
        layer.statistics = None


class _Recorder:
    """Counts the inputs of layers; those that are given the same tensors have one Statistics."""

    def __init__(self, layers: Sequence[Observed], need: str) -> None:
        self.layers, self.need = layers, need
        for layer in layers:
            layer.keeps, layer.inputs = True, []

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

    def _owners(self) -> dict[tuple[int, ...], tuple[Observed, list[Tensor]]]:
        """Give each layer the Statistics that it shares with those that had the same inputs, in all batches so far; and
        take the inputs: of each Statistics once, with one of its layers.
        """
        owners: dict[tuple[int, ...], tuple[Observed, list[Tensor]]] = {}
        taken: set[int] = set()
        for layer in self.layers:
            inputs, layer.inputs = layer.inputs, []
            if layer.statistics is None and not inputs:
                continue
            key = (id(layer.statistics), *map(id, inputs))
            if key in owners:
                layer.statistics = owners[key][0].statistics
                continue
            owners[key] = layer, inputs
            if layer.statistics is None:
                layer.statistics = Statistics(inputs[0].shape[-1], self.need, inputs[0].device)
            elif id(layer.statistics) in taken:  # until now the two layers had the same inputs
                layer.statistics = copy.deepcopy(layer.statistics)
            taken.add(id(layer.statistics))
        return owners

    def finish(self) -> None:
        """Sum up what other processes counted, and let go of the layers."""
        for layer in self.layers:
            layer.keeps = False
            if layer.statistics is None:
                layer.statistics = Statistics(layer.weight.shape[1], self.need, layer.weight.device)
        found = [layer.statistics for layer in self.layers if layer.statistics is not None]
        Statistics.reduce({id(one): one for one in found}.values())


def _inputs(layers: Sequence[Observed], chain: Chain, index: int, number: int) -> dict[str, list[Tensor]]:
    """What the layers of a block are given in one batch."""
    for layer in layers:
        layer.keeps, layer.inputs = True, []
    chain.run(index, number)
    for layer in layers:
        layer.keeps = False
    return {layer.name: layer.inputs for layer in layers}


def _observed(model: nn.Module, plan: Plan, skip: Iterable[str]) -> nn.Module:
    """A copy of ``model`` that shares its tensors, in eval mode, with Observed layers for those to be quantized."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    work = copy.deepcopy(model, shared).eval()
    config: Any = getattr(work, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache would keep every batch, and the blocks are called more than once
    names, protect = protections(work, skip, plan, unties=True)
    observer = Observer(work)

    def measure(layer: nn.Module, made: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
        return measured(layer, made, 0, math.nan)

    task = Task(
        "calibrate", "nn.Linear, nn.Conv2d, nn.MultiheadAttention", plain_layers(), observer.convert, measure, swap
    )
    convert(work, task, plan, names, protect)
    return work


def _chain(model: nn.Module, data: Sequence[Any]) -> Chain | None:
    """The blocks of ``model`` with the inputs of the first, where they are a chain."""
    try:
        chain = Chain(find_blocks(model))
    except ValueError:
        return None
    return chain if chain.record(model, data) else None


def _layers(module: nn.Module) -> list[Observed]:
    return [layer for layer in module.modules() if isinstance(layer, Observed)]


def _without_data() -> str:
    return ", ".join(method.name for method in METHODS.values() if method.need == "nothing")


def _decibel(weight: Tensor, wrong: Tensor, statistics: Statistics | None) -> float:
    """10 log10 of the energy of ``weight`` over that of ``wrong``; of outputs, where statistics of inputs are given."""

    def energy(matrix: Tensor) -> float:
        if statistics is None:
            return float(matrix.square().sum(dtype=torch.float64))
        if NEEDS.index(statistics.need) >= NEEDS.index("gram"):
            return float(((matrix @ statistics.gram) * matrix).sum(dtype=torch.float64))
        return float((matrix.square() @ statistics.squares).sum(dtype=torch.float64))

    signal, noise = energy(weight), energy(wrong)
    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
