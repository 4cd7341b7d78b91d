"""Which layers and embeddings of a model can be quantized by a recipe, and what each then holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from lowbit.convert.adapters import find
from lowbit.convert.engine import matrices
from lowbit.convert.maker import Allocated, Ruled, Source
from lowbit.convert.prepack import prepack_
from lowbit.convert.quantize import quantize_from
from lowbit.convert.select import is_table
from lowbit.memory.fake import fake_model, fake_tensors
from lowbit.models.names import exact
from lowbit.models.ties import tensor_bytes
from lowbit.nn.linear import PARTS, QuantLinear
from lowbit.plan.bits import FLOAT
from lowbit.plan.serving.settings import ServingSettings
from lowbit.recipes import LayerRecipes, layer_recipes, recipe
from lowbit.report import Report

__all__ = ["Weights", "arrange_", "tables", "weights_of"]


class Weights(NamedTuple):
    """What can be quantized: modules that share a weight are one row. ``bytes``: by recipe, ``FLOAT`` included.
    ``errors``: by recipe, the energy of the error over that of the weight; None where it has no numbers.
    """

    names: tuple[str, ...]
    bytes: dict[str, int]
    errors: dict[str, float] | None


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """The embeddings of a model by name."""
    return {
        name: module for name, module in model.named_modules() if is_table(module) and find(module).adapter is not None
    }


def weights_of(model: nn.Module, recipes: Iterable[str], measured: bool) -> list[Weights]:
    """The weights of a model that each of ``recipes`` quantizes. ``measured``: with their errors, by the rules that
    ``quantize_`` takes.
    """
    converted = {name: _converted(model, name, measured) for name in recipes if name != FLOAT}
    both = set.intersection(*(set(found[0].converted) for found in converted.values())) if converted else set()
    named = dict(model.named_modules())
    sharing: dict[tuple[int, ...], list[str]] = {}
    for name in named:
        if name in both:
            sharing.setdefault(tuple(id(p) for p in matrices(named[name])), []).append(name)
    rows = []
    for names in sharing.values():
        sizes = {FLOAT: tensor_bytes(matrices(named[names[0]]))}
        errors = {FLOAT: 0.0}
        for recipe_name, (report, held) in converted.items():
            sizes[recipe_name] = held[names[0]]
            sqnr = next(layer.sqnr for layer in report.layers if layer.name == names[0])
            errors[recipe_name] = 0.0 if sqnr is None else 10 ** (-sqnr / 10)
        rows.append(Weights(tuple(names), sizes, errors if measured else None))
    return rows


def arrange_(model: nn.Module, settings: ServingSettings, source: Source | None = None) -> nn.Module:
    """Quantize ``model`` in place by ``settings``, and pack it where they say so."""
    chosen = {exact(name): recipe(one) for name, one in settings.weights.items() if one != FLOAT}
    if chosen:
        _quantize(model, layer_recipes(chosen), source or Ruled())
    if chosen and settings.packed:
        prepack_(model)
    return model


def _converted(model: nn.Module, name: str, measured: bool) -> tuple[Report, dict[str, int]]:
    """The report of quantizing all of a copy of the model, and the bytes of the codes and scales of each layer."""
    chosen = {"*": recipe(name), **{exact(table): recipe(name) for table in tables(model)}}
    if measured:
        with torch.no_grad():
            work = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
            report = _quantize(work, layer_recipes(chosen), Ruled())
    else:
        with fake_tensors() as fake:
            work = fake_model(model, fake, None)
            report = _quantize(work, layer_recipes(chosen), Allocated())
    modules = dict(work.named_modules())
    return report, {layer: _codes(modules[layer]) for layer in report.converted}


def _quantize(model: nn.Module, chosen: LayerRecipes, source: Source) -> Report:
    """``quantize_``; what it warns of, such as layers that stay, is what a plan has chosen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return quantize_from(model, chosen, source, ())


def _codes(module: nn.Module) -> int:
    inner = [one for one in module.modules() if isinstance(one, QuantLinear)]
    return tensor_bytes(part for one in inner for name in PARTS if (part := one._parameters[name]) is not None)
