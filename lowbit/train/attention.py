"""TrainMultiheadAttention: an ``nn.MultiheadAttention`` whose four projections train in low precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lowbit.models.wrap import change_class, plain_class
from lowbit.nn.attention import MultiheadForward, in_projections
from lowbit.nn.base import Announced
from lowbit.recipes import Recipe
from lowbit.recipes import recipe as find_recipe
from lowbit.train.gemms import Products
from lowbit.train.linear import TrainLayer, TrainLinear
from lowbit.train.reuse import Reuse
from lowbit.train.states import State

__all__ = ["Projection", "TrainMultiheadAttention"]

#: The projections of queries, keys and values: the names of the children that multiply.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Projection(TrainLayer):
    """A projection of queries, keys or values, which gets weight and bias from its TrainMultiheadAttention per call.

    It has no parameters of its own, so the ``state_dict`` has the names of ``nn.MultiheadAttention``.
    """

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.multiply(input, weight, bias)

    def extra_repr(self) -> str:
        return f"recipe={self.recipe.name}"


class TrainMultiheadAttention(Announced, MultiheadForward, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with projections in low precision, and the same parameters and ``state_dict``.

    Each projection of queries, keys and values computes as a TrainLinear with its part of ``in_proj_weight`` and
    ``in_proj_bias``, and ``out_proj`` is a TrainLinear. Attention itself runs in the dtype of the projections' result.

    Args:
        args: as for ``nn.MultiheadAttention``.
        recipe: a training recipe, as for TrainLinear.
        kwargs: as for ``nn.MultiheadAttention``.

    Raises:
        ValueError: inputs or masks of other shapes (nothing is broadcast), or ``is_causal`` without a mask.
        TypeError: a mask that is neither bool nor floating-point, or a nested tensor.
    """

    lowbit_kind = "training"

    recipe: Recipe
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection

    def __init__(self, *args: Any, recipe: str | Recipe = "fp8", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = find_recipe(recipe)
        self._follow(found, Products.of(found), True)

    @classmethod
    def put_on(cls, layer: nn.MultiheadAttention, recipe: Recipe, products: Products, reuse_weights: bool) -> None:
        """Make a plain layer one of this class, in place. It keeps the attention of ``lowbit.memory.attention_``."""
        trained: Any = layer
        attend, plain = getattr(layer, "attend", None), plain_class(layer)
        trained._lowbit_class = getattr(plain, "lowbit_computes_as", plain)
        change_class(layer, cls)
        if attend is not None:
            trained.attend = attend
        trained._follow(recipe, products, reuse_weights)

    def take_off(self) -> None:
        """Undo ``put_on``, in place, except for ``out_proj``, whose ``take_off`` is called as for any TrainLinear."""
        attend = vars(self).pop("attend", None)
        del self.recipe
        for name in _PROJECTIONS:
            delattr(self, name)
        change_class(self, vars(self).pop("_lowbit_class", nn.MultiheadAttention))
        if attend is not None:
            attend.put_on(self)

    def _follow(self, recipe: Recipe, products: Products, reuse_weights: bool) -> None:
        self.recipe = recipe
        for name in _PROJECTIONS:
            projection = Projection()
            projection.follow(recipe, products, reuse_weights)
            projection.training = self.training
            setattr(self, name, projection)
        TrainLinear.put_on(self.out_proj, recipe, products, reuse_weights)

    @property
    def state(self) -> State | None:
        """The training state of the projections."""
        return self.q_proj.state

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, biases = in_projections(self)
        return (
            self.q_proj(query, weights[0], biases[0]),
            self.k_proj(key, weights[1], biases[1]),
            self.v_proj(value, weights[2], biases[2]),
        )

    def project_back(self, y_BTE: Tensor) -> Tensor:
        result: Tensor = self.out_proj(y_BTE)
        return result

    def quantized_weights(self) -> Iterator[tuple[Tensor | None, Reuse]]:
        """Yield the parameter that each projection reads, with its ``Reuse``; None if a parametrization computes it."""
        packed = self._parameters.get("in_proj_weight")
        for name in _PROJECTIONS:
            parameter = self._parameters.get(f"{name}_weight") if packed is None else packed
            yield parameter, getattr(self, name).reuse

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copy with the State of its own model."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state.layers.join(self)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, recipe={self.recipe.name}"
