"""Makes the replacements of layers: one weight for all layers that share it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import Adapter
from lowbit.datafree import DataFreeMethod, default_data_free
from lowbit.functional import hadamard
from lowbit.models.names import plain_name
from lowbit.models.ties import storage_key, tensor_bytes
from lowbit.nn.linear import QuantLinear, empty, empty_scales
from lowbit.recipes import LayerRecipes, Recipe
from lowbit.tensor.quantized import Quantized, Scales

__all__ = [
    "Allocated", "Calibrated", "Maker", "QuantMaker", "Ruled", "Source", "decibel", "energies", "measured",
    "require_float", "require_numbers",
]  # fmt: skip

Made = TypeVar("Made", bound=nn.Module)

#: Weights are compared with their decoded values in pieces of this many elements, which stay in cache.
_PIECE = 1 << 17


class Maker(Generic[Made]):
    """Makes the inner layers of one conversion.

    Subclasses have ``layer`` and ``twin``. Layers that share a weight and a recipe become twins of one layer. The name
    of a weight is its layer's name. Further weights of the layer are ``name#1`` and so on, in the adapter's order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): plain_name(name) for name, module in model.named_modules()}
        self.made: dict[tuple[Any, ...], Made] = {}

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> Made:
        """Return a new layer for ``matrix`` [out, in]. ``trained``: whether its parameter requires grad."""
        raise NotImplementedError

    def twin(self, first: Made, name: str, matrix: Tensor, bias: Any) -> Made:
        """Return a layer with the weight of ``first`` and another name and bias."""
        raise NotImplementedError

    def convert(self, layer: Any, adapter: Adapter, recipe: Recipe) -> nn.Module:
        """Return the replacement of ``layer``."""
        count = 0

        def make(parameter: Tensor, matrix: Tensor, bias: Any) -> Any:
            nonlocal count
            name = self.names[id(layer)] + (f"#{count}" if count else "")
            count += 1
            # The storage of ``parameter``, which the model keeps alive. ``matrix`` may be a temporary copy.
            key = (recipe, storage_key(parameter), matrix.storage_offset(), matrix.shape, matrix.stride())
            first = self.made.get(key)
            if first is not None:
                return self.twin(first, name, matrix.detach(), bias)
            self.made[key] = new = self.layer(name, matrix.detach(), bias, recipe, parameter.requires_grad)
            return new

        return adapter.convert(layer, make)


class Source(Protocol):
    """The source of quantized weights and of static input scales."""

    def recipes(self, recipes: LayerRecipes) -> LayerRecipes:
        """The recipes to use, if the caller asked for ``recipes``."""

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor | None]:
        """The quantized weight, and the ``energies`` of weight and error if known."""

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> Scales | None:
        """The input scales of the layer ``name``; None for dynamic scales."""

    def columns(self, matrix: Tensor, recipe: Recipe) -> Tensor | None:
        """The order of the columns, for recipes with ``reordered``."""

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        """New values for other parameters of the model, by name, that go with the weights."""


class Ruled:
    """Weights quantized by a data-free method; None: the best known method for each scheme."""

    def __init__(self, method: DataFreeMethod | None = None) -> None:
        self.method = method

    def recipes(self, recipes: LayerRecipes) -> LayerRecipes:
        return recipes

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor]:
        """Raises as ``require_numbers``, and ValueError if the method does not support the scheme."""
        require_numbers(matrix)
        method = self.method or default_data_free(recipe.weight)
        reason = method.refuses(recipe.weight)
        if reason is not None:
            raise ValueError(f"method {method.name!r} does not support this weight: {reason}")
        plain = matrix.float() if recipe.rotation is None else hadamard(matrix.float(), recipe.rotation)
        codes = replace(method.solve(plain, recipe.weight), dtype=matrix.dtype)
        return codes, energies(plain, codes.dequantize(torch.float32))

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> None:
        """Raises ValueError if the recipe needs static scales."""
        if recipe.static:
            raise ValueError(
                f"recipe {recipe.name!r} has static input scales, which need calibration data; use quantize_(model, "
                f"recipe, calibration=lowbit.calibrate(model, recipe, batches)), or a recipe with dynamic scales"
            )

    def columns(self, matrix: Tensor, recipe: Recipe) -> None:
        _refuse_reordered(recipe)

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        return {}


class Calibrated:
    """Weights and scales from a Calibration."""

    def __init__(self, calibration: Any) -> None:
        self.calibration = calibration
        self.used: set[str] = set()  # names of weights

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor]:
        require_numbers(matrix)
        weight: Quantized = self.calibration.weight(name, matrix, recipe)
        self.used.add(name)
        row = self.calibration.rows[name]
        return weight, torch.tensor([row.signal, row.noise], dtype=torch.float64)

    def recipes(self, recipes: LayerRecipes) -> LayerRecipes:
        """Adds the transforms that calibration added (``method="hadamard"``)."""
        known = {row.recipe for row in self.calibration.rows.values()}
        return recipes.map(
            lambda recipe: recipe.rotated() if recipe not in known and recipe.rotated() in known else recipe
        )

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> Scales | None:
        scales: Scales | None = self.calibration.input_scales(name, recipe)
        if scales is None:
            return None
        zero = None if scales.zero_point is None else scales.zero_point.to(matrix.device)
        return Scales(scales.scale.to(matrix.device), zero)

    def columns(self, matrix: Tensor, recipe: Recipe) -> None:
        _refuse_reordered(recipe)

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        edits: dict[str, Tensor] = self.calibration.check_edits(model, self.used)
        return edits


