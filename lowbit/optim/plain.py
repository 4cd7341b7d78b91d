"""The step of an optimizer's class, and another in its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["WeakMethod", "plain_step", "replace_step_", "require_own_step", "without_hooks"]


class WeakMethod:
    """A method set on an object itself, bound weakly: a bound one would be a cycle, and keep the object and all weights
    that it holds until the garbage collector runs. It has the attributes of a bound method, which schedulers read.
    """

    def __init__(self, function: Callable[..., Any], owner: object) -> None:
        self.__func__ = function
        self._owner = weakref.ref(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.__self__
        if owner is None:
            raise ReferenceError("expected the optimizer of this method to be alive, but it is gone; keep it")
        return self.__func__(owner, *args, **kwargs)

    @property
    def __self__(self) -> Any:
        return self._owner()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)


def require_own_step(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Raises ValueError, for the function ``who``, where something other than a scheduler has replaced the step."""
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise ValueError(
            f"{who}: something has replaced the optimizer's step, and would not be called any more; call it before that"
        )


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's class, without the hooks of steps."""
    step = type(optimizer).step
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    plain(optimizer)


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, a step is that of the optimizer's class alone, and gradients are put aside: torch steps an optimizer to
    have states that it can load into. It leaves out what requires no gradient, so within all parameters require one:
    the states of a layer that is frozen are as dear as the others. An error leaves the learning rates as they were.
    """
    before = vars(optimizer).get("step")
    params = [(param, param.grad, param.requires_grad) for group in optimizer.param_groups for param in group["params"]]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for param, _, _ in params:
        param.grad = None
        param.requires_grad_(True)
    optimizer.step = lambda closure=None: plain_step(optimizer)  # type: ignore[assignment, method-assign]
    try:
        yield
    except BaseException:
        for group, rate in rates:
            group["lr"] = rate
        raise
    finally:
        del optimizer.step
        if before is not None:
            optimizer.step = before  # type: ignore[method-assign]
        for param, gradient, required in params:
            param.requires_grad_(required)
            param.grad = gradient


def replace_step_(optimizer: torch.optim.Optimizer, run: Callable[[torch.optim.Optimizer], object], who: str) -> None:
    """Have ``optimizer.step`` call ``run(optimizer)``, with hooks of steps and closures as before.

    Raises ValueError, for the function ``who``, where something other than a scheduler has replaced it already.
    """
    require_own_step(optimizer, who)

    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # which schedulers want to know
        run(optimizer)
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = False  # type: ignore[attr-defined]  # schedulers made before ask whether it is there
    optimizer.step = WeakMethod(hooked, optimizer)  # type: ignore[method-assign]
