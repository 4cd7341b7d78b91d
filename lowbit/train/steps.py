"""Which States an optimizer step advances: one global hook for all optimizers of the process."""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit.autograd import in_backward, uncompiled
from lowbit.optim.shards import is_dtensor
from lowbit.torch_private import after_backward

__all__ = ["Layers", "follow_steps"]


class Follower(Protocol):
    """An object that advances with optimizer steps: a State."""

    layers: Layers

    def stepped(self, optimizer: ref[torch.optim.Optimizer]) -> None: ...


class Layers:
    """Weak references to the layers that share a State and to the prepared model.

    A copy of the State starts without them: the layers of the copied model join as they are copied, and the model at
    its first forward.
    """

    def __init__(self) -> None:
        self._layers: list[ref[nn.Module]] = []
        self._model: ref[nn.Module] | None = None

    def join(self, layer: nn.Module) -> None:
        """Register ``layer`` as sharing the State."""
        self._layers = [other for other in self._layers if other() not in (None, layer)] + [ref(layer)]

    def belong_to(self, model: nn.Module) -> None:
        """Set the prepared model, or a copy of it."""
        if self._model is None or self._model() is not model:
            self._model = ref(model)

    def step_done(self, params: Container[int] | None = None) -> None:
        """Drop cached codes of weights after an optimizer step.

        ``params``: the ids of the updated parameters; None: any may have changed.
        """
        for layer in self._alive():
            for weight, reuse in layer.quantized_weights():
                if params is None or id(weight) in params:
                    reuse.step_done(sharded=any(map(is_dtensor, layer.parameters())))

    def leader(self) -> Tensor | None:
        """The parameter whose optimizer the State follows.

        It is the first layer's trainable weight. If all weights are frozen, as with LoRA, or computed, it is the
        model's first trainable parameter. It is looked up at each step, because FSDP2 replaces the parameters of
        modules.
        """
        return next((param for param in self._candidates() if param.requires_grad and param.is_leaf), None)

    def _candidates(self) -> Iterator[Tensor]:
        for layer in self._alive():
            yield from (weight for weight, _ in layer.quantized_weights() if weight is not None)
        model = None if self._model is None else self._model()
        yield from () if model is None else model.parameters()

    def _alive(self) -> Iterator[Any]:
        """The layers that still exist and train in low precision: a layer that was converted back has no weights."""
        layers = (reference() for reference in self._layers)
        return (layer for layer in layers if hasattr(type(layer), "quantized_weights"))

    def __deepcopy__(self, memo: Any) -> Layers:
        return Layers()

    def __reduce__(self) -> tuple[type[Layers], tuple[()]]:
        return Layers, ()


_followers: WeakSet[Any] = WeakSet()
_hooked = False


def follow_steps(follower: Follower) -> None:
    """Call ``follower.stepped(ref(optimizer))`` after each step of an optimizer that holds its leader."""
    global _hooked
    _followers.add(follower)
    if not _hooked:
        register_optimizer_step_post_hook(_after_step)
        _hooked = True


@uncompiled  # the choice of States depends on Python objects
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Advance the States that follow ``optimizer``, and drop codes of the weights that it updated in all others.

    A step inside a backward pass counts when backward ends, because the rest of backward belongs to the same step.
    """
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for follower in list(_followers):
        leader = follower.layers.leader()
        if leader is None or id(leader) not in params:
            follower.layers.step_done(params)
            continue
        stepped = partial(follower.stepped, ref(optimizer))
        if in_backward():
            after_backward(stepped)
        else:
            stepped()
