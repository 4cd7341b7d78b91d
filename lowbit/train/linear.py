"""TrainLinear: a Linear whose three products, one forward and two backward, run in low precision.

The weight stays in high precision for the optimizer and is quantized in each forward. What backward needs of the weight
and the input is saved as the recipe says: by default as the codes that forward multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import recipes
from lowbit.convert.adapters import Adapter
from lowbit.convert.engine import Task, convert, sync_fused_kernels
from lowbit.convert.maker import measured, require_float
from lowbit.convert.protect import protections
from lowbit.convert.select import DEFAULT_SKIP, Skip, plain_layers
from lowbit.models.wrap import change_class, plain_class, replaced_forward
from lowbit.nn.base import Announced, announce
from lowbit.nn.linear import result_dtype
from lowbit.recipes import Recipe
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
    """``nn.Linear`` trained in low precision: same parameters, same ``state_dict``, same results in shape and dtype.

    Input ``[..., in_features]`` fp32, bf16 or fp16; weight fp32, bf16 or fp16. Gradients have the dtype of what they
    belong to; the bias's is summed in fp32. Recomputation (checkpointing) gives the same bits. Backward runs on the
    backend of its forward; inside torch.compile each call chooses anew. Recipes with stochastic rounding or delayed
    scaling read ``state``, the training state that the layers of a model share (``lowbit.train.state``).
    Raises ValueError for a recipe that is for inference only or asks for casts that training does not do; RuntimeError
    for a gradient of a gradient, and for such a recipe without a state.
    Source: docs/numerics.md sections 9 and 14; recipes.Gemm.
    """

    lowbit_kind = "training"

    recipe: Recipe
    products: Products
    state: State | None
    path: str
    slots: dict[str, OperandSlot]
    reuse: Reuse
    #: Within the steps that ``lowbit.train.watch`` looks at: makes the view of a call one that shows its casts.
    watcher: Callable[[View | None], View | None] | None = None
    #: The operands of a weight that comes in codes (``lowbit.distributed.all_gather_``), if it has.
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
        dtype, view, weight = result_dtype(input), None, self.weight  # which a parametrization computes at each look
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
                f"recipe {self.recipe.name!r} rounds stochastically or remembers scales, and the layer has no training "
                f"state; call lowbit.train.state(model) once"
            )
        return self.state.view(self.slots, device)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not watched."""
        return {name: value for name, value in vars(self).items() if name != "watcher"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy joins its own model's State."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state.layers.join(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def prepare_(
    model: nn.Module,
    recipe: str | Recipe | recipes.LayerRecipes | Mapping[Any, str | Recipe | None] = "fp8",
    *,
    skip: Skip = DEFAULT_SKIP,
    reuse_weights: bool = True,
) -> Report:
    """Make the nn.Linear layers of ``model`` train in low precision, in place.

    ``recipe``: one that trains, or such recipes by layer, as for ``quantize_``. Parameters, names, hooks, checkpointing
    and optimizers that hold them stay as they are. Subclasses that compute what nn.Linear does are taken as well.
    ``skip`` and what is left as for ``quantize_``; an output layer keeps sharing its weight with an embedding. 4-bit
    recipes also leave the first and the last blocks (``Recipe.keep_blocks``), unless the option ``keep_blocks=0`` or a
    recipe for a layer's name says otherwise.
    ``reuse_weights``: where gradients accumulate, the codes of a weight serve all micro-batches of a step, which takes
    a byte a number or so until the optimizer steps. False makes them at each forward, as code needs that writes to
    ``weight.data`` between micro-batches on a GPU.
    Raises ValueError, with the model untouched: a recipe for inference only, nothing to convert, layers that are
    prepared or quantized already or whose weight has no shape yet, a pattern without a match. TypeError for a weight
    in another dtype than fp32, bf16 and fp16.
    """
    chosen = recipes.layer_recipes(recipe)
    products = {one: Products.of(one) for one in chosen.recipes}
    names, protect = protections(model, skip, chosen, unties=False)
    protect = keep_blocks(model, chosen, protect)

    def make(layer: nn.Linear, adapter: Adapter, recipe: Recipe) -> tuple[nn.Linear, Recipe]:
        require_float(layer.weight)
        return layer, recipe

    def measure(layer: nn.Linear, made: Any, recipe: Recipe | None) -> dict[str, Any]:
        return measured(layer, layer, layer.weight.numel(), 8.0 * layer.weight.dtype.itemsize)

    def put(model: nn.Module, made: dict[int, Any]) -> None:
        announce()  # a layer that changes its class is not made anew
        paths = {id(module): path for path, module in model.named_modules()}
        for layer, recipe in made.values():
            layer._lowbit_class = plain_class(layer)
            change_class(layer, TrainLinear)
            layer.recipe, layer.products, layer.reuse = recipe, products[recipe], Reuse(reuse_weights)
        _share(State(), model, {paths[id(layer)]: layer for layer, _ in made.values()})
        sync_fused_kernels(model)

    judge = plain_layers(only=(nn.Linear,), replaced=False)
    task = Task("train.prepare_", "nn.Linear", judge, make, measure, put, replaces=False)
    return convert(model, task, chosen, names, protect)[0]


