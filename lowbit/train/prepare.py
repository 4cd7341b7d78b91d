"""``prepare_`` and ``convert_``: switch low-precision training of a model's layers on and off; ``state``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lowbit.convert.adapters import Adapter
from lowbit.convert.engine import Task, convert, sync_fused_kernels
from lowbit.convert.maker import measured, require_float
from lowbit.convert.protect import protections
from lowbit.convert.select import DEFAULT_SKIP, Skip, plain_layers
from lowbit.models.wrap import plain_class, replaced_forward
from lowbit.nn.base import announce
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes
from lowbit.report import Report, report_on
from lowbit.train.attention import Projection, TrainMultiheadAttention
from lowbit.train.gemms import Products
from lowbit.train.kept_blocks import keep_blocks
from lowbit.train.linear import TrainLayer, TrainLinear
from lowbit.train.states import State

__all__ = ["convert_", "prepare_", "state"]

#: The name of the State in the layer that it is a child of.
_CHILD = "lowbit_state"

#: The classes of layers that ``prepare_`` converts, with the classes that they get.
_TRAINED: dict[type[nn.Module], Any] = {nn.Linear: TrainLinear, nn.MultiheadAttention: TrainMultiheadAttention}


def prepare_(
    model: nn.Module,
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None] = "fp8",
    *,
    skip: Skip = DEFAULT_SKIP,
    reuse_weights: bool = True,
) -> Report:
    """Make the nn.Linear and nn.MultiheadAttention layers of ``model`` train in low precision, in place.

    Parameters, names, hooks, checkpointing and existing optimizers stay valid. Subclasses that compute the same are
    converted too. An nn.MultiheadAttention is one layer: its four projections get the same recipe. An output layer
    keeps sharing its weight with an embedding. 4-bit recipes skip the first and the last blocks
    (``Recipe.keep_blocks``). ``keep_blocks=0`` converts these blocks too, and per-layer recipes convert the layers that
    they name.

    Args:
        model: the model, which is changed in place.
        recipe: a training recipe, or per-layer recipes ``{pattern: recipe or None}``, as for ``quantize_``.
        skip: modules to leave as they are, as for ``quantize_``.
        reuse_weights: with gradient accumulation, reuse the codes of a weight for all micro-batches of a step. They
            take about one byte per element until the optimizer steps. Pass False for code that writes to
            ``weight.data`` between micro-batches on a GPU: each forward then quantizes the weight again.

    Returns:
        A report with one row per layer.

    Raises:
        ValueError: a recipe for inference only, nothing to convert, or a pattern without a match. Layers that are
            prepared or quantized already, or whose weight has no shape yet. The model is unchanged.
        TypeError: a weight is not fp32, bf16 or fp16. The model is unchanged.
    """
    recipes = layer_recipes(recipe)
    products = {recipe: Products.of(recipe) for recipe in recipes.recipes}
    names, protect = protections(model, skip, recipes, unties=False)
    protect = keep_blocks(model, recipes, protect)

    def make(layer: nn.Module, adapter: Adapter, recipe: Recipe) -> tuple[nn.Module, Recipe]:
        for weight in _weights(layer):
            require_float(weight)
        return layer, recipe

    def measure(layer: nn.Module, _converted: Any, _recipe: Recipe | None) -> dict[str, Any]:
        weights = _weights(layer)
        count = sum(weight.numel() for weight in weights)
        return measured(layer, layer, count, 8.0 * sum(w.numel() * w.itemsize for w in weights) / max(count, 1))

    def put(model: nn.Module, converted: dict[int, Any]) -> None:
        announce()  # no constructor runs for a layer that changes its class
        for layer, recipe in converted.values():
            cls = next(cls for plain, cls in _TRAINED.items() if isinstance(layer, plain))
            cls.put_on(layer, recipe, products[recipe], reuse_weights)
        inside = {id(module) for layer, _ in converted.values() for module in layer.modules()}
        _share(State(), model, {path: layer for path, layer in _layers(model).items() if id(layer) in inside})
        sync_fused_kernels(model)

    judge = plain_layers(only=tuple(_TRAINED), replaced=False)
    task = Task("train.prepare_", "nn.Linear, nn.MultiheadAttention", judge, make, measure, put, replaces=False)
    return convert(model, task, recipes, names, protect)[0]


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    """The matrices that a plain layer multiplies by."""
    return [parameter for parameter in layer.parameters() if parameter.dim() == 2]


def _layers(model: nn.Module) -> dict[str, TrainLayer]:
    return {path: module for path, module in model.named_modules() if isinstance(module, TrainLayer)}


def state(model: nn.Module) -> State:
    """Return the training state that the layers of ``model`` share; the model may be wrapped (DDP, torch.compile).

    ``prepare_`` creates the state. TrainLinear layers that were built by hand get it from this function, with their
    names in ``model``. If the layer that held the state as a child was replaced, another layer takes it.

    Raises:
        ValueError: the model has no TrainLinear layers, or parts of it were prepared separately and have different
            States.
    """
    layers = _layers(model)
    if not layers:
        raise ValueError("train.state: the model has no TrainLinear layers; call lowbit.train.prepare_(model) first")
    with_state = [layer for layer in layers.values() if layer.state is not None]
    needed = [layer for layer in with_state if layer.products.stateful] or with_state[:1]
    states = list({id(layer.state): layer.state for layer in needed if layer.state is not None}.values())
    if len(states) > 1:
        raise ValueError(
            f"train.state: {len(states)} parts of the model were prepared one by one, and each has its own state; call "
            f"train.state(part) for each, or prepare the whole model at once"
        )
    shared = states[0] if states else State()
    _share(shared, model, {name: layer for name, layer in layers.items() if layer.state is None})
    return shared


def _share(state: State, model: nn.Module, layers: dict[str, TrainLayer]) -> None:
    """Give ``state`` to ``layers``.

    If a layer needs it and the model does not hold it yet, it becomes a child of the first TrainLinear that does. A
    hook of the model then counts forwards.
    """
    if layers:
        state.layers.belong_to(model)
    for path, layer in layers.items():
        layer.share(state, path)
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, TrainLinear | TrainMultiheadAttention) and module.state is state:
            state.layers.join(module)
    users = [m for m in modules if isinstance(m, TrainLinear) and m.state is state and m.products.stateful]
    hooked = any(_is_of(state, hook) for module in modules for hook in module._forward_pre_hooks.values())
    if users and (layers or hooked) and all(module is not state for module in modules):
        if not users[0].weight.is_meta:
            state.to(users[0].weight.device)
        users[0].register_module(_CHILD, state)
        if not hooked:
            model.register_forward_pre_hook(state.before_forward)


def _is_of(state: State | None, hook: Any) -> bool:
    """Whether ``hook`` counts forwards for ``state``; None means any State."""
    owner = getattr(hook, "__self__", None)
    return isinstance(owner, State) if state is None else owner is state


def _unshare(model: nn.Module) -> None:
    """Remove every State and its hooks from ``model``."""
    for module in list(model.modules()):
        module._modules.pop(_CHILD, None)
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if _is_of(None, hook)]:
            del hooks[key]


def convert_(model: nn.Module) -> Report:
    """Turn every layer that ``prepare_`` converted back into the class that it had, in place, with its trained
    parameters.

    Returns:
        A report with one row per layer.

    Raises:
        ValueError: the class or the forward of a layer was changed since ``prepare_``. The model is unchanged.
    """
    parts = {name: m for name, m in model.named_modules() if isinstance(m, TrainLayer | TrainMultiheadAttention)}
    subclassed = [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in parts.items()
        if plain_class(layer) not in (TrainLinear, TrainMultiheadAttention, Projection)
    ]
    if subclassed:
        raise ValueError(
            f"train.convert_: expected layers of the class TrainLinear or TrainMultiheadAttention, got "
            f"{', '.join(subclassed)}; undo the change of class first, for a parametrization with "
            f"torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'), then call convert_ again"
        )
    hooked = [name or "the model" for name, layer in parts.items() if replaced_forward(layer) is not None]
    if hooked:
        raise ValueError(
            f"the forward of {', '.join(hooked)} was replaced on the layer itself (accelerate's hooks do so) and "
            f"would still compute in low precision; remove the replacement first, then call convert_ again"
        )
    inside = {id(part) for layer in parts.values() for part in layer.children()}
    layers: dict[str, nn.Module] = {name: layer for name, layer in parts.items() if id(layer) not in inside}
    _unshare(model)
    for layer in parts.values():
        if isinstance(layer, TrainLinear | TrainMultiheadAttention):
            layer.take_off()
    sync_fused_kernels(model)
    return report_on("train.convert_", model, layers, "converted")
