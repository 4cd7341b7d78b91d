"""What lowbit's layers say of themselves: the one place where a module's kind is looked up.

A layer class says what it is by the class attribute ``lowbit_kind``, one of ``KINDS``, or by a property where it is
what the layers inside are. Modules above this one ask ``kind(module)`` and need not import the class. A function around
a layer's forward (``wrap_forward``) is a ``WrappedForward``, which says whether the forward of the layer's class runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch import nn

__all__ = [
    "KINDS",
    "ON_FIRST_LAYER",
    "Announced",
    "WrappedForward",
    "announce",
    "forget_bound_forward",
    "full_name",
    "kind",
    "replaced_forward",
    "unwrap_forwards",
    "wrap_forward",
    "wrapped_forward",
]

#: Every kind of layer, and what a conversion that needs a plain layer tells the user to do with one.
KINDS = {
    "quantized": "is quantized already; call lowbit.dequantize_(model) first, or name the layers to leave in skip=...",
    "packed": (
        "is quantized and packed already; call lowbit.unprepack_(model) and lowbit.dequantize_(model) first, or name "
        "the layers to leave in skip=..."
    ),
    "observed": "is being calibrated; call lowbit.calibrate on a model of plain layers",
    "qat": "is being trained to be quantized; call lowbit.qat.convert_(model) to deploy it",
    "training": "is being trained in low precision; call lowbit.train.convert_(model) first",
}


#: Called once, as soon as the process has a layer of lowbit: made, copied or unpickled. Integrations add to it.
ON_FIRST_LAYER: list[Callable[[], None]] = []


def announce() -> None:
    """Call what awaits the first layer. A layer that changes its class calls this; others are ``Announced``."""
    while ON_FIRST_LAYER:
        ON_FIRST_LAYER.pop(0)()


_Layer = TypeVar("_Layer", bound="Announced")


class Announced:
    """A base of layers that are announced as they are made. Copies and pickles come through ``__new__`` too."""

    def __new__(cls: type[_Layer], *args: Any, **kwargs: Any) -> _Layer:
        announce()
        return super().__new__(cls)


def kind(module: nn.Module) -> str | None:
    """Which of ``KINDS`` the layer is; None for a module that is no layer of lowbit."""
    declared: str | property | None = getattr(type(module), "lowbit_kind", None)
    return str(module.lowbit_kind) if isinstance(declared, property) else declared


def full_name(cls: type) -> str:
    """``module.Class``, by which tables name classes whose library need not be installed."""
    return f"{cls.__module__}.{cls.__qualname__}"


def replaced_forward(layer: nn.Module) -> Any:
    """The ``forward`` set on ``layer`` itself that runs in place of its class's; None where its class's runs."""
    forward = vars(layer).get("forward")
    if _is_bound_forward(layer, forward):
        return None
    if isinstance(forward, WrappedForward) and forward.runs_class_forward:
        return None
    return forward


class WrappedForward:
    """A function around a module's forward, which ``wrap_forward`` has put there.

    A call is ``around(forward, module, *settings, *args, **kwargs)``. Its ``forward`` is ``own``, which was set on the
    module itself, or else that of the module's class, looked up at each call. The module is held weakly: a reference
    from its own dict would be a cycle, and ``del model`` would free no weight until the garbage collector runs.
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any], own: Any, settings: tuple[Any, ...]) -> None:
        self._module = weakref.ref(module)
        self.around, self.own, self.settings = around, own, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = partial(type(module).forward, module) if self.own is None else self.own
        return self.around(forward, module, *self.settings, *args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The module. Raises ReferenceError where nothing else holds it any more."""
        module = self._module()
        if module is None:
            raise ReferenceError(
                "expected the module of this forward to be alive, but it is gone: a forward that lowbit has wrapped "
                "does not keep its module; keep the model, and call it"
            )
        return module

    @property
    def __wrapped__(self) -> Any:
        """The forward inside, whose signature this one has."""
        return MethodType(type(self.module).forward, self.module) if self.own is None else self.own

    @property
    def runs_class_forward(self) -> bool:
        """Whether the innermost forward is that of the module's class."""
        return self.own is None or (isinstance(self.own, WrappedForward) and self.own.runs_class_forward)

    def of(self, module: nn.Module) -> WrappedForward:
        """The same around the forward of another module's class."""
        own = self.own.of(module) if isinstance(self.own, WrappedForward) else self.own
        return WrappedForward(module, self.around, own, self.settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedForward:
        module = memo.get(id(self.module), self.module)  # a copy of the module has begun, or it stays the same
        return WrappedForward(module, self.around, deepcopy(self.own, memo), deepcopy(self.settings, memo))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))


def wrap_forward(module: nn.Module, around: Callable[..., Any], *settings: Any) -> None:
    """Give ``module`` a forward around its own: ``around(forward, module, *settings, *args, **kwargs)``.

    It is no hook: those do not run after an interrupt, nor where a hook before them raised.
    """
    module.forward = WrappedForward(module, around, vars(module).get("forward"), settings)  # type: ignore[method-assign]


def wrapped_forward(module: nn.Module, around: Callable[..., Any]) -> WrappedForward | None:
    """The forward that ``wrap_forward`` has made of ``around``, also below what has been put around it; None: the
    module has none.
    """
    forward = vars(module).get("forward")
    while isinstance(forward, WrappedForward | partial):
        if isinstance(forward, WrappedForward) and forward.around is around:
            return forward
        forward = forward.own if isinstance(forward, WrappedForward) else next(iter(forward.args), None)
    return None


def unwrap_forwards(model: nn.Module, who: str, *arounds: Callable[..., Any]) -> dict[str, WrappedForward]:
    """Undo ``wrap_forward`` with one of ``arounds`` in all modules of ``model``; by their paths the forwards that they
    had.

    Raises ValueError, with the model untouched, where such a forward has been replaced since.
    """
    modules = dict(model.named_modules())
    forwards = {
        path: forward
        for path, module in modules.items()
        for around in arounds
        if (forward := wrapped_forward(module, around)) is not None
    }
    later = [path or "the model" for path, forward in forwards.items() if vars(modules[path])["forward"] is not forward]
    if later:
        raise ValueError(f"{who}: the forward of {', '.join(later)} has been replaced since; undo that first")
    for path, forward in forwards.items():
        del modules[path].__dict__["forward"]
        if forward.own is not None:
            modules[path].forward = forward.own  # type: ignore[method-assign]
    return forwards


def forget_bound_forward(layer: nn.Module) -> None:
    """Remove the bound method of its class that the layer may hold as ``forward``, before the class is changed.

    accelerate leaves one behind where it removes a hook.
    """
    if _is_bound_forward(layer, vars(layer).get("forward")):
        del vars(layer)["forward"]


def _is_bound_forward(layer: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__self__", None) is layer and getattr(forward, "__func__", None) is type(layer).forward