def state(model: nn.Module) -> State:
    """The State that the layers of ``model`` share, whatever wraps it (DDP, torch.compile).

    ``prepare_`` makes it. TrainLinear layers that were built by hand get it here, with their names in ``model``. Where
    the layer that it was a child of has been replaced, another layer takes it.
    Raises ValueError for a model without TrainLinear layers, or with parts that were prepared one by one and need a
    State each.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TrainLinear)}
    if not layers:
        raise ValueError("train.state: the model has no TrainLinear layers; call lowbit.train.prepare_(model) first")
    given = [layer for layer in layers.values() if layer.state is not None]
    needed = [layer for layer in given if layer.products.stateful] or given[:1]
    found = list({id(layer.state): layer.state for layer in needed if layer.state is not None}.values())
    if len(found) > 1:
        raise ValueError(
            f"train.state: {len(found)} parts of the model were prepared one by one, and each has a state; ask for "
            f"train.state(part), or prepare the whole model"
        )
    shared = found[0] if found else State()
    _share(shared, model, {name: layer for name, layer in layers.items() if layer.state is None})
    return shared


def _share(state: State, model: nn.Module, layers: dict[str, TrainLinear]) -> None:
    """Give the layers of ``model`` that State. Where it is no part of the model yet, and one of them needs it, it
    becomes a child of the first, and counts the model's forwards."""
    if layers:
        state.layers.belong_to(model)
    for path, layer in layers.items():
        vars(layer)["state"] = state  # no child of this layer, whose state_dict would have it once more
        state.layers.join(layer)
        layer.path = path
        layer.slots = state.slots(path, layer.products.casts(layer.recipe)) if layer.products.stateful else {}
    modules = list(model.modules())
    users = [one for one in modules if isinstance(one, TrainLinear) and one.state is state and one.products.stateful]
    hooked = any(_is_of(state, hook) for module in modules for hook in module._forward_pre_hooks.values())
    if users and (layers or hooked) and all(module is not state for module in modules):
        if not users[0].weight.is_meta:
            state.to(users[0].weight.device)
        users[0].register_module(_CHILD, state)
        if not hooked:
            model.register_forward_pre_hook(state.before_forward)


def _is_of(state: State | None, hook: Any) -> bool:
    """Whether ``hook`` counts the forwards of a model for ``state``, or for any."""
    owner = getattr(hook, "__self__", None)
    return isinstance(owner, State) if state is None else owner is state


def _unshare(model: nn.Module) -> None:
    """Take every State out of ``model``, with its hooks."""
    for module in list(model.modules()):
        module._modules.pop(_CHILD, None)
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if _is_of(None, hook)]:
            del hooks[key]


def convert_(model: nn.Module) -> Report:
    """Make every TrainLinear of ``model`` the nn.Linear it was, with what it has learned, and report them.

    Raises ValueError, with the model untouched, where a layer has got a forward or a class of its own since.
    """
    prepared: dict[str, Any] = {n: module for n, module in model.named_modules() if isinstance(module, TrainLinear)}
    others = [
        f"{name or 'the model'} ({type(one).__name__})"
        for name, one in prepared.items()
        if plain_class(one) is not TrainLinear
    ]
    if others:
        raise ValueError(
            f"train.convert_: expected layers of the class TrainLinear, got {', '.join(others)}, whose class was made "
            f"of it since; undo that first, such as a parametrization with "
            f"torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'), then call convert_ again"
        )
    hooked = [name or "the model" for name, layer in prepared.items() if replaced_forward(layer) is not None]
    if hooked:
        raise ValueError(
            f"the forward of {', '.join(hooked)} was replaced on the layer itself (accelerate's hooks do so), and "
            f"would go on in low precision; remove that first, then call convert_ again"
        )
    for layer in prepared.values():
        del layer.recipe, layer.products, layer.reuse, layer.state, layer.path, layer.slots
        for name in ("watcher", "gathered"):
            vars(layer).pop(name, None)
        change_class(layer, vars(layer).pop("_lowbit_class", nn.Linear))
    _unshare(model)
    sync_fused_kernels(model)
    return report_on("train.convert_", model, prepared, "converted")
