"""quantize_: replaces the layers of a model by quantized layers, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lowbit.convert.adapters import find
from lowbit.convert.engine import Task, convert, make_all, matrices, swap
from lowbit.convert.maker import Allocated, Calibrated, QuantMaker, Ruled, Source
from lowbit.convert.protect import protections
from lowbit.convert.select import DEFAULT_SKIP, Chosen, Selection, Skip, is_table, plain_layers
from lowbit.datafree import find_data_free
from lowbit.models.names import is_inside
from lowbit.models.ties import holders, tensor_bytes
from lowbit.nn.base import KINDS, kind
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes, refuse_beyond
from lowbit.recipes import recipe as find_recipe
from lowbit.report import Report
from lowbit.sizes import amount
from lowbit.user_warnings import warn

__all__ = ["quantize_", "quantize_from", "replacements"]


def quantize_(
    model: nn.Module,
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None],
    calibration: Any = None,
    *,
    method: str | None = None,
    skip: Skip = DEFAULT_SKIP,
    group: int | None = None,
    prepack: bool = False,
) -> Report:
    """Quantize the layers of ``model`` in place.

    Supported layers: nn.Linear, nn.Conv1d to nn.Conv3d, nn.MultiheadAttention, nn.Embedding (by name), and
    transformers' Conv1D and stacked experts. Subclasses are supported if they compute the same with the same
    parameters. ``lowbit.convert.register`` adds other classes. Layers that share a weight and a recipe share one
    quantized weight. Hooks, train/eval mode and checkpointing are kept.

    These layers are skipped unless a pattern of per-layer recipes spells out their name:

    - LoRA and other adapters (``lora_*``, ``modules_to_save``, peft's classes), and embeddings.
    - Output layers, if ``skip`` is not given: ``lm_head``, and the last Linears according to
      ``lowbit.models.find_output_layers``, whatever their names.
    - Output layers tied to an embedding. ``skip=()`` converts them, as a copy.
    - Below 8 bits, layers that read raw input such as pixels. ``skip=()`` converts them.

    Warns if less than half of the weight bytes were converted, and names the largest layers that were not. Also warns
    if a tied weight is no longer shared.

    Args:
        model: A model in high precision. Its weights must be fp32, bf16 or fp16.
        recipe: A name, a Recipe, or per-layer recipes:
            ``{"*": "int4-weight-only", "down_proj": "int8", "lm_head": None}``. The last pattern that matches a layer
            decides. A layer with None is skipped.
        calibration: The result of ``lowbit.calibrate`` for this model and recipe.
        method: Without a calibration, the data-free method, one of ``lowbit.datafree.DATA_FREE``. ``"nearest"`` rounds
            to nearest with scales from the largest magnitude. None: the best known method for each scheme
            (``lowbit.datafree.default_data_free``).
        skip: Modules to skip. Patterns are described in ``lowbit.models.names``: ``"lm_head"`` matches
            ``"model.lm_head"`` and everything inside it. ``"blocks.*.up"``, ``"re:..."`` and functions of module and
            path are patterns too.
        group: Elements per scale, for ``int4-weight-only`` and ``nf4``.
        prepack: Call ``prepack_`` on the result, for inference.

    Returns:
        The report: per layer its recipe, bits, bytes and SQNR, and the reason for each layer that was skipped.

    Raises:
        ValueError: The recipe is unknown, a pattern matches nothing, or there is nothing to convert. A layer is
            quantized already, prepared for training, or compiled by itself. A weight has NaN or Inf, or no shape yet.
            The model is unchanged.
        TypeError: A weight is not a plain fp32, bf16 or fp16 tensor; ``model`` or ``recipe`` has another type.
    """
    source = _source(calibration, method)
    if prepack:
        from lowbit.convert.prepack import prepack_
    report = quantize_from(model, _recipes(recipe, group), source, skip)
    if prepack:
        prepack_(model)
    return report


def quantize_from(model: nn.Module, recipes: LayerRecipes, source: Source, skip: Skip) -> Report:
    """``quantize_`` with weights from ``source``."""
    recipes = source.recipes(recipes)
    names, protect = protections(model, skip, recipes, unties=True)
    maker = QuantMaker(model, source)

    def put(model: nn.Module, layers: dict[int, nn.Module]) -> None:
        edits = source.edits(model)
        swap(model, layers)
        for name, value in edits.items():
            model.get_parameter(name).data.copy_(value)

    task = Task(
        "quantize_",
        "nn.Linear, nn.Conv1d to 3d, nn.MultiheadAttention",
        plain_layers(),
        maker.convert,
        maker.measure,
        put,
    )
    report, selection = convert(model, task, recipes, names, protect)
    notes = _untied(model, selection)
    small = _small_effect(model, selection)
    for note in (*notes, *([small] if small else [])):
        warn(note)
    return replace(report, notes=notes)


def _source(calibration: Any, method: str | None) -> Source:
    """The source of the weights: a data-free method, or a calibration."""
    if calibration is None:
        return Ruled(find_data_free(method, "quantize_"))
    if method is not None:
        raise ValueError(
            f"quantize_: method={method!r} is for weights without calibration, and a calibration is given; give one of "
            f"the two"
        )
    if isinstance(calibration, str) or (
        isinstance(calibration, tuple | list | set)
        and calibration
        and all(isinstance(name, str) for name in calibration)
    ):
        names = (calibration,) if isinstance(calibration, str) else tuple(calibration)
        raise TypeError(f"quantize_: the third argument is calibration; for modules to leave, write skip={names!r}")
    if not hasattr(calibration, "weight"):
        raise TypeError(
            f"quantize_: calibration must be the result of lowbit.calibrate, got {type(calibration).__name__}; to "
            f"calibrate with batches, call lowbit.calibrate(model, recipe, batches) first"
        )
    return Calibrated(calibration)


def _recipes(recipe: Any, group: int | None) -> LayerRecipes:
    if group is not None and isinstance(recipe, Mapping | LayerRecipes):
        raise ValueError(f"quantize_: group={group} is for one recipe; by layer, write for instance 'nf4:group{group}'")
    recipes = layer_recipes(recipe if group is None else find_recipe(recipe, group=group))
    for row in recipes.recipes:
        refuse_beyond(row, "quantize_", ("output.a",), scale=("static",), transform=("hadamard",))
        refuse_beyond(row, "quantize_", ("output.b",), transform=("hadamard",))
    return recipes


def replacements(model: nn.Module, recipes: dict[str, Recipe]) -> dict[int, nn.Module]:
    """Return unfilled quantized layers for the layers of ``model`` with these names, by the ``id`` of the plain layer.

    Raises ValueError if the model has no such layer, or a layer cannot be converted.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, Chosen] = {}
    for name, recipe in recipes.items():
        layer = modules.get(name)
        if layer is None:
            raise ValueError(f"the model has no module {name!r}")
        if kind(layer) is not None:
            raise ValueError(f"{name!r} {KINDS[str(kind(layer))]}")
        adapter, listed, reason = find(layer)
        if listed is None:
            raise ValueError(
                f"{name!r} is a {type(layer).__name__} in this model, which has no quantized counterpart; if your code "
                f"registers one (lowbit.convert.register), run that first"
            )
        reason = reason if adapter is None else adapter.refuses(layer)
        if adapter is None or reason is not None:
            raise ValueError(f"{name!r} cannot be replaced by a quantized layer: {reason}")
        chosen[name] = Chosen(layer, adapter, recipe)
    return make_all(chosen, QuantMaker(model, Allocated()).convert)


