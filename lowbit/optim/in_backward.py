"""Optimizer steps during the backward pass, so that only a few gradients exist at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lowbit.combinations import refusal
from lowbit.dist_utils import processes
from lowbit.optim.base import Optimizer
from lowbit.optim.offload import OFFLOADED
from lowbit.torch_private import gradient_hooks

__all__ = ["in_backward_"]

#: Key of the optimizer in the model's ``__dict__``.
_OF_MODEL = "_lowbit_in_backward"


def in_backward_(model: nn.Module, optimizer: Optimizer | Callable[..., Optimizer], **options: Any) -> Optimizer:
    """Step each parameter of ``model`` as soon as its gradient is complete, and free the gradient.

    Schedulers, ``state_dict`` and ``zero_grad`` work as before. ``step()`` has nothing left to step, but call it for a
    model of ``prepare_``, because its training state advances there. One backward pass is one step. If ``step()`` is
    called, a second backward pass before the next call raises RuntimeError. docs/optimizers.md lists features that
    need all gradients at once, and so cannot be combined with this one. Parameters that are frozen when this is called
    do not step.

    Args:
        model: The model, not wrapped in DistributedDataParallel.
        optimizer: An optimizer of ``lowbit.optim`` with all trainable parameters of the model, or its class.
        options: Settings for an optimizer class, which is called with the model's named parameters.

    Returns:
        The optimizer.

    Raises:
        TypeError: The optimizer is not one of ``lowbit.optim``, or ``options`` are given with an instance.
        ValueError: The model uses DistributedDataParallel, or several processes run and parameters are not sharded.
        ValueError: The optimizer has other parameters than the model, or is offloaded.
        ValueError: Parameters step in the backward pass already.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(refusal("in_backward ddp", "in_backward_"))
    if isinstance(optimizer, Optimizer) and options:
        raise TypeError(f"in_backward_: {', '.join(options)} are for a class; this optimizer has its settings already")
    stepper = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.named_parameters(), **options)
    if hasattr(stepper, OFFLOADED):
        raise ValueError(refusal("in_backward offload", "in_backward_"))
    if not isinstance(stepper, Optimizer):
        raise TypeError(f"in_backward_: expected an optimizer of lowbit.optim, got {type(stepper).__name__}")
    _require_all(model, stepper)
    for number, group in enumerate(stepper.param_groups):
        for index, param in enumerate(group["params"]):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(_step, weakref.ref(stepper), number, index))
    vars(model)[_OF_MODEL] = _Owner(stepper)
    stepper.in_backward = True
    return stepper


def _require_all(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError if steps in the backward pass would differ from steps after it."""
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    missing = [name for name, param in trained.items() if id(param) not in stepped]
    if missing or stepped - {id(param) for param in model.parameters()}:
        raise ValueError(
            "in_backward_: the optimizer must have the model's trainable parameters and no others; "
            + (f"it lacks {', '.join(missing[:3])}" if missing else "it has others")
        )
    for name, param in trained.items():
        hooks = gradient_hooks(param).values()
        if any(getattr(hook, "func", None) is _step for hook in hooks):
            raise ValueError(f"in_backward_: {name} steps in the backward pass already")
        if processes() > 1 and not hasattr(param, "placements"):
            raise ValueError(f"{refusal('in_backward processes', 'in_backward_')} ({name} is not sharded)")


class _Owner:
    """Keeps a model's optimizer alive as long as the model. A copy of the model has no optimizer and no hooks.

    The hooks refer to the optimizer weakly, because the garbage collector does not see cycles through them.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> Any:
        return _Owner, ()


def _step(reference: weakref.ref[Optimizer], number: int, index: int, param: Tensor) -> None:
    optimizer = reference()
    if optimizer is None:
        raise RuntimeError(
            "in_backward_: the model and the optimizer that in_backward_ returned no longer exist; keep one of them "
            "while its parameters are trained"
        )
    if optimizer.stepped is not None:
        if param in optimizer.stepped:
            raise RuntimeError(refusal("in_backward accumulation", "in_backward_"))
        optimizer.stepped.add(param)
    optimizer.advance([(optimizer.param_groups[number], index)])
    param.grad = None
