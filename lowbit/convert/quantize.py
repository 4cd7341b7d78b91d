"""quantize_: a model's layers replaced, in place, by quantized ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.casts import refuse_beyond
from lowbit.convert.adapters import Adapter, find
from lowbit.convert.engine import Task, convert, make_all, matrices, swap, tensor_bytes
from lowbit.convert.report import Report, amount
from lowbit.convert.select import DEFAULT_SKIP, Chosen, Selection, is_table, matches, plain_layers, protections
from lowbit.functional import quantize
from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear, empty
from lowbit.recipes import Plan, Recipe, plan
from lowbit.recipes import recipe as find_recipe
from lowbit.tensor.quantized import Quantized

__all__ = ["Maker", "measured", "quantize_", "replacements"]

#: Weights are compared with what they decode to in pieces of this many elements, which stay in cache.
_PIECE = 1 << 17


def quantize_(
    model: nn.Module,
    recipe: str | Recipe | Plan | Mapping[str, str | Recipe | None],
    calibration: Any = None,
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    group: int | None = None,
    prepack: bool = False,
) -> Report:
    """Quantize the layers of ``model`` in place as ``recipe`` says, and report what was done, layer by layer.

    ``recipe``: a name, a Recipe, or recipes by layer, ``{"*": "int4-weight-only", "*.down_proj": "int8", "lm_head":
    None}``: the last pattern that matches a layer's full name decides, and None leaves the layer.
    Converted: nn.Linear, nn.Conv2d (``groups=1``), nn.MultiheadAttention, transformers' Conv1D, their subclasses that
    compute the same with the same parameters, and what ``lowbit.convert.register`` adds.
    ``skip``: names of modules to leave, with wildcards; ``"lm_head"`` also means ``"model.lm_head"`` and all inside.
    ``group``: elements that share a scale, for ``int4-weight-only`` and ``nf4``. ``prepack``: call ``prepack_`` on the
    result, for inference.

    Left unless a pattern of recipes by layer spells them: LoRA and other adapters (peft's, ``lora_*``,
    ``modules_to_save``); output layers that share the weight of an embedding (``skip=()`` converts a copy of these);
    ``lm_head``, where ``skip`` is not given. Layers that share a weight and a recipe share one Quantized. Hooks,
    train/eval mode and the checkpointing of blocks are kept.

    Warns where less than half of the bytes of the model's weights were converted, which names the largest others, and
    where a layer no longer shares its weight.
    Raises, with the model untouched: ValueError for nothing to convert, layers that are quantized, in training or (each
    by itself) compiled, a weight with NaN or Inf or without a shape yet, a pattern without a match, an unknown recipe.
    TypeError for weights that are no plain fp32, bf16 or fp16, and for a model or a recipe that is none.
    """
    _refuse_calibration(calibration)
    if prepack:
        from lowbit.convert.prepack import prepack_
    chosen = _plan(recipe, group)
    names, protect = protections(model, skip, chosen, unties=True)
    maker = Maker(_quantized)
    task = Task(
        "quantize_", "nn.Linear, nn.Conv2d, nn.MultiheadAttention", plain_layers(), maker.convert, maker.measure, swap
    )
    report, found = convert(model, task, chosen, names, protect)
    notes = _untied(model, found)
    small = _small_effect(model, found)
    for note in (*notes, *([small] if small else [])):
        warnings.warn(note, stacklevel=2)
    if prepack:
        prepack_(model)
    return replace(report, notes=notes)


def _refuse_calibration(calibration: Any) -> None:
    if calibration is None:
        return
    if isinstance(calibration, str) or (
        isinstance(calibration, tuple | list | set) and calibration and all(isinstance(one, str) for one in calibration)
    ):
        names = (calibration,) if isinstance(calibration, str) else tuple(calibration)
        raise TypeError(f"quantize_: the third argument is calibration; for modules to leave, write skip={names!r}")
    raise ValueError(
        "quantize_: every recipe is dynamic or weight-only, and needs no calibration; leave calibration out"
    )


def _plan(recipe: Any, group: int | None) -> Plan:
    if group is not None and isinstance(recipe, Mapping | Plan):
        raise ValueError(f"quantize_: group={group} is for one recipe; by layer, write for instance 'nf4:group{group}'")
    chosen = plan(recipe if group is None else find_recipe(recipe, group=group))
    for one in chosen.recipes:
        refuse_beyond(one, "quantize_", ("output.a", "output.b"))
    return chosen


# -- making -----------------------------------------------------------------------------------------------------------
class Maker:
    """Makes the QuantLinears of one conversion; weights that are one tensor, with one recipe, become one Quantized.

    The model keeps each ``parameter`` alive meanwhile, so its storage tells it apart. A ``matrix`` may be a temporary
    copy, whose storage the next one can get; it only says which part of the parameter is meant, and which way round.
    """

    def __init__(self, fill: Callable[[Tensor, Recipe], tuple[Quantized, Tensor | None]]) -> None:
        self.fill = fill
        self.made: dict[tuple[Any, ...], QuantLinear] = {}
        self.energies: dict[int, Tensor] = {}  # of weight and error, by the id of the layer's codes

    def convert(self, layer: Any, adapter: Adapter, recipe: Recipe) -> nn.Module:
        def make(parameter: Tensor, matrix: Tensor, bias: Any) -> QuantLinear:
            return self._linear(recipe, parameter, matrix, bias)

        return adapter.convert(layer, make)

    def _linear(self, recipe: Recipe, parameter: Tensor, matrix: Tensor, bias: Any) -> QuantLinear:
        whole = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.stride())
        key = (recipe, *whole, matrix.storage_offset(), matrix.shape, matrix.stride())
        twin = self.made.get(key)
        if twin is not None:
            layer = QuantLinear(twin.weight, bias, recipe)
            for name, held in twin._parameters.items():
                if name != "bias":
                    layer._parameters[name] = held
            return layer
        weight, energies = self.fill(matrix.detach(), recipe)
        self.made[key] = layer = QuantLinear(weight, bias, recipe)
        if energies is not None:
            self.energies[id(layer.codes)] = energies
        return layer

    def measure(self, layer: nn.Module, made: nn.Module, recipe: Recipe | None) -> dict[str, Any]:
        """What the report says of a layer."""
        inner = [module for module in made.modules() if isinstance(module, QuantLinear)]
        weights = sum(module.weight.numel() for module in inner)
        bits = sum(module.weight.nbytes for module in inner) * 8 / weights if weights else math.nan
        energies = [self.energies[id(module.codes)] for module in inner if id(module.codes) in self.energies]
        return measured(layer, made, weights, bits, _decibel(energies) if energies else None)


def measured(layer: nn.Module, made: nn.Module, weights: int, bits: float, sqnr: float | None = None) -> dict[str, Any]:
    """The fields of a LayerReport besides its name, class and recipe."""
    before, after = (tensor_bytes((*module.parameters(), *module.buffers())) for module in (layer, made))
    return {"weights": weights, "bits": bits, "bytes_before": before, "bytes_after": after, "sqnr": sqnr}


def _quantized(weight: Tensor, recipe: Recipe) -> tuple[Quantized, Tensor]:
    if type(weight) is not Tensor:
        raise TypeError(
            f"the weight is a {type(weight).__name__}, not a plain tensor; quantize the model before it is sharded or "
            f"wrapped"
        )
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and holds no numbers; load the model first")
    broken = int((~weight.isfinite()).sum())
    if broken:
        raise ValueError(
            f"{broken} of the weight's {weight.numel()} elements are NaN or Inf, and would spoil every element that "
            f"shares a scale with one; repair the weight, or name the layer in skip=..."
        )
    made = quantize(weight, recipe.weight)
    return made, _energies(weight, made.dequantize(torch.float32))


def _allocated(weight: Tensor, recipe: Recipe) -> tuple[Quantized, None]:
    return empty(tuple(weight.shape), recipe.weight, weight.dtype, weight.device), None


def _energies(weight: Tensor, decoded: Tensor) -> Tensor:
    """The sums of squares of ``weight`` and of its difference to ``decoded``, both ``[out, in]``.

    Overwrites ``decoded``. A piece is summed in fp32, whose dot products are faster; the pieces in fp64.
    """
    rows = max(1, _PIECE // max(1, weight.shape[1]))
    total = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for w, d in zip(weight.split(rows), decoded.split(rows), strict=True):
        w, d = w.float().reshape(-1), d.sub_(w).reshape(-1)
        total += torch.stack([w.dot(w), d.dot(d)])
    return total


def _decibel(energies: list[Tensor]) -> float:
    signal, noise = torch.stack(energies).sum(0).tolist()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def replacements(model: nn.Module, recipes: dict[str, Recipe]) -> dict[int, nn.Module]:
    """Unfilled quantized layers for the layers of ``model`` with these names, by the ``id`` of what they replace.

    Raises ValueError where the model has no such layer or one that cannot be converted.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, Chosen] = {}
    for name, recipe in recipes.items():
        layer = modules.get(name)
        if layer is None:
            raise ValueError(f"the model has no module {name!r}")
        adapter, listed, reason = find(layer)
        if listed is None:
            raise ValueError(f"{name!r} is a {type(layer).__name__} in this model, which has no quantized counterpart")
        reason = reason if adapter is None else adapter.refuses(layer)
        if adapter is None or reason is not None:
            raise ValueError(f"{name!r} cannot be replaced by a quantized layer: {reason}")
        chosen[name] = Chosen(layer, adapter, recipe)
    return make_all(chosen, Maker(_allocated).convert)