# -- notes and warnings -----------------------------------------------------------------------------------------------
def _untied(model: nn.Module, selection: Selection) -> tuple[str, ...]:
    """A note for each converted layer whose weight another module keeps in high precision."""
    converted = {id(chosen.module) for chosen in selection.chosen.values()}
    keepers = {
        parameter: holder.path
        for parameter, sharing in holders(model).items()
        for holder in sharing
        if id(holder.module) not in converted
    }
    return tuple(
        f"{name} shared its weight with {keepers[id(p)]}, which keeps it in high precision; {name} has its own "
        f"quantized copy now (skip it to keep the two tied)"
        for name, chosen in selection.chosen.items()
        for p in chosen.module._parameters.values()
        if p is not None and p.dim() > 1 and keepers.get(id(p), name) != name
    )


def _small_effect(model: nn.Module, selection: Selection) -> str | None:
    """A warning if less than half of the weight bytes were converted, skipped modules not counted."""
    converted = tensor_bytes(p for chosen in selection.chosen.values() for p in matrices(chosen.module))
    unconverted: dict[str, tuple[int, str]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        weights = [p for p in matrices(module, recurse=False) if id(p) not in seen]
        if kind(module) is not None or not weights or any(is_inside(name, skipped) for skipped in selection.skipped):
            continue
        seen |= {id(p) for p in weights}
        unconverted[name] = (tensor_bytes(weights), _class_words(module))
    left = sum(size for size, _ in unconverted.values())
    if converted >= left:
        return None
    largest = sorted(unconverted.items(), key=lambda row: -row[1][0])
    names = [f"{name or 'the model itself'} ({words}, {amount(size)})" for name, (size, words) in largest[:4]]
    more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
    return (
        f"quantize_ converted {amount(converted)} of {amount(converted + left)} of weights; left: "
        f"{', '.join(names)}{more}; print the report for the reasons"
    )


def _class_words(module: nn.Module) -> str:
    name = type(module).__name__
    return f"{name}, an embedding" if is_table(module) and "Embedding" not in name else name
