"""Which States a step of an optimizer moves on: one hook, for all optimizers of the process."""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit.autograd import in_backward, uncompiled
from lowbit.torch_private import after_backward

__all__ = ["Layers", "follow_steps"]


class Follower(Protocol):
    """What moves on with the steps of an optimizer: a State."""

    layers: Layers

    def stepped(self, optimizer: ref[torch.optim.Optimizer]) -> None: ...


class Layers:
    """The layers of a State and the model that was prepared, none of which it keeps alive.

    A copy of the State begins without them: the layers of the copied model join it as they are copied, and the model
    at its first forward.
    """

    def __init__(self) -> None:
        self._layers: list[ref[nn.Module]] = []
        self._model: ref[nn.Module] | None = None

    def join(self, layer: nn.Module) -> None:
        """``layer`` shares the State."""
        self._layers = [one for one in self._layers if one() not in (None, layer)] + [ref(layer)]

    def belong_to(self, model: nn.Module) -> None:
        """``model`` is what was prepared, or a copy of it."""
        if self._model is None or self._model() is not model:
            self._model = ref(model)

    def step_done(self, held: Container[int] | None = None) -> None:
        """The optimizer has stepped: what layers keep of their weights is old.

        ``held``: the ``id`` of each parameter that has moved; None: any of them may have.
        """
        for layer in (one() for one in self._layers):
            reuse = getattr(layer, "reuse", None)  # none of a layer that has been converted back
            if layer is not None and reuse is not None and (held is None or id(_weight(layer)) in held):
                reuse.step_done(layer.weight)

    def leader(self) -> Tensor | None:
        """The parameter whose optimizer the State follows: the first layer's weight that trains now; where all are
        frozen, as under LoRA, or computed of others, the first parameter of the model that does.

        It is looked up at each step, because FSDP2 exchanges the parameters of modules.
        """
        return next((param for param in self._candidates() if param.requires_grad and param.is_leaf), None)

    def _candidates(self) -> Iterator[Tensor]:
        for layer in (one() for one in self._layers):
            weight = None if layer is None else _weight(layer)
            if weight is not None:
                yield weight
        model = None if self._model is None else self._model()
        yield from () if model is None else model.parameters()

    def __deepcopy__(self, memo: Any) -> Layers:
        return Layers()

    def __reduce__(self) -> tuple[type[Layers], tuple[()]]:
        return Layers, ()


def _weight(layer: nn.Module) -> nn.Parameter | None:
    """The weight as a parameter; None where it is computed, as by a parametrization, which no optimizer holds."""
    return layer._parameters.get("weight")


_followers: WeakSet[Any] = WeakSet()
_hooked = False


def follow_steps(follower: Follower) -> None:
    """Call ``follower.stepped(ref(optimizer))`` after each step of an optimizer that holds its leader."""
    global _hooked
    _followers.add(follower)
    if not _hooked:
        register_optimizer_step_post_hook(_after_step)
        _hooked = True


@uncompiled  # Python decides which States move
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step in the backward pass counts when that is over, since the rest of it is of the same step.

    Codes of the weights that it has moved are dropped: by the State that moves on, or here, where it follows another.
    """
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for follower in list(_followers):
        leader = follower.layers.leader()
        if leader is None or id(leader) not in held:
            follower.layers.step_done(held)
            continue
        stepped = partial(follower.stepped, ref(optimizer))
        if in_backward():
            after_backward(stepped)
        else:
            stepped()
