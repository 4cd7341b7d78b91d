"""The engine of every conversion of a model: select the layers, make what replaces them, put it in place, report.

Everything is made before anything is put in its place: a layer that cannot be converted leaves the model as it was.
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
    "AFTER_SWAP", "Origin", "Task", "convert", "make_all", "matrices", "origin", "quantized_layers",
    "shell", "swap", "sync_fused_kernels", "take_over",
]  # fmt: skip

#: Where nn.Module keeps the hooks on a layer's calls.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip

#: Where a converted layer keeps its Origin: in its ``__dict__``, because a module inside of it this is not.
_ORIGIN = "_lowbit_origin"

#: Called with every model whose layers have been replaced; an integration adds its own.
AFTER_SWAP: list[Callable[[nn.Module], None]] = []

#: Containers whose fused inference kernels read their children's plain weights, the switch of each, and its off state.
_FUSED: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


class Origin(NamedTuple):
    """What a converted layer was: the plain layer with None for its tensors, and which parameters required grad."""

    layer: nn.Module
    trained: frozenset[str]


class Task(NamedTuple):
    """One kind of conversion.

    ``what``: its name in messages. ``converts``: the classes that it starts from, in words. ``judge``: see
    ``select.Verdict``. ``make(layer, adapter, recipe)``: what ``put`` puts in place of the layer; it changes nothing.
    ``put(model, made)``: with ``made`` by the ``id`` of the layer. ``replaces``: whether new modules take the place of
    the layers, which a model that is a layer itself does not allow. ``optional``: it is no error that all layers
    stay, for reasons that the report gives. ``measure(layer, made, recipe)``: what the report says of the layer besides
    its name.
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
    plan: LayerRecipes | None = None,
    skip: Skip = (),
    protect: Callable[[str, nn.Module], Protection | None] = lambda name, module: None,
) -> tuple[Report, Selection]:
    """Run ``task`` on the layers that ``select`` finds. Raises as ``select`` and ``task.make`` do; ValueError where
    nothing is found, and where the model itself would have to be replaced. An error leaves the model as it was.
    """
    found = select(model, task.judge, plan, skip, protect)
    if not found.chosen and not (task.optional and found.left):
        raise ValueError(nothing_found(model, found, task.what, task.converts))
    if task.replaces and "" in found.chosen:
        raise ValueError(
            f"the model itself is a {type(model).__name__}, which cannot be replaced in place; "
            f"convert nn.Sequential(model) instead"
        )
    made = make_all(found.chosen, task.make)
    before = model_bytes(model)
    kinds = {name: plain_class(chosen.module).__name__ for name, chosen in found.chosen.items()}
    rows = [
        LayerReport(
            name,
            kinds[name],
            getattr(chosen.recipe or getattr(chosen.module, "recipe", None), "name", None),
            **task.measure(chosen.module, made[id(chosen.module)], chosen.recipe),
        )
        for name, chosen in found.chosen.items()
    ]
    task.put(model, made)
    return Report(
        task.what,
        None if plan is None else " and ".join(recipe.name for recipe in plan.recipes),
        tuple(rows),
        tuple(found.skipped),
        found.left,
        (),
        before,
        model_bytes(model),
    ), found


# -- making -----------------------------------------------------------------------------------------------------------
def make_all(chosen: dict[str, Chosen], make: Callable[[Any, Adapter, Any], Any]) -> dict[int, Any]:
    """What replaces each layer, by the ``id`` of the layer; errors say the layer's name."""
    made: dict[int, Any] = {}
    for name, (layer, adapter, recipe) in chosen.items():
        if id(layer) in made:
            continue
        try:
            new = make(layer, adapter, recipe)
        except (ValueError, TypeError, RuntimeError) as error:
            raise type(error)(f"layer {name!r}: {error}") from error
        if isinstance(new, nn.Module) and new is not layer:
            take_over(new, layer)
        made[id(layer)] = new
    return made


def take_over(new: nn.Module, layer: nn.Module) -> None:
    """Give ``new`` the mode, hooks, wrappers and origin of the layer that it replaces."""
    new.train(layer.training)
    # The very dictionaries, because the handles that remove a hook refer to them.
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(layer, hooks))
    for wrapper in wrappers(layer):
        wrap(new, wrapper)
    if kind(new) is not None:
        vars(new)[_ORIGIN] = origin(layer) if kind(layer) is not None else _origin_of(layer)


def origin(layer: nn.Module) -> Origin | None:
    """What a converted layer was before; None for one that no conversion made."""
    found: Origin | None = vars(layer).get(_ORIGIN)
    return found


def _origin_of(layer: nn.Module) -> Origin:
    return Origin(shell(layer), frozenset(name for name, p in layer.named_parameters() if p.requires_grad))


def shell(layer: nn.Module) -> nn.Module:
    """A copy of ``layer``, and of the modules inside, with None for every parameter and buffer, and without hooks."""
    plain = plain_class(layer)
    bare = plain.__new__(plain)
    nn.Module.__init__(bare)
    others = {*vars(bare), "forward", WRAPPERS}
    vars(bare).update({name: value for name, value in vars(layer).items() if name not in others})
    bare.training = layer.training
    bare._parameters.update(dict.fromkeys(layer._parameters))
    bare._buffers.update(dict.fromkeys(layer._buffers))
    bare._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
    bare._modules.update({name: None if child is None else shell(child) for name, child in layer._modules.items()})
    return bare


# -- putting in place -------------------------------------------------------------------------------------------------
def swap(model: nn.Module, made: dict[int, nn.Module]) -> None:
    """Put each new module wherever ``model`` holds the old one, keep fused kernels from reading around them, and tell
    who asked for it.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    sync_fused_kernels(model)
    for tell in AFTER_SWAP:
        tell(model)


def sync_fused_kernels(model: nn.Module) -> None:
    """Switch the fused inference kernels of containers off where these hold layers of lowbit or attention that lowbit
    computes, and else on again.
    """
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


# -- looking at models ------------------------------------------------------------------------------------------------
def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The quantized layers of ``model``, packed or not, by name (every name of each), outermost ones only."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{above}.") for above in found)
        if kind(module) in ("quantized", "packed") and not inside:
            found[name] = module
    return found


def matrices(module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """The parameters of a module, and with ``recurse`` of those inside of it, that have two axes or more."""
    return [p for p in module.parameters(recurse) if not is_lazy(p) and p.dim() > 1]
