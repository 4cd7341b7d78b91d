"""TrainLinear: a Linear whose forward matmul and two backward matmuls run in low precision.

The weight stays in high precision for the optimizer and is quantized in each forward. The recipe says in which form
weight and input are saved for backward; the default is the codes that forward multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.wrap import change_class, plain_class
from lowbit.nn.base import Announced
from lowbit.nn.linear import result_dtype
from lowbit.recipes import Recipe
from lowbit.recipes import recipe as find_recipe
from lowbit.train.gemms import Products, WeightOperands, low_precision_linear
from lowbit.train.reuse import Reuse
from lowbit.train.states import State
from lowbit.train.view import OperandSlot, View

__all__ = ["TrainLayer", "TrainLinear"]


class TrainLayer(Announced, nn.Module):
    """Base of modules that multiply by one weight in low precision.

    ``train.state``, ``train.watch`` and ``train.find_nonfinite`` find these modules in a model. A recipe with
    stochastic rounding or delayed scaling identifies their operands by ``path``.
    """

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

    def follow(self, recipe: Recipe, products: Products, reuse_weights: bool = True) -> None:
        """Set the recipe, without a training state."""
        self.recipe, self.products, self.reuse = recipe, products, Reuse(reuse_weights)
        self.path, self.slots = "", {}
        vars(self)["state"] = None  # not as a child: the state_dict would contain it once per layer

    def share(self, state: State, path: str) -> None:
        """Set the training state that the layers of a model share, and the path in the model."""
        vars(self)["state"] = state
        self.path = path
        self.slots = state.slots(path, self.products.casts(self.recipe)) if self.products.stateful else {}

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``input [..., in] @ weight [out, in].T + bias [out]``."""
        dtype, view = result_dtype(input), None
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
        return low_precision_linear(x, weight, bias, self.products, view, dtype, operands)

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


class TrainLinear(TrainLayer, nn.Linear):
    """``nn.Linear`` trained in low precision, with the same parameters, ``state_dict``, result shape and result dtype.

    Gradients have the dtype of their tensors; the bias gradient is accumulated in fp32. Recomputation (checkpointing)
    is bit-identical. Backward runs on the backend of its forward; under torch.compile each call chooses its own
    backend. Source: docs/numerics.md sections 9 and 14; recipes.Gemm.

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
        found = find_recipe(recipe)
        self.follow(found, Products.of(found))

    @classmethod
    def put_on(cls, layer: nn.Linear, recipe: Recipe, products: Products, reuse_weights: bool) -> None:
        """Make a plain layer one of this class, in place."""
        trained: Any = layer
        trained._lowbit_class = plain_class(layer)
        change_class(layer, cls)
        trained.follow(recipe, products, reuse_weights)

    def take_off(self) -> None:
        """Undo ``put_on``, in place."""
        del self.recipe, self.products, self.reuse, self.state, self.path, self.slots
        for name in ("watcher", "gathered"):
            vars(self).pop(name, None)
        change_class(self, vars(self).pop("_lowbit_class", nn.Linear))

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight, self.bias)  # reads the weight once: a parametrization computes it

    def quantized_weights(self) -> Iterator[tuple[Tensor | None, Reuse]]:
        """Yield the parameter with the weight, or None if a parametrization computes it, with its ``Reuse``."""
        yield self._parameters.get("weight"), self.reuse

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copy with the State of its own model."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state.layers.join(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
