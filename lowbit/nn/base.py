"""What lowbit's layers say of themselves: the one place where a module's kind is looked up.

A layer class says what it is by the class attribute ``lowbit_kind``, one of ``KINDS``, or by a property where it is
what the layers inside are. Modules above this one ask ``kind(module)`` and need not import the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__ = ["KINDS", "ON_FIRST_LAYER", "Announced", "announce", "full_name", "kind"]

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
