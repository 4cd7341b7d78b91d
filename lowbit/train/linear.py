"""TrainLinear: a Linear whose forward matmul and two backward matmuls run in low precision.

The weight stays in high precision for the optimizer and is quantized in each forward. The recipe says in which form
weight and input are saved for backward; the default is the codes that forward multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import Adapter
from lowbit.convert.engine import Task, convert, sync_fused_kernels
from lowbit.convert.maker import measured, require_float
from lowbit.convert.protect import protections
from lowbit.convert.select import DEFAULT_SKIP, Skip, plain_layers
from lowbit.models.wrap import change_class, plain_class, replaced_forward
from lowbit.nn.base import Announced, announce
from lowbit.nn.linear import result_dtype
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes
from lowbit.recipes import recipe as find_recipe
from lowbit.report import Report, report_on
from lowbit.train.gemms import Products, WeightOperands, low_precision_linear
from lowbit.train.kept_blocks import keep_blocks
from lowbit.train.reuse import Reuse
from lowbit.train.states import State
from lowbit.train.view import OperandSlot, View

__all__ = ["TrainLinear", "convert_", "prepare_", "state"]

#: The name of the State in the layer that it is a child of.
_CHILD = "lowbit_state"


class TrainLinear(Announced, nn.Linear):
    """``nn.Linear`` trained in low precision, with the same parameters, ``state_dict``, result shape and result dtype.

    Gradients have the dtype of their tensors; the bias gradient is accumulated in fp32. Recomputation (checkpointing)
    is bit-identical. Backward runs on the backend of its forward; under torch.compile each call chooses its backend
    anew. Source: docs/numerics.md sections 9 and 14; recipes.Gemm.

    Args:
        in_features: size of the last axis of the input ``[..., in_features]``, which is fp32, bf16 or fp16.
        out_features: rows of ``weight [out_features, in_features]``, fp32, bf16 or fp16.
        bias: whether there is a bias ``[out_features]``.
        device: as for ``nn.Linear``.
        dtype: as for ``nn.Linear``.
        recipe: a training recipe. Recipes with stochastic rounding or delayed scaling read ``state``, the training
            state that all layers of a model share (``lowbit.train.state``).

    Raises:
        ValueError: the recipe is for inference only, or has casts that training does not support.
        RuntimeError: a second-order gradient, or a recipe that needs a training state in a layer without one.
    """

    lowbit_kind = "training"

    recipe: Recipe
    products: Products
    state: State | None
    path: str
    slots: dict[str, OperandSlot]
    reuse: Reuse
    #: Set during the steps that ``lowbit.train.watch`` records: makes the view of a call report its casts.
    watcher: Callable[[View | None], View | None] | None = None
    #: Returns the operands of a weight that was gathered as codes (``lowbit.distributed.all_gather_``), or None.
    gathered: Callable[[Tensor, Products], WeightOperands | None] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str | Recipe = "fp8",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = find_recipe(recipe)
        self.products, self.path, self.slots, self.reuse = Products.of(self.recipe), "", {}, Reuse()
        vars(self)["state"] = None

    def forward(self, input: Tensor) -> Tensor:
        dtype, view, weight = result_dtype(input), None, self.weight  # read once: a parametrization computes it
        if self.products.stateful:
            view = self._view(input.device)
        x, operands = input.to(dtype) if self.products.input is None else input, None
        if not torch.compiler.is_compiling():
            if self.watcher is not None:
                view = self.watcher(view)
            elif self.gathered is not None:
                operands = self.gathered(weight, self.products)
            elif self.products.one_weight:
                operands = self.reuse.operands(weight, partial(self._operands, weight, view))
        return low_precision_linear(x, weight, self.bias, self.products, view, dtype, operands)

    def _operands(self, weight: Tensor, view: View | None) -> WeightOperands:
        with torch.no_grad():
            return WeightOperands.of(weight.detach(), self.products, view, True)

    def _view(self, device: torch.device) -> View:
        if self.state is None:
            raise RuntimeError(
                f"recipe {self.recipe.name!r} needs a training state for stochastic rounding or delayed scaling, and "
                f"the layer has no training state; call lowbit.train.state(model) once"
            )
        return self.state.view(self.slots, device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the watcher: a copy is not watched."""
        return {name: value for name, value in vars(self).items() if name != "watcher"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copy with the State of its own model."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state.layers.join(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def prepare_(
    model: nn.Module,
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None] = "fp8",
    *,
    skip: Skip = DEFAULT_SKIP,
    reuse_weights: bool = True,
) -> Report:
    """Make the nn.Linear layers of ``model`` train in low precision, in place.

    Parameters, names, hooks, checkpointing and existing optimizers stay valid. Subclasses of nn.Linear that compute the
    same are converted too. An output layer keeps sharing its weight with an embedding. 4-bit recipes skip the first and
    the last blocks (``Recipe.keep_blocks``). ``keep_blocks=0`` converts these blocks too, and
    per-layer recipes convert the layers that they name.

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

    def make(layer: nn.Linear, adapter: Adapter, recipe: Recipe) -> tuple[nn.Linear, Recipe]:
        require_float(layer.weight)
        return layer, recipe

    def measure(layer: nn.Linear, _converted: Any, _recipe: Recipe | None) -> dict[str, Any]:
        return measured(layer, layer, layer.weight.numel(), 8.0 * layer.weight.dtype.itemsize)

    def put(model: nn.Module, converted: dict[int, Any]) -> None:
        announce()  # no constructor runs for a layer that changes its class
        paths = {id(module): path for path, module in model.named_modules()}
        for layer, recipe in converted.values():
            layer._lowbit_class = plain_class(layer)
            change_class(layer, TrainLinear)
            layer.recipe, layer.products, layer.reuse = recipe, products[recipe], Reuse(reuse_weights)
        _share(State(), model, {paths[id(layer)]: layer for layer, _ in converted.values()})
        sync_fused_kernels(model)

    judge = plain_layers(only=(nn.Linear,), replaced=False)
    task = Task("train.prepare_", "nn.Linear", judge, make, measure, put, replaces=False)
    return convert(model, task, recipes, names, protect)[0]


def state(model: nn.Module) -> State:
    """Return the training state that the layers of ``model`` share; the model may be wrapped (DDP, torch.compile).

    ``prepare_`` creates the state. TrainLinear layers that were built by hand get it from this function, with their
    names in ``model``. If the layer that held the state as a child was replaced, another layer takes it.

    Raises:
        ValueError: the model has no TrainLinear layers, or parts of it were prepared separately and have different
            States.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TrainLinear)}
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


