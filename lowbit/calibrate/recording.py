"""What layers are given while a model runs: layers that note it, the journal that they write, and what counts it.

``observed`` makes a copy of a model whose layers compute what they computed before and note what they are given. A
``Journal`` is what they were given in one run, and a ``Recorder`` adds that up to each layer's ``Statistics``.
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
    """``x @ weight.T + bias`` in floats, in the place of a layer that will be a QuantLinear.

    ``name``: what the layer is called in a Calibration; ``weight_name``: what its codes are called, which is the name
    of the first layer with this weight. ``plain``: the weight as the model has it, where a transform has changed
    ``weight``. ``statistics``: where its inputs are counted, shared with the layers that are given the same tensors;
    None: nowhere. ``journal``: where the layer notes its inputs; None: nowhere. ``picks``: whether the model picks by
    what it computes which rows the layer is given, as it does for experts. ``rounding``:
    gives the weight to compute with while a method learns it, and ``tuned`` is what it has learned. ``factors``: what
    transforms have multiplied the weight's columns with. ``importance``: for each batch and call how much each row of
    the inputs counts; None: all the same. ``watch``: what outputs go through while that is found. ``window``: of a
    convolution; None: of none.
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
        """Inputs, or the weight, after the transform of the recipe: what is quantized."""
        return x if self.recipe.rotation is None else hadamard(x, self.recipe.rotation)

    @property
    def features(self) -> int:
        """The length of an input's last axis."""
        depth = self.weight.shape[1]
        return depth if self.window is None else depth // math.prod(self.window.kernel_size) * self.window.groups

    def forward(self, input: Tensor) -> Tensor:
        x, weight, bias = self._operands(input)
        return self._watched(F.linear(x, weight, bias))

    def conv(self, x: Tensor, window: Window) -> Tensor:
        """A convolution with this weight, as ``QuantLinear.conv``. Where a method learns, ``x`` is quantized pixel by
        pixel for patch by patch.
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
    """Makes the Observed layers of a model; those that share a weight share its name."""

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> Observed:
        return Observed(name, name, matrix, bias, recipe)

    def twin(self, first: Observed, name: str, matrix: Tensor, bias: Any) -> Observed:
        return Observed(name, first.weight_name, first.weight, bias, first.recipe)


def observed(model: nn.Module, plan: LayerRecipes, skip: Skip) -> nn.Module:
    """A copy of ``model`` in eval mode, with Observed layers for those to be quantized. It shares the parameters; a
    buffer, which a forward pass may write to, it has for itself.
    """
    shared = {id(t): t for t in (*model.parameters(), *(b for b in model.buffers() if b.is_meta))}
    left = [leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor)]
    shared |= {id(t): t.detach().clone() for t in left if not t.is_leaf}  # of a forward pass, which deepcopy refuses
    work = copy.deepcopy(model, shared).eval()
    for module in work.modules():
        config: Any = getattr(module, "config", None)  # the decoder of a model may have one of its own
        if hasattr(config, "use_cache"):
            config.use_cache = False  # a cache would keep every batch, and the blocks are called more than once
    names, protect = protections(work, skip, plan, unties=True)
    maker = _ObservedMaker(work)

    def measure(layer: nn.Module, made: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
        return measured(layer, made, 0, math.nan)

    task = Task(
        "calibrate", "nn.Linear, nn.Conv1d to 3d, nn.MultiheadAttention", plain_layers(), maker.convert, measure, swap
    )
    convert(work, task, plan, names, protect)
    return work


def observed_layers(module: nn.Module) -> list[Observed]:
    """Those inside of ``module``."""
    return [layer for layer in module.modules() if isinstance(layer, Observed)]


# -- noting and counting ----------------------------------------------------------------------------------------------
class Journal:
    """What layers are given, in the order of their calls: ``entries`` of a layer and its input.

    ``copies``: inputs are copied as they come, for a model that writes to them afterwards. Calls with one tensor, which
    nothing has written to in between, have one copy.
    """

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self.entries: list[tuple[Observed, Tensor]] = []
        self.noted: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.unchanged: list[Unchanged] = []

    def note(self, layer: Observed, x: Tensor) -> None:
        """Add a call of ``layer``."""
        if self.copies:
            key = (id(x), -1 - len(self.entries) if x.is_inference() else x._version)
            x = self.noted.setdefault(key, (x, x.clone()))[1]  # x is kept, so that no other tensor gets its id
        else:
            self.unchanged.append(Unchanged(x))
        self.entries.append((layer, x))

    @classmethod
    def of(cls, layers: Iterable[Observed], run: Callable[[], object], copies: bool = False) -> Journal:
        """What ``layers`` are given in ``run``, which is called once more where something writes to that."""
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
        """The inputs of each layer that was called."""
        found: dict[Observed, list[Tensor]] = {}
        for layer, x in self.entries:
            found.setdefault(layer, []).append(x)
        return found


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


def positions(chain: Chain, index: int, number: int) -> frozenset[int]:
    """How many rows batch ``number`` gives to a layer of block ``index``, or a multiple of it: those of the hidden
    state [B, T, features], or of another argument of this kind. A layer with others is given what the block picks.
    Empty where the hidden state is of another kind.
    """
    hidden = chain.hidden[number]
    if hidden.dim() != 3:
        return frozenset()
    given = [leaf for leaf in tree_leaves(tuple(chain.calls[number][index])) if isinstance(leaf, Tensor)]
    alike = [other for other in given if other.dim() == 3 and other.shape[0] == hidden.shape[0]]
    return frozenset(x.shape[0] * x.shape[1] for x in (hidden, *alike)) - {0}


def inputs_of(layers: Sequence[Observed], chain: Chain, index: int, number: int) -> dict[str, list[Tensor]]:
    """What the layers of block ``index`` are given in batch ``number``."""
    given = Journal.of(layers, lambda: chain.run(index, number)).by_layer()
    return {layer.name: inputs for layer, inputs in given.items()}


def follows(chain: Chain, model: nn.Module, batch: Any, number: int, layers: Sequence[Observed]) -> bool:
    """Whether ``chain`` gives its blocks, and ``layers``, which are outside of them, what ``model`` gives them when it
    is called as a whole, with ``batch``, which has this number.
    """
    last: Tensor | None = None

    def whole() -> None:
        nonlocal last
        last = chain.whole(model, batch, number)

    def replayed() -> None:
        with chain.replayed(number):
            feed(model, batch)

    given = Journal.of(layers, whole, copies=True).by_layer()
    if last is None:
        return False
    before, chain.hidden[number] = chain.hidden[number], last
    try:
        return same(given, Journal.of(layers, replayed, copies=True).by_layer())
    finally:
        chain.hidden[number] = before


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
