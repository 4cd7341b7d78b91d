"""Layers that compute what they computed before, and tell what they are given."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.calibrate.statistics import Statistics
from lowbit.convert.engine import Task, convert, swap
from lowbit.convert.maker import Maker, measured
from lowbit.convert.protect import protections
from lowbit.convert.select import plain_layers
from lowbit.functional import fake_quantize, hadamard
from lowbit.models.writes import Unchanged
from lowbit.ops.conv import Window
from lowbit.recipes import Plan, Recipe
from lowbit.tensor.quantized import Quantized

__all__ = ["Journal", "Observed", "observed", "observed_layers"]


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


class _ObservedMaker(Maker[Observed]):
    """Makes the Observed layers of a model; those that share a weight share its name."""

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> Observed:
        return Observed(name, name, matrix, bias, recipe)

    def twin(self, first: Observed, name: str, matrix: Tensor, bias: Any) -> Observed:
        return Observed(name, first.weight_name, first.weight, bias, first.recipe)


def observed(model: nn.Module, plan: Plan, skip: Iterable[str]) -> nn.Module:
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