class Allocated:
    """Allocated but unfilled weights and scales."""

    def recipes(self, recipes: LayerRecipes) -> LayerRecipes:
        return recipes

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, None]:
        return empty(tuple(matrix.shape), recipe.weight, matrix.dtype, matrix.device), None

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> Scales | None:
        if not recipe.static or recipe.input is None:
            return None
        return empty_scales(recipe.input, matrix.shape[1], matrix.device)

    def columns(self, matrix: Tensor, recipe: Recipe) -> Tensor | None:
        return torch.empty(matrix.shape[1], dtype=torch.int32, device=matrix.device) if recipe.reordered else None

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        return {}


def _refuse_reordered(recipe: Recipe) -> None:
    if recipe.reordered:
        raise ValueError(
            f"recipe {recipe.name!r} is for layers of other programs' files; quantize with the recipe without reordered"
        )


class QuantMaker(Maker[QuantLinear]):
    """Makes QuantLinears with weights from ``source``."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        super().__init__(model)
        self.source = source
        self.energies: dict[int, Tensor] = {}  # by the id of the layer's codes

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> QuantLinear:
        weight, energies = self.source.weight(name, matrix, recipe)
        columns = self.source.columns(matrix, recipe)
        layer = QuantLinear(weight, bias, recipe, self.source.input_scales(name, matrix, recipe), columns)
        if energies is not None:
            self.energies[id(layer.codes)] = energies
        return layer

    def twin(self, first: QuantLinear, name: str, matrix: Tensor, bias: Any) -> QuantLinear:
        recipe = first.recipe
        scales = self.source.input_scales(name, matrix, recipe)
        layer = QuantLinear(first.weight, bias, recipe, scales, first.columns)
        layer.share_weight(first)
        return layer

    def measure(self, layer: nn.Module, new: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
        """Return the fields of the layer's report."""
        inner = [module for module in new.modules() if isinstance(module, QuantLinear)]
        weights = sum(module.weight.numel() for module in inner)
        bits = sum(module.weight.nbytes for module in inner) * 8 / weights if weights else math.nan
        energies = [self.energies[id(module.codes)] for module in inner if id(module.codes) in self.energies]
        return measured(
            layer, new, weights, bits, decibel(*torch.stack(energies).sum(0).tolist()) if energies else None
        )


def measured(layer: nn.Module, new: nn.Module, weights: int, bits: float, sqnr: float | None = None) -> dict[str, Any]:
    """The fields of a LayerReport except its name, class and recipe."""
    before, after = (tensor_bytes((*module.parameters(), *module.buffers())) for module in (layer, new))
    return {"weights": weights, "bits": bits, "bytes_before": before, "bytes_after": after, "sqnr": sqnr}


def require_numbers(weight: Tensor) -> None:
    """Raise TypeError unless ``weight`` is a plain fp32, bf16 or fp16 tensor, and ValueError for a weight on the meta
    device or with NaN or Inf.
    """
    if type(weight) is not Tensor:
        raise TypeError(
            f"the weight is a {type(weight).__name__}, not a plain tensor; quantize the model before it is sharded or "
            f"wrapped"
        )
    require_float(weight)
    if weight.is_meta:
        raise ValueError("the weight is on the meta device, without values; load the model first")
    nonfinite = int((~weight.isfinite()).sum())
    if nonfinite:
        raise ValueError(
            f"{nonfinite} of the weight's {weight.numel()} elements are NaN or Inf, which would spoil all elements "
            f"with the same scale; repair the weight, or name the layer in skip=..."
        )


def require_float(weight: Tensor) -> None:
    """Raise TypeError unless ``weight`` is fp32, bf16 or fp16."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"the weight is {weight.dtype}, but must be float32, bfloat16 or float16; call model.float() first"
        )


def energies(weight: Tensor, decoded: Tensor) -> Tensor:
    """The sums of squares of ``weight`` and of its error against ``decoded``, both [out, in], as fp64 [2].

    Overwrites ``decoded``. Each piece is summed in fp32, whose dot products are faster, and the pieces in fp64.
    """
    rows = max(1, _PIECE // max(1, weight.shape[1]))
    total = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for w, d in zip(weight.split(rows), decoded.split(rows), strict=True):
        w, d = w.float().reshape(-1), d.sub_(w).reshape(-1)
        total += torch.stack([w.dot(w), d.dot(d)])
    return total


def decibel(signal: float, noise: float) -> float:
    """10 log10 of the ratio of two energies."""
    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
