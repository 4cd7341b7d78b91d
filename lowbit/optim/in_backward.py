"""Steps during the backward pass, so that gradients of only a few parameters exist at a time."""

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

#: Where the model holds its optimizer: in its ``__dict__``.
_OF_MODEL = "_lowbit_in_backward"


def in_backward_(model: nn.Module, optimizer: Optimizer | Callable[..., Optimizer], **options: Any) -> Optimizer:
    """Makes each parameter of ``model`` step as soon as its gradient is complete, which is freed then.

    ``optimizer``: an optimizer of ``lowbit.optim``, or its class, which is made of the model's parameters with
    ``options``. It is returned: schedulers, ``state_dict`` and ``zero_grad`` work as before, and ``step()`` finds
    nothing left to do. Call it all the same for a model of ``prepare_``, whose training state moves on as it ends. One
    backward pass is one step: where ``step()`` is called, a second one before the next call is a RuntimeError. What
    needs all gradients at once cannot be combined with it, see docs/optimizers.md.

    Parameters that are frozen now stay out of it. Raises TypeError for another optimizer; ValueError for a model in
    DistributedDataParallel, whose gradients are reduced only after they are complete, or to be put into it, where
    several processes run; for an optimizer of other parameters than the model's; and for parameters that step in the
    backward pass already.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(refusal("in_backward ddp", "in_backward_"))
    if isinstance(optimizer, Optimizer) and options:
        raise TypeError(f"in_backward_: {', '.join(options)} are for a class; this optimizer has its settings already")
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.named_parameters(), **options)
    if hasattr(made, OFFLOADED):
        raise ValueError(refusal("in_backward offload", "in_backward_"))
    if not isinstance(made, Optimizer):
        raise TypeError(f"in_backward_: expected an optimizer of lowbit.optim, got {type(made).__name__}")
    _require_all(model, made)
    for index, group in enumerate(made.param_groups):
        for place, param in enumerate(group["params"]):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(_step, weakref.ref(made), index, place))
    vars(model)[_OF_MODEL] = _Held(made)
    made.in_backward = True
    return made


def _require_all(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises ValueError where a step in the backward pass would not be what it is after it."""
    mine = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    theirs = {name: param for name, param in model.named_parameters() if param.requires_grad}
    missing = [name for name, param in theirs.items() if id(param) not in mine]
    if missing or len(mine.keys() - {id(param) for param in model.parameters()}):
        raise ValueError(
            "in_backward_: the optimizer must have the model's trainable parameters and no others; "
            + (f"it lacks {', '.join(missing[:3])}" if missing else "it has others")
        )
    for name, param in theirs.items():
        hooks = gradient_hooks(param).values()
        if any(getattr(hook, "func", None) is _step for hook in hooks):
            raise ValueError(f"in_backward_: {name} steps in the backward pass already")
        if processes() > 1 and not hasattr(param, "placements"):
            raise ValueError(f"{refusal('in_backward processes', 'in_backward_')} ({name} is whole)")


class _Held:
    """The optimizer of a model, so that it lives as long as the model does. A copy of the model has none: it has no
    hooks either. Hooks hold it weakly: the collector does not see the cycle that a parameter's hook closes.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> Any:
        return _Held, ()


def _step(held: weakref.ref[Optimizer], index: int, place: int, param: Tensor) -> None:
    optimizer = held()
    if optimizer is None:
        raise RuntimeError(
            "in_backward_: expected the optimizer that in_backward_ returned, but it and the model are gone; keep one "
            "of them while its parameters are trained"
        )
    if optimizer.stepped is not None:
        if param in optimizer.stepped:
            raise RuntimeError(refusal("in_backward accumulation", "in_backward_"))
        optimizer.stepped.add(param)
    optimizer.advance([(optimizer.param_groups[index], place)])
    param.grad = None
