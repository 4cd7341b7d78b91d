"""``lb.sensitivity``: estimates the loss of each layer of a model with each recipe."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.calibrate.recording import Journal, Observed, observed, observed_layers
from lowbit.convert.maker import Ruled, Source, decibel
from lowbit.convert.select import DEFAULT_SKIP, Skip
from lowbit.datafree import find_data_free
from lowbit.functional import fake_quantize
from lowbit.models.batches import batches_in, feed, mask_of
from lowbit.models.check import check_model, uncompiled
from lowbit.models.losses import Loss, predicted, token_loss
from lowbit.models.names import exact, patterns_in
from lowbit.models.ties import model_bytes
from lowbit.models.writes import despite_writes
from lowbit.ops.conv import spans_tensor
from lowbit.plan.bits import FLOAT, Score, Sensitivity
from lowbit.plan.layer_times import layer_times
from lowbit.progress import Progress, reporting
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes, refuse_beyond
from lowbit.recipes import recipe as find_recipe
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized
from lowbit.user_warnings import warn

__all__ = ["sensitivity"]


def sensitivity(
    model: nn.Module,
    recipes: Iterable[str | Recipe | None],
    batches: Iterable[Any],
    *,
    method: str | None = None,
    loss: Loss | None = None,
    skip: Skip = DEFAULT_SKIP,
    time: bool = False,
    progress: Progress | bool | None = None,
) -> Sensitivity:
    """Estimate the loss of each layer of ``model`` with each of ``recipes``. The model does not change.

    The estimate is the sum over tokens and outputs of (dL/dy (y_q - y))^2: y_q is the layer's output with quantized
    weight and input, L is the loss. This is the diagonal of the empirical Fisher information, as in TensorRT Model
    Optimizer's ``auto_quantize``. Without a loss it is the energy of y_q - y relative to the energy of y.

    Memory holds the activations of one batch, and the quantized weights of every recipe. Layers that not all recipes
    quantize are left out, with a warning. Layers that no batch reaches are warned of too.

    Args:
        model: Module to analyze.
        recipes: Recipes to choose from; None leaves a layer in high precision.
        batches: Batches, as for ``calibrate``.
        method: Quantization method of the weights, as for ``quantize_``.
        loss: ``loss(output, batch)``. None takes the cross-entropy of the next token if the model returns logits for
            token ids; other models have no loss.
        skip: Layers to skip, as for ``calibrate``.
        time: Also measure the time of each layer with each recipe, on this machine and with the layer's inputs in the
            first batch. Pass a batch of the size that the model will get, because few rows favor other recipes than
            many. Quantized layers are measured as ``quantize_`` and, on a CPU, ``prepack_`` leave them.
        progress: Called as ``progress(what, done, total)`` before each batch. None shows a bar on a terminal; False
            shows nothing.

    Returns:
        A Sensitivity. ``choose(bits=4.5)`` returns the best recipe for each layer, and with ``time`` also
        ``choose(time="0.8x")``.

    Raises:
        ValueError: If there are no recipes or no batches; for static recipes, a method that needs data, or NaN or Inf
            in a loss; and as ``quantize_``.
        TypeError: For batches of other types.
    """
    check_model(model)
    if isinstance(recipes, str | Recipe | LayerRecipes | Mapping):
        raise TypeError(
            f"sensitivity: expected a list of recipes to choose from, such as ['int4-weight-only', 'int8'], got a "
            f"{type(recipes).__name__}"
        )
    table = {FLOAT if r is None else find_recipe(r).name: None if r is None else find_recipe(r) for r in recipes}
    quantizing = [recipe for recipe in table.values() if recipe is not None]
    if not quantizing:
        raise ValueError("sensitivity: expected recipes to choose from, such as ['int4-weight-only', 'int8'], got none")
    for recipe in quantizing:
        refuse_beyond(recipe, "sensitivity", ("output.a", "output.b"))
    data = batches_in(batches)
    if not data:
        raise ValueError("sensitivity: expected batches of the model's inputs, got none")
    source = Ruled(find_data_free(method, "sensitivity"))
    model = uncompiled(model)
    skip = patterns_in(skip, "skip")
    with torch.no_grad(), reporting(progress, "measuring layers") as progress:
        run = _Run(model, table, source, skip)
        for number, batch in enumerate(data):
            progress("batch", number, len(data))
            run.count(batch, loss)
        progress("batch", len(data), len(data))
        if time:
            run.seconds = layer_times(model, run.owners(), table, data[0], progress)
    return run.result()


class _Sums:
    """Energies of a layer with a recipe, summed over all tokens."""

    def __init__(self) -> None:
        self.loss = self.input = self.input_error = self.output = self.output_error = 0.0


class _Run:
    """One call of ``sensitivity``, on a copy of the model that shares its tensors."""

    def __init__(self, model: nn.Module, table: Mapping[str, Recipe | None], source: Source, skip: Skip) -> None:
        self.table = table
        self.work = _observed_by_all(model, [recipe for recipe in table.values() if recipe is not None], skip)
        self.layers = observed_layers(self.work)
        for module in self.work.modules():  # shares the model's tensors, without gradients
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(p.detach(), requires_grad=False)
        self.codes: dict[tuple[str, str], tuple[Quantized, float]] = {}
        for layer in self.layers:
            for name, recipe in table.items():
                if recipe is not None and (layer.weight_name, name) not in self.codes:
                    self.codes[layer.weight_name, name] = _quantized(layer, recipe, source)
        self.sums = {(layer.name, name): _Sums() for layer in self.layers for name in table}
        self.inputs: dict[str, list[int]] = {layer.name: [] for layer in self.layers}
        self.by = "output"
        self.seconds: dict[str, dict[str | None, float]] | None = None
        self.mask: Tensor | None = None
        self.copies = False
        self._forget()

    def _forget(self) -> None:
        """Free the graph of a batch. Its hooks refer to this object in a cycle that Python's collector cannot see."""
        self.leaves: list[Tensor] = []
        self.journal = Journal()
        for layer in self.layers:
            layer.journal = layer.watch = None

    # -- a batch ------------------------------------------------------------------------------------------------------
    def count(self, batch: Any, loss: Loss | None) -> None:
        before = self.sums

        def run() -> None:
            self.sums = copy.deepcopy(before)
            try:
                self._run(batch, loss)
            finally:
                self._forget()

        despite_writes(run)

    def _run(self, batch: Any, loss: Loss | None) -> None:
        wanted = loss is not None or predicted(batch)[0] is not None
        self.mask = mask_of(batch)
        while True:
            self.leaves, self.journal = [], Journal(self.copies)
            for layer in self.layers:
                layer.journal, layer.watch = self.journal, self._called
            with torch.set_grad_enabled(wanted):
                output = feed(self.work, batch)
                value = (loss or token_loss)(output, batch) if wanted else None
            if loss is None and value is not None and not value.requires_grad:
                value = None
            if all(self.journal.unchanged):
                break
            self.copies = True  # the model writes to inputs of layers
        self._group()
        if value is None:
            for layer, x in self.journal.entries:
                self._add(layer, x.detach(), None)
            return
        if not bool(value.isfinite()):
            raise ValueError(
                f"sensitivity: the loss is {float(value)}; look for NaN or Inf in the model or the batches"
            )
        self.by = "loss"
        torch.autograd.grad(value, self.leaves, allow_unused=True)  # hooks of the layers add up the losses

    def _called(self, y: Tensor) -> Tensor:
        """Add a hook to the output ``y`` of the layer that was called last, to get its gradient."""
        if not torch.is_grad_enabled():
            return y
        layer, x = self.journal.entries[-1]
        leaf = torch.zeros((), dtype=y.dtype, device=y.device, requires_grad=True)
        self.leaves.append(leaf)
        x, y = x.detach(), y + leaf  # requires a gradient, even if no parameter does
        y.register_hook(lambda grad: self._add(layer, x, grad))
        return y

    @torch.no_grad()
    def _add(self, layer: Observed, x: Tensor, grad: Tensor | None) -> None:
        """Add the errors of each recipe for a layer's input ``x``. ``grad``: gradient of the layer's output."""
        if layer.window is None and self.mask is not None and x.shape[:-1] == self.mask.shape:
            x, grad = x[self.mask], None if grad is None else grad[self.mask]
        x = x.float()
        weight, rows = layer.weight.float(), _rows(layer, x)
        y = _product(rows, weight)
        energies = _energy(rows), _energy(y)
        for name, recipe in self.table.items():
            sums = self.sums[layer.name, name]
            sums.input, sums.output = sums.input + energies[0], sums.output + energies[1]
            if recipe is None:
                continue
            rounded = rows if recipe.input is None else _rounded(layer, x, rows, recipe.input)
            error = _product(rounded, self.codes[layer.weight_name, name][0].dequantize(torch.float32)) - y
            sums.input_error += _energy(rounded - rows)
            sums.output_error += _energy(error)
            if grad is not None:
                sums.loss += _energy(error * grad.reshape(y.shape).float())

    # -- groups of layers ---------------------------------------------------------------------------------------------
    def _group(self) -> None:
        """Record the inputs of each layer in this batch, as one number per tensor."""
        numbers: dict[int, int] = {}
        for layer, x in self.journal.entries:
            self.inputs[layer.name].append(numbers.setdefault(id(x), len(numbers)))
        for layer in self.layers:
            self.inputs[layer.name].append(-1)  # end of the batch

    def _groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of modules with the same inputs in all batches, or with a shared weight."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for layer in self.layers:
            inputs = self.inputs[layer.name]
            alike.setdefault(("weight", layer.weight_name), []).append(_module(layer.name))
            if any(number >= 0 for number in inputs):
                alike.setdefault(("inputs", *inputs), []).append(_module(layer.name))
        group = {name: index for index, name in enumerate(self.owners())}
        for names in alike.values():
            joined = {group[name] for name in names}
            group.update((name, min(joined)) for name, index in group.items() if index in joined)
        members: dict[int, list[str]] = {}
        for name, index in group.items():
            members.setdefault(index, []).append(name)
        return tuple(tuple(names) for names in members.values())

    def owners(self) -> list[str]:
        """The modules with measured layers, in the order of the model."""
        return list(dict.fromkeys(_module(layer.name) for layer in self.layers))

    def result(self) -> Sensitivity:
        scores: dict[str, dict[str, Score]] = {}
        counted: set[str] = set()
        for owner in self.owners():
            layers = [layer for layer in self.layers if _module(layer.name) == owner]
            first = [layer for layer in layers if layer.weight_name not in counted]  # a shared weight counts once
            counted |= {layer.weight_name for layer in layers}
            scores[owner] = {name: self._score(owner, name, layers, first) for name in self.table}
        missed = [layer.name for layer in self.layers if not any(number >= 0 for number in self.inputs[layer.name])]
        if missed:
            warn(f"sensitivity: no batch reaches {len(missed)} layers, such as {missed[0]}; their losses count as 0")
        plain = None if self.seconds is None else {owner: times[None] for owner, times in self.seconds.items()}
        return Sensitivity(scores, self._groups(), dict(self.table), self.by, model_bytes(self.work), plain)

    def _score(self, owner: str, name: str, layers: Sequence[Observed], first: Sequence[Observed]) -> Score:
        recipe = self.table[name]
        sums = [self.sums[layer.name, name] for layer in layers]
        output = sum(s.output_error for s in sums) / max(sum(s.output for s in sums), 1e-300)
        size = sum(
            layer.weight.nbytes if recipe is None else self.codes[layer.weight_name, name][0].nbytes for layer in first
        )
        noise = 0.0 if recipe is None else sum(self.codes[layer.weight_name, name][1] for layer in layers)
        signal = sum(_energy(layer.weight.float()) for layer in layers)
        return Score(
            owner, name, sum(layer.weight.numel() for layer in first), size,
            math.fsum(s.loss for s in sums) if self.by == "loss" else output, decibel(signal, noise),
            decibel(sum(s.input for s in sums), sum(s.input_error for s in sums)),
            decibel(sum(s.output for s in sums), sum(s.output_error for s in sums)),
            None if self.seconds is None else self.seconds[owner][None if recipe is None else name],
        )  # fmt: skip


