"""quantize_: a model's layers replaced, in place, by quantized ones."""

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
    """Quantize the layers of ``model`` in place as ``recipe`` says, and report what was done, layer by layer.

    ``recipe``: a name, a Recipe, or recipes by layer, ``{"*": "int4-weight-only", "down_proj": "int8", "lm_head":
    None}``: the last pattern that means a layer decides, and None leaves the layer.
    Converted: nn.Linear, nn.Conv1d to nn.Conv3d, nn.MultiheadAttention, transformers' Conv1D, their subclasses that
    compute the same with the same parameters, and what ``lowbit.convert.register`` adds.
    ``calibration``: what ``lowbit.calibrate`` found for this model and recipe.
    ``method``: without a calibration, how codes and scales of weights are chosen, one of ``lowbit.datafree.DATA_FREE``.
    None is the best known for each scheme (``lowbit.datafree.default_data_free``); ``nearest`` rounds to the nearest
    code by scales from the largest magnitude.
    ``skip``: the modules to leave. Patterns here and there are those of ``lowbit.models.names``: ``"lm_head"`` means
    ``"model.lm_head"`` too, and all inside; ``"blocks.*.up"``, ``"re:..."`` and functions of module and path serve too.
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
    source = _source(calibration, method)
    if prepack:
        from lowbit.convert.prepack import prepack_
    report = quantize_from(model, _plan(recipe, group), source, skip)
    if prepack:
        prepack_(model)
    return report


def quantize_from(model: nn.Module, chosen: LayerRecipes, source: Source, skip: Skip) -> Report:
    """``quantize_`` with the weights that ``source`` has; for functions of the API, whose callers are warned."""
    chosen = source.plan(chosen)
    names, protect = protections(model, skip, chosen, unties=True)
    maker = QuantMaker(model, source)

    def put(model: nn.Module, made: dict[int, nn.Module]) -> None:
        edits = source.edits(model)
        swap(model, made)
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
    report, found = convert(model, task, chosen, names, protect)
    notes = _untied(model, found)
    small = _small_effect(model, found)
    for note in (*notes, *([small] if small else [])):
        warn(note)
    return replace(report, notes=notes)


def _source(calibration: Any, method: str | None) -> Source:
    """Where the weights come from: a rule that needs no data, or what calibration found."""
    if calibration is None:
        return Ruled(find_data_free(method, "quantize_"))
    if method is not None:
        raise ValueError(
            f"quantize_: method={method!r} is for weights without calibration, and the calibration has chosen them; "
            f"give one of the two"
        )
    if isinstance(calibration, str) or (
        isinstance(calibration, tuple | list | set) and calibration and all(isinstance(one, str) for one in calibration)
    ):
        names = (calibration,) if isinstance(calibration, str) else tuple(calibration)
        raise TypeError(f"quantize_: the third argument is calibration; for modules to leave, write skip={names!r}")
    if not hasattr(calibration, "weight"):
        raise TypeError(
            f"quantize_: calibration must be what lowbit.calibrate returned, got {type(calibration).__name__}; to "
            f"calibrate with batches, call lowbit.calibrate(model, recipe, batches) first"
        )
    return Calibrated(calibration)


def _plan(recipe: Any, group: int | None) -> LayerRecipes:
    if group is not None and isinstance(recipe, Mapping | LayerRecipes):
        raise ValueError(f"quantize_: group={group} is for one recipe; by layer, write for instance 'nf4:group{group}'")
    chosen = layer_recipes(recipe if group is None else find_recipe(recipe, group=group))
    for one in chosen.recipes:
        refuse_beyond(one, "quantize_", ("output.a",), scale=("static",), transform=("hadamard",))
        refuse_beyond(one, "quantize_", ("output.b",), transform=("hadamard",))
    return chosen


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
        if kind(layer) is not None:
            raise ValueError(f"{name!r} {KINDS[str(kind(layer))]}")
        adapter, listed, reason = find(layer)
        if listed is None:
            raise ValueError(
                f"{name!r} is a {type(layer).__name__} in this model, which has no quantized counterpart; where your "
                f"code registers one (lowbit.convert.register), run that first"
            )
        reason = reason if adapter is None else adapter.refuses(layer)
        if adapter is None or reason is not None:
            raise ValueError(f"{name!r} cannot be replaced by a quantized layer: {reason}")
        chosen[name] = Chosen(layer, adapter, recipe)
    return make_all(chosen, QuantMaker(model, Allocated()).convert)


# -- what is worth knowing --------------------------------------------------------------------------------------------
def _untied(model: nn.Module, found: Selection) -> tuple[str, ...]:
    """A note for each converted layer whose weight another module keeps in high precision."""
    taken = {id(chosen.module) for chosen in found.chosen.values()}
    keepers = {
        parameter: holder.path
        for parameter, several in holders(model).items()
        for holder in several
        if id(holder.module) not in taken
    }
    return tuple(
        f"{name} shared its weight with {keepers[id(p)]}, which keeps it in high precision; {name} has its own "
        f"quantized copy now (skip it to keep the two tied)"
        for name, chosen in found.chosen.items()
        for p in chosen.module._parameters.values()
        if p is not None and p.dim() > 1 and keepers.get(id(p), name) != name
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
        if kind(module) is not None or not own or any(is_inside(name, skipped) for skipped in found.skipped):
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
