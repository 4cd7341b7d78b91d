"""Records the inputs of layers: Observed layers, the Journal of one run, and the Recorder of statistics.

``observed`` returns a copy of a model whose layers compute the same and record their inputs. A ``Journal`` has the
inputs of one run, and a ``Recorder`` adds them to each layer's ``Statistics``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.calibrate.statistics import Statistics
from lowbit.convert.engine import Task, convert, swap
from lowbit.convert.maker import Maker, measured
from lowbit.convert.protect import protections
from lowbit.convert.select import Skip, plain_layers
from lowbit.dist_utils import exchange_device, processes
from lowbit.functional import fake_quantize, hadamard
from lowbit.models.batches import feed, mask_of
from lowbit.models.blocks import Chain, same
from lowbit.models.writes import Unchanged
from lowbit.observers import Ranges
from lowbit.ops.conv import Window
from lowbit.recipes import LayerRecipes, Recipe
from lowbit.tensor.quantized import Quantized

__all__ = [
    "Journal", "Observed", "Recorder", "follows", "inputs_of", "observed", "observed_layers", "positions", "stages",
]  # fmt: skip


class Observed(nn.Module):
    """``x @ weight.T + bias`` in floats, in place of a layer that will be a QuantLinear.

    Attributes:
        name: The layer's name in a Calibration.
        weight_name: The name of its weight, which is the name of the first layer with this weight.
        weight: The weight after transforms.
        plain: The weight in the model.
        statistics: Statistics of the inputs, shared by layers with the same inputs; None before they are collected.
        journal: Records the inputs; None if they are not recorded.
        picks: Whether the layer gets rows that the model picks, like an expert.
        rounding: Returns the weight to compute with while a method learns it.
        tuned: The learned weight.
        factors: The factors of the weight's columns from transforms.
        importance: Per batch and call, the weights of the input rows; None: all equal.
        watch: Called with the output, and returns it, while the importance is computed.
        window: The window of a convolution; None for a Linear.
    """

    lowbit_kind = "observed"
    bias: nn.Parameter | None

    def __init__(self, name: str, weight_name: str, weight: Tensor, bias: nn.Parameter | None, recipe: Recipe) -> None:
        super().__init__()
        self.name, self.weight_name, self.recipe = name, weight_name, recipe
        self.weight = self.plain = weight
        self.register_parameter("bias", bias)
        self.statistics: Statistics | None = None
        self.journal: Journal | None = None
        self.picks = False
        self.rounding: Callable[[], Tensor] | None = None
        self.tuned: Quantized | None = None
        self.factors: Tensor | None = None
        self.importance: list[list[Tensor]] | None = None
        self.watch: Callable[[Tensor], Tensor] | None = None
        self.window: Window | None = None

    def rotated(self, x: Tensor) -> Tensor:
        """Inputs, or the weight, after the transform of the recipe, ready to be quantized."""
        return x if self.recipe.rotation is None else hadamard(x, self.recipe.rotation)

    @property
    def features(self) -> int:
        """The size of an input's last dimension."""
        depth = self.weight.shape[1]
        return depth if self.window is None else depth // math.prod(self.window.kernel_size) * self.window.groups

    def forward(self, input: Tensor) -> Tensor:
        x, weight, bias = self._operands(input)
        return self._watched(F.linear(x, weight, bias))

    def conv(self, x: Tensor, window: Window) -> Tensor:
        """A convolution with this weight, as ``QuantLinear.conv``, but in learning ``x`` is quantized per pixel, not
        per patch.
        """
        self.window = window
        return self._watched(window.convolve(*self._operands(x)))

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.journal is not None:
            self.journal.note(self, x)
        weight = self.weight
        if self.rounding is not None:
            weight, x = self.rounding(), self.rotated(x)
        if self.rounding is not None and self.recipe.input is not None and not self.recipe.static:
            x = fake_quantize(x, self.recipe.input)
        return x, weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)

    def _watched(self, y: Tensor) -> Tensor:
        return y if self.watch is None else self.watch(y)


class _ObservedMaker(Maker[Observed]):
    """Makes Observed layers. Layers that share a weight share its name."""

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> Observed:
        return Observed(name, name, matrix, bias, recipe)

    def twin(self, first: Observed, name: str, matrix: Tensor, bias: Any) -> Observed:
        return Observed(name, first.weight_name, first.weight, bias, first.recipe)