def _quantized(layer: Observed, recipe: Recipe, source: Source) -> tuple[Quantized, float]:
    """Return a layer's quantized weight, and the energy of its error."""
    try:
        quantized, energies = source.weight(layer.name, layer.weight, recipe)
    except (ValueError, TypeError) as error:
        raise type(error)(f"layer {layer.name!r}: {error}") from error
    assert energies is not None
    return quantized, float(energies[1])


def _observed_by_all(model: nn.Module, recipes: Sequence[Recipe], skip: Skip) -> nn.Module:
    """Return ``observed`` with the layers that all recipes quantize. Warns of layers that only some quantize."""
    converted = [
        {_module(layer.name) for layer in observed_layers(observed(model, layer_recipes(recipe), skip))}
        for recipe in recipes
    ]
    partial = sorted(set().union(*converted) - converted[0].intersection(*converted))
    if partial:
        warn(
            f"sensitivity leaves out {len(partial)} layers that not all of the recipes quantize, such as {partial[0]}; "
            "pass other recipes, or choose the recipes of these layers yourself"
        )
    return observed(model, layer_recipes({"*": recipes[0], **dict.fromkeys(map(exact, partial))}), skip)


def _rows(layer: Observed, x: Tensor) -> Tensor:
    """Return the left operand of the matmul, ``x`` or its patches, as ``[rows, groups, K]``."""
    rows = x[..., None, :] if layer.window is None else layer.window.unfold(x)
    return rows.reshape(-1, *rows.shape[-2:])


def _rounded(layer: Observed, x: Tensor, rows: Tensor, scheme: Scheme) -> Tensor:
    """Return ``rows`` (of ``x``) quantized as in the layer: with one scale for all of ``x``, or per row."""
    if spans_tensor(scheme):
        return _rows(layer, fake_quantize(x, scheme))
    return fake_quantize(rows.flatten(0, 1), scheme).view(rows.shape)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``rows [rows, groups, K]`` by ``weight [O, K]``, whose rows are split over the groups: ``[rows, O]``."""
    return torch.einsum("rgk,gok->rgo", rows, weight.unflatten(0, (rows.shape[1], -1))).flatten(1)  # type: ignore[no-untyped-call]


def _energy(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _module(name: str) -> str:
    """Return the module of a weight. Further weights of a module are named ``name#1`` and so on."""
    return name.partition("#")[0]
