"""qat.prepare_ and qat.convert_: replace layers by trainable fake-quantized layers, and these by quantized layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import Adapter
from lowbit.convert.engine import Task, convert, swap
from lowbit.convert.maker import Maker, decibel, energies, measured, require_numbers
from lowbit.convert.protect import protections
from lowbit.convert.select import DEFAULT_SKIP, Skip, Verdict, plain_layers
from lowbit.models.ties import storage_key
from lowbit.nn.linear import QuantLinear
from lowbit.qat.linear import FakeQuantLinear
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes, refuse_beyond
from lowbit.report import Report

__all__ = ["convert_", "prepare_"]

#: The adapter of every layer that is converted: its conversion needs nothing else.
_EVERY = Adapter(lambda layer, make: layer, lambda layer, made, plain: None, lambda layer: None)


def prepare_(
    model: nn.Module,
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None],
    *,
    learn_scale: bool = False,
    skip: Skip = DEFAULT_SKIP,
    observe: int | None = None,
) -> Report:
    """Make the layers of ``model`` trainable with quantized weights and inputs, in place.

    The output of a prepared model is bit-identical to the converted model's. Without ``learn_scale`` the output is also
    bit-identical to that after ``quantize_(model, recipe, method="nearest")``. Trained weights are parameters in high
    precision. For nn.Linear they are the model's own parameters, so the plain model's ``state_dict`` loads (with
    ``strict=False`` if scales are learned). Other layers get new parameters for their matrices, so create the optimizer
    after this call.

    Args:
        model: the model, which is changed in place.
        recipe: a recipe or per-layer recipes, as for ``quantize_``.
        learn_scale: learn the scales of weights and the static scales of inputs (LSQ, LSQ+). They are parameters that
            may need another learning rate than weights, and no weight decay.
        skip: modules to leave as they are, as for ``quantize_``.
        observe: number of training batches from which static input scales are computed. Default None: all batches until
            ``freeze_observers_``. See ``FakeQuantLinear``.

    Returns:
        The same report as ``quantize_``.

    Raises:
        ValueError: as ``quantize_``. The model is unchanged.
        TypeError: as ``quantize_``. The model is unchanged.
    """
    recipes = layer_recipes(recipe)
    for each in recipes.recipes:
        refuse_beyond(each, "qat.prepare_", ("output.a",), scale=("static",), transform=("hadamard",))
        refuse_beyond(each, "qat.prepare_", ("output.b",), transform=("hadamard",))
    names, protect = protections(model, skip, recipes, unties=True, trained=True)
    maker = _FakeQuantMaker(model, learn_scale, observe)
    task = Task(
        "qat.prepare_",
        "nn.Linear, nn.Conv1d to 3d, nn.MultiheadAttention",
        plain_layers(),
        maker.convert,
        _measure,
        swap,
    )
    return convert(model, task, recipes, names, protect)[0]


def convert_(model: nn.Module) -> Report:
    """Replace the layers of ``prepare_`` by quantized layers with the codes that they computed with, in place.

    The converted model's output is bit-identical. ``save_model`` and ``dequantize_`` accept it.

    Returns:
        A report with one row per layer.

    Raises:
        ValueError: the model has no such layers. The model is unchanged.
        RuntimeError: a layer with static input scales has seen no batch. The model is unchanged.
    """
    task = Task("qat.convert_", "FakeQuantLinear", _judge, _Quantizer().convert, _measure, swap)
    return convert(model, task)[0]


class _FakeQuantMaker(Maker[FakeQuantLinear]):
    """Makes the layers of one ``prepare_``; a weight that is a parameter of the model stays the same parameter."""

    def __init__(self, model: nn.Module, learn_scale: bool, observe: int | None) -> None:
        super().__init__(model)
        self.learn_scale, self.observe = learn_scale, observe
        self.parameters = {storage_key(p): p for p in model.parameters()}

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> FakeQuantLinear:
        require_numbers(matrix)
        parameter = self.parameters.get(storage_key(matrix))
        if parameter is None:
            parameter = nn.Parameter(matrix, trained)
        return FakeQuantLinear(parameter, bias, recipe, self.learn_scale, self.observe)

    def twin(self, first: FakeQuantLinear, name: str, matrix: Tensor, bias: Any) -> FakeQuantLinear:
        layer = FakeQuantLinear(first.weight, bias, first.recipe, self.learn_scale, self.observe)
        layer.share_weight(first)
        return layer


class _Quantizer:
    """Makes the layers of one ``convert_``; layers that share a weight share its codes."""

    def __init__(self) -> None:
        self.layers: dict[tuple[int, Recipe], QuantLinear] = {}

    @torch.no_grad()
    def convert(self, layer: FakeQuantLinear, adapter: Adapter, recipe: Any) -> QuantLinear:
        key = (id(layer.weight), layer.recipe)
        quantized = QuantLinear(layer.quantized_weight, layer.bias, layer.recipe, layer.input_scales)
        first = self.layers.setdefault(key, quantized)
        if first is not quantized:
            quantized.share_weight(first)
        return quantized


def _judge(names: list[str], module: nn.Module) -> Verdict:
    return Verdict(adapter=_EVERY) if isinstance(module, FakeQuantLinear) else Verdict(inside=True)


@torch.no_grad()
def _measure(layer: nn.Module, converted: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
    """The report's entries for a layer: bits and SQNR of the deployed weight."""
    fakes = [m for side in (layer, converted) for m in side.modules() if isinstance(m, FakeQuantLinear)]
    weights = sum(fake.weight.numel() for fake in fakes)
    total = sum(energies(fake.weight, fake.plain_weight()) for fake in fakes)
    bits = sum(fake.quantized_weight.nbytes for fake in fakes) * 8 / max(weights, 1)
    return measured(layer, converted, weights, bits, decibel(*total.tolist()))  # type: ignore[union-attr]
