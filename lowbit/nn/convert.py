"""quantize_: a model's layers replaced, in place, by quantized ones.

Every replacement is made first and put in its place afterwards, so that a layer that cannot be converted leaves the
model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowbit.functional import quantize
from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.conv import QuantConv2d
from lowbit.nn.converters import CONVERTERS, Make, class_name
from lowbit.nn.linear import QuantLinear, empty
from lowbit.nn.select import DEFAULT_SKIP, left_lines, nothing_found, select
from lowbit.recipes import Recipe
from lowbit.recipes import recipe as find_recipe

__all__ = ["Conversion", "class_name", "model_bytes", "quantize_", "quantized_layers", "uncompiled"]

#: Where nn.Module keeps the hooks on a layer's calls.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip

#: Containers whose fused inference kernels read their children's plain weights, the switch of each, and its off state.
_FUSED: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


@dataclass(frozen=True)
class Conversion:
    """What a conversion did. ``left``: layers that stay as they are, with the reason; bytes are of the whole model."""

    recipe: str
    converted: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} layers converted to {self.recipe}"]
        if self.bytes_before:
            lines[0] += f", {self.bytes_before / 2**20:.2f} -> {self.bytes_after / 2**20:.2f} MiB"
        lines += [f"  skipped: {', '.join(self.skipped)}"] if self.skipped else []
        lines += [f"  {line}" for line in left_lines(self.left)]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def quantize_(
    model: nn.Module,
    recipe: str | Recipe,
    calibration: Any = None,
    skip: Iterable[str] = DEFAULT_SKIP,
    *,
    group: int | None = None,
) -> Conversion:
    """Quantize the layers of ``model`` in place as ``recipe`` says, and report what was done.

    Converted: layers whose class is exactly nn.Linear, nn.Conv2d (``groups=1``), nn.MultiheadAttention or transformers'
    Conv1D (``CONVERTERS``). ``skip``: names of modules to leave, with wildcards; ``"lm_head"`` also means
    ``"model.lm_head"`` and all below it. ``group``: elements that share a scale, for ``int4-weight-only`` and ``nf4``.
    Layers that share a weight share one Quantized; an embedding keeps its own. Hooks and train/eval mode are kept, and
    so is the checkpointing of blocks. ``left`` names, with the reason, layers that hold more than their class does or a
    forward of their own, and other modules with weight matrices (embeddings and norms aside).

    Raises ValueError, with the model untouched: nothing to convert, layers quantized or (each by itself) compiled
    already, a weight with NaN or Inf or without a shape yet, a skip pattern without a match, an unknown recipe.
    TypeError for weights that are not fp32, bf16 or fp16, and for a model or a recipe that is none.
    """
    if calibration is not None:
        raise ValueError(
            "quantize_: every named recipe is dynamic or weight-only and needs no calibration; leave it out"
        )
    chosen = find_recipe(recipe, group=group)
    found = select(model, skip, CONVERTERS)
    if not found.layers:
        raise ValueError(nothing_found(model, found, "quantize_", "nn.Linear, nn.Conv2d, nn.MultiheadAttention"))
    maker = _Maker(chosen, _quantized)
    made = {id(layer): _convert(name, layer, maker) for name, layer in found.layers.items()}
    notes = _untied(model, found.layers)
    before = model_bytes(model)
    swap(model, made)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Conversion(
        chosen.name, tuple(found.layers), tuple(found.skipped), found.left, notes, before, model_bytes(model)
    )


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that torch.compile was given, if ``model`` is what it made of it."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def quantized_layers(model: nn.Module) -> dict[str, QuantLinear | QuantConv2d | QuantMultiheadAttention]:
    """The quantized layers of ``model`` by name (every name, where one has several), outermost ones only."""
    found: dict[str, QuantLinear | QuantConv2d | QuantMultiheadAttention] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, QuantLinear | QuantConv2d | QuantMultiheadAttention) and not inside:
            found[name] = module
    return found


# -- making ----------------------------------------------------------------------------------------------------------
class _Maker:
    """Makes the QuantLinears of one conversion with one recipe; weights that are one tensor become one Quantized.

    The model keeps each ``parameter`` alive meanwhile, so its storage tells it apart. A ``matrix`` may be a temporary
    copy, whose storage the next one can get; it only says which part of the parameter is meant, and which way round.
    """

    def __init__(self, recipe: Recipe, fill: Callable[[Tensor, Recipe], Any]) -> None:
        self.recipe, self.fill = recipe, fill
        self.made: dict[tuple[Any, ...], QuantLinear] = {}

    def __call__(self, parameter: Tensor, matrix: Tensor, bias: Any) -> QuantLinear:
        whole = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.stride())
        key = (*whole, matrix.storage_offset(), matrix.shape, matrix.stride())
        twin = self.made.get(key)
        if twin is None:
            self.made[key] = layer = QuantLinear(self.fill(matrix.detach(), self.recipe), bias, self.recipe)
            return layer
        layer = QuantLinear(twin.weight, bias, self.recipe)
        layer.share_weight(twin)
        return layer


def _quantized(weight: Tensor, recipe: Recipe) -> Any:
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and holds no numbers; load the model first")
    broken = int((~weight.isfinite()).sum())
    if broken:
        raise ValueError(
            f"{broken} of the weight's {weight.numel()} elements are NaN or Inf, and would spoil every element that "
            f"shares a scale with one; repair the weight, or name the layer in skip=..."
        )
    return quantize(weight, recipe.weight)


def _allocated(weight: Tensor, recipe: Recipe) -> Any:
    return empty(tuple(weight.shape), recipe.weight, weight.dtype, weight.device)


def _convert(name: str, layer: Any, make: Make) -> nn.Module:
    try:
        made = CONVERTERS[class_name(layer)].convert(layer, make)
    except (ValueError, TypeError) as error:
        raise type(error)(f"layer {name!r}: {error}") from error
    made.train(layer.training)
    # The very dictionaries, because the handles that remove a hook refer to them.
    for hooks in _HOOKS:
        setattr(made, hooks, getattr(layer, hooks))
    forward = vars(layer).get("forward")
    if forward is not None:  # a checkpointed block's, since all others are refused
        vars(made)["forward"] = partial(forward.func, made)
    return made


def replacements(model: nn.Module, recipes: dict[str, Recipe]) -> dict[int, nn.Module]:
    """Unfilled quantized layers for the layers of ``model`` with these names, by the ``id`` of what they replace.

    Raises ValueError where the model has no such layer or one that cannot be converted.
    """
    makers: dict[Recipe, _Maker] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[int, nn.Module] = {}
    for name, recipe in recipes.items():
        layer = modules.get(name)
        if layer is None:
            raise ValueError(f"the model has no module {name!r}")
        if class_name(layer) not in CONVERTERS:
            raise ValueError(f"{name!r} is a {type(layer).__name__} in this model, which has no quantized counterpart")
        reason = CONVERTERS[class_name(layer)].refuses(layer)
        if reason is not None:
            raise ValueError(f"{name!r} cannot be replaced by a quantized layer: {reason}")
        if id(layer) not in made:
            maker = makers.setdefault(recipe, _Maker(recipe, _allocated))
            made[id(layer)] = _convert(name, layer, maker)
    return made


# -- putting in place ------------------------------------------------------------------------------------------------
def swap(model: nn.Module, made: dict[int, nn.Module]) -> None:
    """Put each new layer wherever ``model`` holds the old one, and keep fused kernels from reading around them."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    leave_fused_kernels(model, tuple(type(new) for new in made.values()))


