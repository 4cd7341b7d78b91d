"""The layers and embeddings of a model that a recipe can quantize, with their sizes and errors."""

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
    """A weight that can be quantized.

    Attributes:
        names: The modules that share the weight.
        bytes: Bytes by recipe, ``FLOAT`` included.
        errors: Energy of the error relative to the weight's, by recipe; None for a weight without data.
    """

    names: tuple[str, ...]
    bytes: dict[str, int]
    errors: dict[str, float] | None


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """Return the embeddings of a model by name."""
    return {
        name: module for name, module in model.named_modules() if is_table(module) and find(module).adapter is not None
    }


def weights_of(model: nn.Module, recipes: Iterable[str], measured: bool) -> list[Weights]:
    """Return the weights of a model that all ``recipes`` quantize. ``measured``: with the errors of ``quantize_``."""
    converted = {name: _converted(model, name, measured) for name in recipes if name != FLOAT}
    both = set.intersection(*(set(report.converted) for report, _ in converted.values())) if converted else set()
    named = dict(model.named_modules())
    sharing: dict[tuple[int, ...], list[str]] = {}
    for name in named:
        if name in both:
            sharing.setdefault(tuple(id(p) for p in matrices(named[name])), []).append(name)
    rows = []
    for names in sharing.values():
        sizes = {FLOAT: tensor_bytes(matrices(named[names[0]]))}
        errors = {FLOAT: 0.0}
        for recipe_name, (report, layer_bytes) in converted.items():
            sizes[recipe_name] = layer_bytes[names[0]]
            sqnr = next(layer.sqnr for layer in report.layers if layer.name == names[0])
            errors[recipe_name] = 0.0 if sqnr is None else 10 ** (-sqnr / 10)
        rows.append(Weights(tuple(names), sizes, errors if measured else None))
    return rows


def arrange_(model: nn.Module, settings: ServingSettings, source: Source | None = None) -> nn.Module:
    """Quantize ``model`` in place with ``settings``; call ``prepack_`` if they say so."""
    recipes = {exact(name): recipe(choice) for name, choice in settings.weights.items() if choice != FLOAT}
    if recipes:
        _quantize(model, layer_recipes(recipes), source or Ruled())
    if recipes and settings.packed:
        prepack_(model)
    return model


def _converted(model: nn.Module, name: str, measured: bool) -> tuple[Report, dict[str, int]]:
    """Quantize a copy of the model; return the report, and the bytes of codes and scales by layer."""
    recipes = {"*": recipe(name), **{exact(table): recipe(name) for table in tables(model)}}
    if measured:
        with torch.no_grad():
            work = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
            report = _quantize(work, layer_recipes(recipes), Ruled())
    else:
        with fake_tensors() as fake:
            work = fake_model(model, fake, None)
            report = _quantize(work, layer_recipes(recipes), Allocated())
    modules = dict(work.named_modules())
    return report, {layer: _codes(modules[layer]) for layer in report.converted}


def _quantize(model: nn.Module, recipes: LayerRecipes, source: Source) -> Report:
    """Call ``quantize_`` without its warnings, such as of skipped layers, because the plan chose them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return quantize_from(model, recipes, source, ())


def _codes(module: nn.Module) -> int:
    layers = [layer for layer in module.modules() if isinstance(layer, QuantLinear)]
    return tensor_bytes(part for layer in layers for name in PARTS if (part := layer._parameters[name]) is not None)
