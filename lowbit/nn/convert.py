"""quantize_: a model's layers replaced, in place, by quantized ones.

Every replacement is made first and put in its place afterwards, so that a layer that cannot be converted leaves the
model as it was.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit.functional import quantize
from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.conv import QuantConv2d
from lowbit.nn.linear import QuantLinear, empty
from lowbit.recipes import Recipe
from lowbit.recipes import recipe as find_recipe

__all__ = ["CONVERTERS", "DEFAULT_SKIP", "Conversion", "Converter", "model_bytes", "quantize_", "quantized_layers"]

#: Left in high precision unless the caller says otherwise: the output projection of language models.
DEFAULT_SKIP = ("lm_head",)

#: Makes a QuantLinear of a parameter, the matrix [out, in] that the layer computes with (a view or a copy of it, or of
#: part of it), and a bias.
Make = Callable[[Tensor, Tensor, Any], QuantLinear]


class Converter(NamedTuple):
    """One kind of layer: what becomes of it, and a reason why one of them must stay as it is (None: none)."""

    convert: Callable[[Any, Make], nn.Module]
    refuses: Callable[[Any], str | None]


def _computed_weight(layer: nn.Module) -> str | None:
    if "weight" in layer._parameters:
        return None
    return "its weight is computed from other tensors (weight_norm, pruning); make it a plain parameter first"


def _refuses_conv(layer: nn.Conv2d) -> str | None:
    return (
        f"it has {layer.groups} groups, and one matrix product serves one"
        if layer.groups > 1
        else _computed_weight(layer)
    )


def _attention(layer: nn.MultiheadAttention, make: Make) -> QuantMultiheadAttention:
    packed = layer.in_proj_weight
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if packed is None else packed.chunk(3)
    biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.detach().chunk(3)
    q, k, v = (
        make(
            weight if packed is None else packed,
            weight,
            None if bias is None else nn.Parameter(bias.clone(), layer.in_proj_bias.requires_grad),
        )
        for weight, bias in zip(weights, biases, strict=True)
    )
    out = layer.out_proj
    return QuantMultiheadAttention(layer, q, k, v, make(out.weight, out.weight, out.bias))


#: What is converted, by the full name of its exact class: subclasses may compute something else, and are left alone.
CONVERTERS: dict[str, Converter] = {
    "torch.nn.modules.linear.Linear": Converter(
        lambda layer, make: make(layer.weight, layer.weight, layer.bias), _computed_weight
    ),
    "torch.nn.modules.conv.Conv2d": Converter(
        lambda layer, make: QuantConv2d(layer, make(layer.weight, layer.weight.flatten(1), layer.bias)), _refuses_conv
    ),
    "torch.nn.modules.activation.MultiheadAttention": Converter(_attention, lambda layer: None),
    "transformers.pytorch_utils.Conv1D": Converter(
        lambda layer, make: make(layer.weight, layer.weight.t(), layer.bias), _computed_weight
    ),
}

#: Layers that must be turned back before they can be quantized, and how.
_UNREADY = {
    "lowbit.train.linear.TrainLinear": "is being trained in low precision; call lowbit.train.convert_(model) first",
}

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
        lines += [f"  left {name}: {reason}" for name, reason in self.left.items()]
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
    Layers that share a weight share one Quantized; an embedding keeps its own. Hooks and train/eval mode are kept.

    Raises ValueError, with the model untouched: nothing to convert, layers quantized or (each by itself) compiled
    already, a weight with NaN or Inf, a skip pattern without a match, an unknown recipe. TypeError for weights that are
    not fp32, bf16 or fp16.
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


def quantized_layers(model: nn.Module) -> dict[str, QuantLinear | QuantConv2d | QuantMultiheadAttention]:
    """The quantized layers of ``model`` by name (every name, where one has several), outermost ones only."""
    found: dict[str, QuantLinear | QuantConv2d | QuantMultiheadAttention] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, QuantLinear | QuantConv2d | QuantMultiheadAttention) and not inside:
            found[name] = module
    return found


# -- choosing --------------------------------------------------------------------------------------------------------
@dataclass
class Selection:
    """The layers to convert by (first) name, the names that were skipped, and why others are left as they are."""

    layers: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that torch.compile was given, if ``model`` is what it made of it."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` names the module ``name`` or one that it is inside of, in full or from any dot on."""
    words = name.split(".")
    spans = (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return any(fnmatchcase(span, pattern) for span in spans)


def select(model: nn.Module, skip: Iterable[str], table: dict[str, Converter], inside_only: bool = True) -> Selection:
    """The layers of ``model`` that ``table`` converts and ``skip`` does not name. Raises as ``quantize_`` does."""
    if isinstance(skip, str):
        raise TypeError(f"skip must be a collection of patterns, got the string {skip!r}; write skip=({skip!r},)")
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    patterns = tuple(skip)
    every = [name for several in names.values() for name in several]
    for pattern in patterns:
        if pattern not in DEFAULT_SKIP and not any(matches(pattern, name) for name in every):
            raise ValueError(f"skip pattern {pattern!r} matches no module; names are such as {_examples(every)}")
    found, inside = Selection(), set[str]()
    for key, module in modules.items():
        first = names[key][0]
        kind = class_name(module)
        if any(first.startswith(f"{outer}.") for outer in inside):
            continue
        quantized = isinstance(module, QuantLinear | QuantConv2d | QuantMultiheadAttention)
        if not (kind in table or kind in _UNREADY or quantized or isinstance(module, nn.Linear)):
            continue
        inside.add(first)
        if any(matches(pattern, name) for pattern in patterns for name in names[key]):
            found.skipped.append(first)
        elif kind in table and inside_only and any(name.split(".")[-1] == "_orig_mod" for name in names[key]):
            raise ValueError(
                f"{first} is compiled by itself, and its compiled code would go on with the layer as it is; "
                f"quantize first, then compile"
            )
        elif kind in table:
            reason = table[kind].refuses(module)
            if reason is None:
                found.layers[first] = module
            else:
                found.left[first] = reason
        elif quantized:
            raise ValueError(
                f"{first or 'the model'} is quantized already (recipe {module.recipe}); "
                f"quantize the original model, or name the layers to leave in skip=..."
            )
        elif kind in _UNREADY:
            raise ValueError(f"{first or 'the model'} {_UNREADY[kind]}")
        else:
            found.left[first] = f"a {type(module).__name__} is not exactly nn.Linear, and may compute something else"
    if inside_only and "" in found.layers:
        raise ValueError(
            f"the model itself is a {type(model).__name__}, which cannot be replaced in place; "
            f"convert nn.Sequential(model) instead"
        )
    return found


def _examples(names: list[str], most: int = 4) -> str:
    leaves = [name for name in names if name and not any(other.startswith(f"{name}.") for other in names)]
    return ", ".join(repr(name) for name in leaves[:most]) or "none (the model has no modules inside)"


def nothing_found(model: nn.Module, found: Selection, what: str, converted: str) -> str:
    """Why a conversion found nothing to do, and what to try."""
    kinds = Counter(
        type(module).__name__
        for module in model.modules()
        if any(p is not None and p.dim() > 1 for p in module._parameters.values())
    )
    seen = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no layer with a weight matrix"
    lines = [f"{what} found nothing to convert: it converts layers of class {converted}, and the model has {seen}"]
    lines += (
        [f"skipped as asked: {', '.join(found.skipped)}; pass skip=() to convert these too"] if found.skipped else []
    )
    lines += [f"left {name}: {reason}" for name, reason in found.left.items()]
    return "\n".join(lines)


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
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
