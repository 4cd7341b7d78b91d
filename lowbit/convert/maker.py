"""Makes what takes the place of the weights of layers: each weight once, however many layers share it."""

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

#: Weights are compared with what they decode to in pieces of this many elements, which stay in cache.
_PIECE = 1 << 17


class Maker(Generic[Made]):
    """Makes the inner layers of one conversion; for weights that are one tensor, with one recipe, twins of one layer.

    ``layer`` and ``twin`` are a subclass's. A weight's name is that of the layer that has it, and for the second and
    further weights of a layer ``name#1`` and so on, in the order in which its adapter makes them.

    The model keeps each ``parameter`` alive meanwhile, so its storage tells it apart. A ``matrix`` may be a temporary
    copy, whose storage the next one can get; it only says which part of the parameter is meant, and which way round.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): plain_name(name) for name, module in model.named_modules()}
        self.made: dict[tuple[Any, ...], Made] = {}

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> Made:
        """A new layer for ``matrix`` [out, in]; ``trained``: whether its parameter requires grad."""
        raise NotImplementedError

    def twin(self, first: Made, name: str, matrix: Tensor, bias: Any) -> Made:
        """A layer with the weight of ``first``, and a name and a bias of its own."""
        raise NotImplementedError

    def convert(self, layer: Any, adapter: Adapter, recipe: Recipe) -> nn.Module:
        """What takes the place of ``layer``."""
        count = 0

        def make(parameter: Tensor, matrix: Tensor, bias: Any) -> Any:
            nonlocal count
            name = self.names[id(layer)] + (f"#{count}" if count else "")
            count += 1
            key = (recipe, storage_key(parameter), matrix.storage_offset(), matrix.shape, matrix.stride())
            first = self.made.get(key)
            if first is not None:
                return self.twin(first, name, matrix.detach(), bias)
            self.made[key] = made = self.layer(name, matrix.detach(), bias, recipe, parameter.requires_grad)
            return made

        return adapter.convert(layer, make)


class Source(Protocol):
    """Where the weights of quantized layers come from, and the static scales of their inputs."""

    def plan(self, chosen: LayerRecipes) -> LayerRecipes:
        """The recipes that it has weights for, where ``chosen`` is asked for."""

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor | None]:
        """The quantized weight, and where they are known the energies of weight and error."""

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> Scales | None:
        """The scales of the inputs of the layer ``name``; None where they are dynamic."""

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        """New values for other parameters of the model, by name, that go with the weights."""


class Ruled:
    """Weights are what a rule that needs no data makes of them; ``rule``: None is the best known for each scheme."""

    def __init__(self, rule: DataFreeMethod | None = None) -> None:
        self.rule = rule

    def plan(self, chosen: LayerRecipes) -> LayerRecipes:
        """As it is."""
        return chosen

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor]:
        """The quantized weight. Raises as ``require_numbers``, and ValueError where the rule has nothing to offer."""
        require_numbers(matrix)
        rule = self.rule or default_data_free(recipe.weight)
        reason = rule.refuses(recipe.weight)
        if reason is not None:
            raise ValueError(f"method {rule.name!r} cannot serve it: {reason}")
        plain = matrix.float() if recipe.rotation is None else hadamard(matrix.float(), recipe.rotation)
        codes = replace(rule.solve(plain, recipe.weight), dtype=matrix.dtype)
        return codes, energies(plain, codes.dequantize(torch.float32))

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> None:
        """Raises ValueError where the recipe needs static ones."""
        if recipe.static:
            raise ValueError(
                f"recipe {recipe.name!r} quantizes inputs by scales that come from data; give quantize_(model, recipe, "
                f"calibration=lowbit.calibrate(model, recipe, batches)), or use a recipe with dynamic ones"
            )

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        """None."""
        return {}


class Calibrated:
    """Weights and scales are those of a Calibration; ``used``: the names that were asked for."""

    def __init__(self, calibration: Any) -> None:
        self.calibration = calibration
        self.used: set[str] = set()

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor]:
        require_numbers(matrix)
        made: Quantized = self.calibration.weight(name, matrix, recipe)
        self.used.add(name)
        row = self.calibration.rows[name]
        return made, torch.tensor([row.signal, row.noise], dtype=torch.float64)

    def plan(self, chosen: LayerRecipes) -> LayerRecipes:
        """The plan, with the transforms that calibration added to recipes (``method="hadamard"``)."""
        found = {row.recipe for row in self.calibration.rows.values()}
        return chosen.map(lambda one: one.rotated() if one not in found and one.rotated() in found else one)

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> Scales | None:
        found: Scales | None = self.calibration.input_scales(name, recipe)
        if found is None:
            return None
        zero = None if found.zero_point is None else found.zero_point.to(matrix.device)
        return Scales(found.scale.to(matrix.device), zero)

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.calibration.check_edits(model, self.used)
        return found


class Allocated:
    """Weights and scales are allocated, and not filled."""

    def plan(self, chosen: LayerRecipes) -> LayerRecipes:
        """As it is."""
        return chosen

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, None]:
        """An unfilled weight."""
        return empty(tuple(matrix.shape), recipe.weight, matrix.dtype, matrix.device), None

    def input_scales(self, name: str, matrix: Tensor, recipe: Recipe) -> Scales | None:
        """Unfilled scales."""
        if not recipe.static or recipe.input is None:
            return None
        return empty_scales(recipe.input, matrix.shape[1], matrix.device)

    def edits(self, model: nn.Module) -> dict[str, Tensor]:
        """None."""
        return {}


class QuantMaker(Maker[QuantLinear]):
    """Makes QuantLinears of what ``source`` has."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        super().__init__(model)
        self.source = source
        self.energies: dict[int, Tensor] = {}  # by the id of the layer's codes

    def layer(self, name: str, matrix: Tensor, bias: Any, recipe: Recipe, trained: bool) -> QuantLinear:
        weight, energies = self.source.weight(name, matrix, recipe)
        made = QuantLinear(weight, bias, recipe, self.source.input_scales(name, matrix, recipe))
        if energies is not None:
            self.energies[id(made.codes)] = energies
        return made

    def twin(self, first: QuantLinear, name: str, matrix: Tensor, bias: Any) -> QuantLinear:
        recipe = first.recipe
        made = QuantLinear(first.weight, bias, recipe, self.source.input_scales(name, matrix, recipe))
        made.share_weight(first)
        return made

    def measure(self, layer: nn.Module, made: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
        """What the report says of a layer."""
        inner = [module for module in made.modules() if isinstance(module, QuantLinear)]
        weights = sum(module.weight.numel() for module in inner)
        bits = sum(module.weight.nbytes for module in inner) * 8 / weights if weights else math.nan
        energies = [self.energies[id(module.codes)] for module in inner if id(module.codes) in self.energies]
        return measured(
            layer, made, weights, bits, decibel(*torch.stack(energies).sum(0).tolist()) if energies else None
        )


def measured(layer: nn.Module, made: nn.Module, weights: int, bits: float, sqnr: float | None = None) -> dict[str, Any]:
    """The fields of a LayerReport besides its name, class and recipe."""
    before, after = (tensor_bytes((*module.parameters(), *module.buffers())) for module in (layer, made))
    return {"weights": weights, "bits": bits, "bytes_before": before, "bytes_after": after, "sqnr": sqnr}


def require_numbers(weight: Tensor) -> None:
    """Raises TypeError for a weight that is no plain fp32, bf16 or fp16 tensor, ValueError for one without numbers or
    with NaN or Inf.
    """
    if type(weight) is not Tensor:
        raise TypeError(
            f"the weight is a {type(weight).__name__}, not a plain tensor; quantize the model before it is sharded or "
            f"wrapped"
        )
    require_float(weight)
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and holds no numbers; load the model first")
    broken = int((~weight.isfinite()).sum())
    if broken:
        raise ValueError(
            f"{broken} of the weight's {weight.numel()} elements are NaN or Inf, and would spoil every element that "
            f"shares a scale with one; repair the weight, or name the layer in skip=..."
        )


def require_float(weight: Tensor) -> None:
    """Raises TypeError for a weight in another dtype than fp32, bf16 and fp16."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"the weight is {weight.dtype}, and must be float32, bfloat16 or float16; call model.float() first"
        )


def energies(weight: Tensor, decoded: Tensor) -> Tensor:
    """The sums of squares of ``weight`` and of its difference to ``decoded``, both ``[out, in]``.

    Overwrites ``decoded``. A piece is summed in fp32, whose dot products are faster; the pieces in fp64.
    """
    rows = max(1, _PIECE // max(1, weight.shape[1]))
    total = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for w, d in zip(weight.split(rows), decoded.split(rows), strict=True):
        w, d = w.float().reshape(-1), d.sub_(w).reshape(-1)
        total += torch.stack([w.dot(w), d.dot(d)])
    return total


def decibel(signal: float, noise: float) -> float:
    """10 log10 of the quotient of two energies."""
    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
