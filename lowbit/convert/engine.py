"""The engine of all conversions: selects layers, makes their replacements, swaps them and reports.

All replacements are made before the first swap, so an error leaves the model unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lowbit.convert.adapters import Adapter
from lowbit.convert.select import Chosen, Judge, Protection, Selection, Skip, nothing_found, select
from lowbit.models.ties import model_bytes
from lowbit.models.wrap import WRAPPERS, plain_class, wrap, wrappers
from lowbit.nn.base import kind
from lowbit.recipes import LayerRecipes, Recipe
from lowbit.report import LayerReport, Report

__all__ = [
    "AFTER_SWAP", "Origin", "Task", "convert", "forget_origin", "make_all", "matrices", "origin", "quantized_layers",
    "shell", "swap", "sync_fused_kernels", "take_over",
]  # fmt: skip

#: The attributes of nn.Module with call hooks.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip

#: The attribute with a converted layer's Origin. It is set in ``__dict__``, so that it is not a submodule.
_ORIGIN = "_lowbit_origin"

#: Callbacks of integrations, called with each model whose layers have been replaced.
AFTER_SWAP: list[Callable[[nn.Module], None]] = []

#: Containers whose fused inference kernels read the plain weights of their children, with the attribute and its value
#: that switch the kernel off.
_FUSED: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


class Origin(NamedTuple):
    """The plain layer that a converted layer was made from."""

    layer: nn.Module  # with None for its tensors
    trained: frozenset[str]  # the parameters that required grad


class Task(NamedTuple):
    """One kind of conversion.

    Attributes:
        what: The name in messages.
        converts: The source classes, in words.
        judge: Returns the ``select.Verdict`` on a module.
        make: ``make(layer, adapter, recipe)`` returns the replacement of a layer, without changing anything.
        measure: ``measure(layer, new, recipe)`` returns fields of the layer's report.
        put: ``put(model, new)`` swaps the replacements in, which are given by the ``id`` of the layer.
        replaces: Whether layers are replaced by new modules. Then the model itself cannot be one of the layers.
        optional: Whether it is no error that all layers stay. The report has the reasons.
    """

    what: str
    converts: str
    judge: Judge
    make: Callable[[Any, Adapter, Any], Any]
    measure: Callable[[Any, Any, Recipe | None], dict[str, Any]]
    put: Callable[[nn.Module, dict[int, Any]], None]
    replaces: bool = True
    optional: bool = False


def convert(
    model: nn.Module,
    task: Task,
    recipes: LayerRecipes | None = None,
    skip: Skip = (),
    protect: Callable[[str, nn.Module], Protection | None] = lambda name, module: None,
) -> tuple[Report, Selection]:
    """Run ``task`` on the layers that ``select`` selects. An error leaves the model unchanged.

    Raises the errors of ``select`` and ``task.make``, and ValueError if there is no layer to convert, or the model
    itself would have to be replaced.
    """
    selection = select(model, task.judge, recipes, skip, protect)
    if not selection.chosen and not (task.optional and selection.left):
        raise ValueError(nothing_found(model, selection, task.what, task.converts))
    if task.replaces and "" in selection.chosen:
        raise ValueError(
            f"the model itself is a {type(model).__name__}, which cannot be replaced in place; "
            f"convert nn.Sequential(model) instead"
        )
    new = make_all(selection.chosen, task.make)
    before = model_bytes(model)
    rows = [
        LayerReport(
            name,
            plain_class(chosen.module).__name__,
            _recipe_name(chosen, new[id(chosen.module)]),
            **task.measure(chosen.module, new[id(chosen.module)], chosen.recipe),
        )
        for name, chosen in selection.chosen.items()
    ]
    task.put(model, new)
    return Report(
        task.what,
        None if recipes is None else " and ".join(recipe.name for recipe in recipes.recipes),
        tuple(rows),
        tuple(selection.skipped),
        selection.left,
        (),
        before,
        model_bytes(model),
    ), selection


def _recipe_name(chosen: Chosen, new: Any) -> str | None:
    recipes = (chosen.recipe, getattr(chosen.module, "recipe", None), getattr(new, "recipe", None))
    return next((recipe.name for recipe in recipes if recipe is not None), None)


# -- making -----------------------------------------------------------------------------------------------------------
def make_all(chosen: dict[str, Chosen], make: Callable[[Any, Adapter, Any], Any]) -> dict[int, Any]:
    """The replacement of each layer, by the ``id`` of the layer. Errors name the layer."""
    replacements: dict[int, Any] = {}
    for name, (layer, adapter, recipe) in chosen.items():
        if id(layer) in replacements:
            continue
        try:
            new = make(layer, adapter, recipe)
        except (ValueError, TypeError, RuntimeError) as error:
            raise type(error)(f"layer {name!r}: {error}") from error
        if isinstance(new, nn.Module) and new is not layer:
            take_over(new, layer)
        replacements[id(layer)] = new
    return replacements


def take_over(new: nn.Module, layer: nn.Module) -> None:
    """Give ``new`` the mode, hooks, wrappers and origin of the layer that it replaces."""
    new.train(layer.training)
    # The same dictionaries, because the handles that remove a hook refer to them.
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(layer, hooks))
    for wrapper in wrappers(layer):
        wrap(new, wrapper)
    if kind(new) is not None:
        vars(new)[_ORIGIN] = origin(layer) if kind(layer) is not None else _origin_of(layer)


def origin(layer: nn.Module) -> Origin | None:
    """The Origin of a converted layer; None if no conversion made it."""
    source: Origin | None = vars(layer).get(_ORIGIN)
    return source


def forget_origin(layer: nn.Module) -> None:
    """Let a layer be turned back into an nn.Linear rather than into the class that it replaced."""
    vars(layer).pop(_ORIGIN, None)


def _origin_of(layer: nn.Module) -> Origin:
    return Origin(shell(layer), frozenset(name for name, p in layer.named_parameters() if p.requires_grad))


def shell(layer: nn.Module) -> nn.Module:
    """A copy of ``layer``, and of the modules inside, with None for every parameter and buffer, and without hooks."""
    plain = plain_class(layer)
    bare = plain.__new__(plain)
    nn.Module.__init__(bare)
    omitted = {*vars(bare), "forward", WRAPPERS}
    vars(bare).update({name: value for name, value in vars(layer).items() if name not in omitted})
    bare.training = layer.training
    bare._parameters.update(dict.fromkeys(layer._parameters))
    bare._buffers.update(dict.fromkeys(layer._buffers))
    bare._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
    bare._modules.update({name: None if child is None else shell(child) for name, child in layer._modules.items()})
    return bare


# -- swapping ---------------------------------------------------------------------------------------------------------
def swap(model: nn.Module, new: dict[int, nn.Module]) -> None:
    """Replace modules of ``model``, given by the ``id`` of the old module, everywhere in the model."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    sync_fused_kernels(model)
    for callback in AFTER_SWAP:
        callback(model)


def sync_fused_kernels(model: nn.Module) -> None:
    """Switch off the fused inference kernels of containers with lowbit layers or lowbit attention; restore others."""
    for module in model.modules():
        for container, (switch, off) in _FUSED.items():
            if not isinstance(module, container):
                continue
            remembered = f"_lowbit_{switch}"
            if any(kind(inner) is not None or hasattr(inner, "attend") for inner in module.modules()):
                vars(module).setdefault(remembered, getattr(module, switch))
                setattr(module, switch, off)
            elif remembered in vars(module):
                setattr(module, switch, vars(module).pop(remembered))


# -- layers and weights of models -------------------------------------------------------------------------------------
def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The outermost quantized layers of ``model``, packed or not, by each of their names."""
    layers: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{above}.") for above in layers)
        if kind(module) in ("quantized", "packed") and not inside:
            layers[name] = module
    return layers


def matrices(module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """The parameters of a module with two or more dimensions, and with ``recurse`` also of its submodules."""
    return [p for p in module.parameters(recurse) if not is_lazy(p) and p.dim() > 1]
