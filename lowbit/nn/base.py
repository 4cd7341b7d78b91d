"""What lowbit's layers say of themselves: the one place where a module's kind is looked up.

A layer class says what it is by the class attribute ``lowbit_kind``, one of ``KINDS``, or by a property where it is
what the layers inside are. Modules above this one ask ``kind(module)`` and need not import the class. A function that
runs the forward of a layer's class in place of the layer's own ``forward`` has the attribute
``lowbit_runs_class_forward`` (``wrap_forward`` takes such functions).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

__all__ = [
    "KINDS",
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
    if isinstance(forward, partial) and forward.args[:1] == (layer,):
        return None if getattr(forward.func, "lowbit_runs_class_forward", False) else forward
    return forward


def wrap_forward(module: nn.Module, of_class: Callable[..., Any], of_own: Callable[..., Any], *settings: Any) -> None:
    """Give ``module`` a forward around its own: ``of_class(module, *settings, *args)``, which looks the forward of the
    class up at each call, or ``of_own(forward, module, *settings, *args)`` where the module has one of its own.

    It is no hook: those do not run after an interrupt, nor where a hook before them raised.
    """
    own, plain = vars(module).get("forward"), module.forward
    made = partial(of_class, module, *settings) if own is None else partial(of_own, own, module, *settings)
    made.__wrapped__ = plain  # type: ignore[attr-defined]  # whose signature it has
    module.forward = made  # type: ignore[method-assign]


def wrapped_forward(module: nn.Module, *functions: Callable[..., Any]) -> Any:
    """The forward that ``wrap_forward`` has made of one of ``functions``, also below what has been put around it; None:
    the module has none.
    """
    forward = vars(module).get("forward")
    while isinstance(forward, partial):
        if forward.func in functions:
            return forward
        forward = next(iter(forward.args), None)
    return None


def unwrap_forwards(
    model: nn.Module, of_class: Callable[..., Any], of_own: Callable[..., Any], who: str
) -> dict[str, Any]:
    """Undo ``wrap_forward`` in all modules of ``model``; by their paths the forwards that they had.

    Raises ValueError, with the model untouched, where such a forward has been replaced since.
    """
    modules = dict(model.named_modules())
    found = {path: wrapped_forward(module, of_class, of_own) for path, module in modules.items()}
    found = {path: forward for path, forward in found.items() if forward is not None}
    later = [path or "the model" for path, forward in found.items() if vars(modules[path])["forward"] is not forward]
    if later:
        raise ValueError(f"{who}: the forward of {', '.join(later)} has been replaced since; undo that first")
    for path, forward in found.items():
        del modules[path].__dict__["forward"]
        if forward.func is of_own:
            modules[path].forward = forward.args[0]  # type: ignore[method-assign]
    return found


def forget_bound_forward(layer: nn.Module) -> None:
    """Remove the bound method of its class that the layer may hold as ``forward``, before the class is changed.

    accelerate leaves one behind where it removes a hook.
    """
    if _is_bound_forward(layer, vars(layer).get("forward")):
        del vars(layer)["forward"]


def _is_bound_forward(layer: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__self__", None) is layer and getattr(forward, "__func__", None) is type(layer).forward
