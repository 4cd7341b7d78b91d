"""Calling and replacing the ``step`` method of any optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["WeakMethod", "plain_step", "replace_step_", "require_own_step", "without_hooks"]


class WeakMethod:
    """A method that is set on an instance and refers to it weakly.

    A bound method would be a reference cycle, and keep the weights alive until the garbage collector runs. Schedulers
    read the attributes of bound methods, so this class has them.
    """

    def __init__(self, function: Callable[..., Any], owner: object) -> None:
        self.__func__ = function
        self._owner = weakref.ref(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.__self__
        if owner is None:
            raise ReferenceError("the optimizer of this method no longer exists; keep a reference to it")
        return self.__func__(owner, *args, **kwargs)

    @property
    def __self__(self) -> Any:
        return self._owner()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)


def require_own_step(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Raise ValueError, with the caller's name ``who``, if something other than a scheduler has replaced the step."""
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise ValueError(
            f"{who}: something has replaced the optimizer's step, and would no longer be called; call {who} before that"
        )


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the ``step`` of the optimizer's class, without step hooks."""
    step = type(optimizer).step
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    plain(optimizer)


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which ``step`` has no hooks, no parameter has a gradient, and all parameters require one.

    torch's loading steps the optimizer once, to create states to load into. It skips parameters that require no
    gradient, but the states of frozen layers must be loaded too. An error restores the learning rates.
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
    """Make ``optimizer.step`` call ``run(optimizer)``; step hooks and closures work as before.

    Raises:
        ValueError: Something other than a scheduler has replaced ``step`` already. The message begins with ``who``.
    """
    require_own_step(optimizer, who)

    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers read it
        run(optimizer)
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = False  # type: ignore[attr-defined]  # schedulers created before read it
    optimizer.step = WeakMethod(hooked, optimizer)  # type: ignore[method-assign]