def leave_fused_kernels(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Switch off the fused inference kernels of containers that hold layers of these kinds."""
    for module in model.modules():
        for container, (switch, off) in _FUSED.items():
            if isinstance(module, container) and any(isinstance(inner, kinds) for inner in module.modules()):
                module.__dict__.setdefault(f"_lowbit_{switch}", getattr(module, switch))
                setattr(module, switch, off)


def restore_fused_kernels(model: nn.Module) -> None:
    """Undo ``leave_fused_kernels``."""
    for module in model.modules():
        for switch, _ in _FUSED.values():
            if f"_lowbit_{switch}" in module.__dict__:
                setattr(module, switch, module.__dict__.pop(f"_lowbit_{switch}"))


def _untied(model: nn.Module, layers: dict[str, Any]) -> tuple[str, ...]:
    """A note for each layer whose weight another module keeps in high precision, as a tied embedding does."""
    converted = {id(layer) for layer in layers.values()}
    keepers = {
        id(p): name
        for name, module in model.named_modules()
        if id(module) not in converted
        for p in module._parameters.values()
        if p is not None
    }
    return tuple(
        f"{name} shared its weight with {keepers[id(p)]}, which keeps it in high precision; {name} has its own "
        f"quantized copy now (skip it to keep the two tied)"
        for name, layer in layers.items()
        for p in layer._parameters.values()
        if p is not None and p.dim() > 1 and id(p) in keepers
    )


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storage counted once."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