def observed(model: nn.Module, recipes: LayerRecipes, skip: Skip) -> nn.Module:
    """A copy of ``model`` in eval mode with Observed layers. It shares parameters, but not buffers, which a forward
    pass may write to.
    """
    shared = {id(t): t for t in (*model.parameters(), *(b for b in model.buffers() if b.is_meta))}
    tensors = [leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor)]
    # Tensors that a forward pass left on modules, which deepcopy cannot copy.
    shared |= {id(t): t.detach().clone() for t in tensors if not t.is_leaf}
    work = copy.deepcopy(model, shared).eval()
    for module in work.modules():
        config: Any = getattr(module, "config", None)  # a model's decoder may have another one
        if hasattr(config, "use_cache"):
            config.use_cache = False  # a cache would keep every batch, and the blocks are called more than once
    names, protect = protections(work, skip, recipes, unties=True)
    maker = _ObservedMaker(work)

    def measure(layer: nn.Module, new: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
        return measured(layer, new, 0, math.nan)

    task = Task(
        "calibrate", "nn.Linear, nn.Conv1d to 3d, nn.MultiheadAttention", plain_layers(), maker.convert, measure, swap
    )
    convert(work, task, recipes, names, protect)
    return work


def observed_layers(module: nn.Module) -> list[Observed]:
    return [layer for layer in module.modules() if isinstance(layer, Observed)]


# -- recording and counting -------------------------------------------------------------------------------------------
class Journal:
    """The inputs of layers in the order of their calls, as ``entries`` (layer, input).

    ``copies``: whether inputs are copied, for models that write to them later. Calls with the same unmodified tensor
    share one copy.
    """

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self.entries: list[tuple[Observed, Tensor]] = []
        self.noted: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.unchanged: list[Unchanged] = []

    def note(self, layer: Observed, x: Tensor) -> None:
        if self.copies:
            key = (id(x), -1 - len(self.entries) if x.is_inference() else x._version)
            x = self.noted.setdefault(key, (x, x.clone()))[1]  # x is kept, so that no other tensor gets its id
        else:
            self.unchanged.append(Unchanged(x))
        self.entries.append((layer, x))

    @classmethod
    def of(cls, layers: Iterable[Observed], run: Callable[[], object], copies: bool = False) -> Journal:
        """The inputs of ``layers`` in ``run``, which is called again, with copies, if it writes to an input."""
        journal = cls(copies)
        for layer in layers:
            layer.journal = journal
        try:
            run()
        finally:
            for layer in layers:
                layer.journal = None
        if not all(journal.unchanged):
            return cls.of(layers, run, copies=True)
        journal.noted, journal.unchanged = {}, []
        return journal

    def by_layer(self) -> dict[Observed, list[Tensor]]:
        inputs: dict[Observed, list[Tensor]] = {}
        for layer, x in self.entries:
            inputs.setdefault(layer, []).append(x)
        return inputs


class Recorder:
    """Collects statistics of the inputs of ``layers``. Layers with the same inputs share one Statistics.

    Args:
        layers: The layers.
        need: The level of statistics, one of ``statistics.NEEDS``.
        histogram: Whether the observer of static ranges needs a histogram. None: no static ranges.
        rotated: Whether to count inputs after the transform of the layer's recipe.
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
        """Add the inputs of the layers in ``run``, without padding.

        Args:
            number: The batch's number.
            batch: The batch.
            run: Runs the model or block.
            plain: The inputs of the layers in the unquantized model.
            positions: The numbers of rows of layers that get all positions, as from ``positions``.
        """
        mask = mask_of(batch)
        journal = Journal.of(self.layers, run, self.copies)
        self.copies = journal.copies
        for layer, inputs in self._owners(journal.by_layer()).values():
            statistics = layer.statistics
            assert statistics is not None
            weights = None if layer.importance is None else layer.importance[number]
            plains = plain.get(layer.name, []) if plain is not None and statistics.need == "cross" else None
            if not _same_rows(layer, inputs, weights, plains, positions):
                self.strayed.add(layer)
                continue
            none = [None] * len(inputs)
            for x, before, weight in zip(inputs, plains or none, weights or none, strict=True):
                if mask is not None and layer.window is None and x.shape[:-1] == mask.shape:
                    x = x[mask]
                    before, weight = (None if rows is None else rows[mask] for rows in (before, weight))
                if self.rotated:
                    x, before = layer.rotated(x), None if before is None else layer.rotated(before)
                try:
                    statistics.update(x, before, weight, layer.window)
                except ValueError as error:
                    raise ValueError(f"layer {layer.name!r}, batch {number}: {error}") from None

    def _owners(
        self, by_layer: Mapping[Observed, list[Tensor]]
    ) -> dict[tuple[object, ...], tuple[Observed, list[Tensor]]]:
        """Give layers with the same inputs in all batches so far the same Statistics. Return each Statistics' inputs
        once, with one of its layers.
        """
        owners: dict[tuple[object, ...], tuple[Observed, list[Tensor]]] = {}
        taken: set[int] = set()
        for layer in self.layers:
            inputs = by_layer.get(layer, [])
            if layer.statistics is None and not inputs:
                continue
            treatment = (layer.recipe.output.a, layer.recipe.rotation, layer.window, layer.picks, id(layer.importance))
            key = (id(layer.statistics), *treatment, *map(id, inputs))
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
        """All-reduce the statistics over processes.

        Returns False if the rows of a layer did not match its importance or its inputs in the unquantized model. Such
        layers continue without both, and the caller must collect all statistics again.
        """
        strayed = [layer in self.strayed for layer in self.layers]
        if processes() > 1:
            votes = torch.tensor(strayed, dtype=torch.int32, device=exchange_device())
            dist.all_reduce(votes, dist.ReduceOp.MAX)
            strayed = votes.bool().tolist()
        for layer, astray in zip(self.layers, strayed, strict=True):
            if astray:
                layer.picks, layer.importance = True, None
            if layer.statistics is None:
                layer.statistics = self._empty(layer)
        if any(strayed):
            return False
        Statistics.reduce({id(s): s for layer in self.layers if (s := layer.statistics) is not None}.values())
        return True


def _same_rows(
    layer: Observed,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    plains: Sequence[Tensor] | None,
    positions: frozenset[int],
) -> bool:
    """Whether ``weights`` and ``plains``, from an earlier run, belong to the same rows as ``inputs``.

    Experts get other tokens once the layers before the router are quantized, by chance sometimes the same number.
    """
    if weights is None and plains is None:
        return True
    if any(earlier is not None and len(earlier) != len(inputs) for earlier in (weights, plains)):
        return False
    if layer.window is not None:
        return True
    rows = [math.prod(x.shape[:-1]) for x in inputs]
    if plains is not None and [tuple(x.shape) for x in plains] != [tuple(x.shape) for x in inputs]:
        return False
    if weights is not None and [weight.numel() for weight in weights] != rows:
        return False
    return not positions or all(any(count % size == 0 for size in positions) for count in rows)


def positions(chain: Chain, index: int, number: int) -> frozenset[int]:
    """The numbers of rows, or divisors of them, of layers in block ``index`` that get all positions of a batch.

    They come from the hidden state [B, T, features] and similar arguments. Layers with other numbers of rows get rows
    that the block picks. Empty if the hidden state has another number of dimensions.
    """
    hidden = chain.hidden[number]
    if hidden.dim() != 3:
        return frozenset()
    tensors = [leaf for leaf in tree_leaves(tuple(chain.calls[number][index])) if isinstance(leaf, Tensor)]
    similar = [t for t in tensors if t.dim() == 3 and t.shape[0] == hidden.shape[0]]
    return frozenset(x.shape[0] * x.shape[1] for x in (hidden, *similar)) - {0}


def inputs_of(layers: Sequence[Observed], chain: Chain, index: int, number: int) -> dict[str, list[Tensor]]:
    """The inputs of ``layers`` in block ``index`` for batch ``number``."""
    by_layer = Journal.of(layers, lambda: chain.run(index, number)).by_layer()
    return {layer.name: inputs for layer, inputs in by_layer.items()}


def follows(chain: Chain, model: nn.Module, batch: Any, number: int, layers: Sequence[Observed]) -> bool:
    """Whether the blocks of ``chain``, and ``layers`` outside of them, get the same inputs as in a call
    of ``model`` with batch ``number``.
    """
    last: Tensor | None = None

    def call() -> None:
        nonlocal last
        last = chain.whole(model, batch, number)

    def replayed() -> None:
        with chain.replayed(number):
            feed(model, batch)

    expected = Journal.of(layers, call, copies=True).by_layer()
    if last is None:
        return False
    before, chain.hidden[number] = chain.hidden[number], last
    try:
        return same(expected, Journal.of(layers, replayed, copies=True).by_layer())
    finally:
        chain.hidden[number] = before


def stages(layers: Sequence[Observed], run: Callable[[], object]) -> list[list[Observed]]:
    """The layers in the order of their calls in ``run``, grouped by the same inputs; then those without a call."""
    called = {layer: tuple(map(id, inputs)) for layer, inputs in Journal.of(layers, run).by_layer().items()}
    groups: dict[tuple[int, ...], list[Observed]] = {}
    for layer, inputs in called.items():
        groups.setdefault(inputs, []).append(layer)
    rest = [layer for layer in layers if layer not in called]
    return [*groups.values(), *([rest] if rest else [])]