# -- what is worth knowing --------------------------------------------------------------------------------------------
def _untied(model: nn.Module, found: Selection) -> tuple[str, ...]:
    """A note for each converted layer whose weight another module keeps in high precision."""
    keepers = {
        id(p): name for name, module in model.named_modules() for p in module._parameters.values() if p is not None
    }
    return tuple(
        f"{name} shared its weight with {keepers[id(p)]}, which keeps it in high precision; {name} has its own "
        f"quantized copy now (skip it to keep the two tied)"
        for name, chosen in found.chosen.items()
        for p in chosen.module._parameters.values()
        if p is not None and p.dim() > 1 and id(p) in keepers
    )


def _small_effect(model: nn.Module, found: Selection) -> str | None:
    """A warning where less than half of the bytes of the weights were converted, with the largest that were not.

    What the caller skipped does not count.
    """
    converted = tensor_bytes(p for chosen in found.chosen.values() for p in matrices(chosen.module))
    others: dict[str, tuple[int, str]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in matrices(module, recurse=False) if id(p) not in seen]
        if kind(module) is not None or not own or any(matches(one, name) for one in found.skipped):
            continue
        seen |= {id(p) for p in own}
        others[name] = (tensor_bytes(own), _what(module))
    left = sum(size for size, _ in others.values())
    if converted >= left:
        return None
    largest = sorted(others.items(), key=lambda row: -row[1][0])
    names = [f"{name or 'the model itself'} ({what}, {amount(size)})" for name, (size, what) in largest[:4]]
    more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
    return (
        f"quantize_ converted {amount(converted)} of {amount(converted + left)} of weights; left: "
        f"{', '.join(names)}{more}; print the report for the reasons"
    )


def _what(module: nn.Module) -> str:
    name = type(module).__name__
    return f"{name}, an embedding" if is_table(module) and "Embedding" not in name else name