def _share(state: State, model: nn.Module, layers: dict[str, TrainLinear]) -> None:
    """Give ``state`` to ``layers``.

    If a layer needs it and the model does not hold it yet, it becomes a child of the first such layer. A hook of the
    model then counts forwards.
    """
    if layers:
        state.layers.belong_to(model)
    for path, layer in layers.items():
        vars(layer)["state"] = state  # not as a child: the state_dict would contain it once per layer
        state.layers.join(layer)
        layer.path = path
        layer.slots = state.slots(path, layer.products.casts(layer.recipe)) if layer.products.stateful else {}
    modules = list(model.modules())
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
    """Turn every TrainLinear of ``model`` back into the nn.Linear it was, in place, with its trained parameters.

    Returns:
        A report with one row per layer.

    Raises:
        ValueError: the class or the forward of a layer was changed since ``prepare_``. The model is unchanged.
    """
    prepared: dict[str, Any] = {n: module for n, module in model.named_modules() if isinstance(module, TrainLinear)}
    subclassed = [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in prepared.items()
        if plain_class(layer) is not TrainLinear
    ]
    if subclassed:
        raise ValueError(
            f"train.convert_: expected layers of the class TrainLinear, got {', '.join(subclassed)}; undo the change "
            f"of class first, for a parametrization with "
            f"torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'), then call convert_ again"
        )
    hooked = [name or "the model" for name, layer in prepared.items() if replaced_forward(layer) is not None]
    if hooked:
        raise ValueError(
            f"the forward of {', '.join(hooked)} was replaced on the layer itself (accelerate's hooks do so) and "
            f"would still compute in low precision; remove the replacement first, then call convert_ again"
        )
    for layer in prepared.values():
        del layer.recipe, layer.products, layer.reuse, layer.state, layer.path, layer.slots
        for name in ("watcher", "gathered"):
            vars(layer).pop(name, None)
        change_class(layer, vars(layer).pop("_lowbit_class", nn.Linear))
    _unshare(model)
    sync_fused_kernels(model)
    return report_on("train.convert_", model, prepared, "converted")
