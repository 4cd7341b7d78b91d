"""prepare_ and convert_: layers that learn to be quantized, and the quantized layers that they become."""

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

#: Stands for every layer that is converted back: what becomes of one depends on nothing else.
_EVERY = Adapter(lambda layer, make: layer, lambda layer, made, plain: None, lambda layer: None)


def prepare_(
    model: nn.Module,
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None],
    *,
    learn_scale: bool = False,
    skip: Skip = DEFAULT_SKIP,
    observe: int | None = None,
) -> Report:
    """Let the layers of ``model`` compute, in place, what ``quantize_(model, recipe, method="nearest")`` would have
    them compute, with gradients; the report is that of ``quantize_``.

    ``recipe``, ``skip``, and which layers are taken: as for ``quantize_``. Weights stay parameters in high precision;
    those of nn.Linear the very ones, so that a plain model's ``state_dict`` fits (``strict=False`` where scales are
    learned). Of other layers they are new ones, of matrices inside: make the optimizer after this.
    ``learn_scale``: scales of weights, and static ones of inputs, are learned (LSQ, LSQ+): parameters that may need
    another learning rate than weights, and no weight decay. ``observe``: how many training batches the static input
    scales are made of; None: all until ``freeze_observers_``. See ``FakeQuantLinear``.

    Raises, with the model untouched: as ``quantize_``.
    """
    chosen = layer_recipes(recipe)
    for one in chosen.recipes:
        refuse_beyond(one, "qat.prepare_", ("output.a",), scale=("static",), transform=("hadamard",))
        refuse_beyond(one, "qat.prepare_", ("output.b",), transform=("hadamard",))
    names, protect = protections(model, skip, chosen, unties=True, trained=True)
    maker = _FakeQuantMaker(model, learn_scale, observe)
    task = Task(
        "qat.prepare_",
        "nn.Linear, nn.Conv1d to 3d, nn.MultiheadAttention",
        plain_layers(),
        maker.convert,
        _measure,
        swap,
    )
    return convert(model, task, chosen, names, protect)[0]


def convert_(model: nn.Module) -> Report:
    """Make the layers that ``prepare_`` made quantized layers, in place, with the codes that they computed with.

    The model then computes the same bits, is saved by ``save_model``, and ``dequantize_`` makes plain layers of it.
    Raises, with the model untouched: ValueError for a model without such layers; RuntimeError where one has static
    input scales and has seen no batch.
    """
    task = Task("qat.convert_", "FakeQuantLinear", _judge, _Quantizer().convert, _measure, swap)
    return convert(model, task)[0]


class _FakeQuantMaker(Maker[FakeQuantLinear]):
    """Makes the layers of one ``prepare_``, on the parameters of the model where these are matrices as they are."""

    def __init__(self, model: nn.Module, learn_scale: bool, observe: int | None) -> None:
        super().__init__(model)
        self.learn_scale, self.observe = learn_scale, observe
        self.parameters = {storage_key(p): p for p in model.parameters()}

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> FakeQuantLinear:
        require_numbers(matrix)
        own = self.parameters.get(storage_key(matrix))
        if own is None:
            own = nn.Parameter(matrix, trained)
        return FakeQuantLinear(own, bias, recipe, self.learn_scale, self.observe)

    def twin(self, first: FakeQuantLinear, name: str, matrix: Tensor, bias: Any) -> FakeQuantLinear:
        made = FakeQuantLinear(first.weight, bias, first.recipe, self.learn_scale, self.observe)
        made.share_weight(first)
        return made


class _Quantizer:
    """Makes the layers of one ``convert_``; those that share a weight share its codes."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, Recipe], QuantLinear] = {}

    @torch.no_grad()
    def convert(self, layer: FakeQuantLinear, adapter: Adapter, recipe: Any) -> QuantLinear:
        key = (id(layer.weight), layer.recipe)
        made = QuantLinear(layer.quantized_weight, layer.bias, layer.recipe, layer.input_scales)
        first = self.made.setdefault(key, made)
        if first is not made:
            made.share_weight(first)
        return made


def _judge(names: list[str], module: nn.Module) -> Verdict:
    return Verdict(adapter=_EVERY) if isinstance(module, FakeQuantLinear) else Verdict(inside=True)


@torch.no_grad()
def _measure(layer: nn.Module, made: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
    """What the report says of a layer: bits and SQNR of the deployed weight."""
    fakes = [m for one in (layer, made) for m in one.modules() if isinstance(m, FakeQuantLinear)]
    weights = sum(fake.weight.numel() for fake in fakes)
    total = sum(energies(fake.weight, fake.plain_weight()) for fake in fakes)
    bits = sum(fake.quantized_weight.nbytes for fake in fakes) * 8 / max(weights, 1)
    return measured(layer, made, weights, bits, decibel(*total.tolist()))  # type: ignore[union-attr]
