"""The kind of each lowbit layer (quantized, packed, observed, qat, training), in one place.

A layer class declares its kind by the class attribute ``lowbit_kind``, one of ``KINDS``, or by a property if it depends
on the layers inside. Modules above this one call ``kind(module)`` and need not import the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__ = ["KINDS", "ON_FIRST_LAYER", "Announced", "announce", "full_name", "kind"]

#: Every kind of layer, with the end of the error message of a conversion that needs a plain layer.
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


#: Called once, when the process creates, copies or unpickles its first lowbit layer. Integrations add to it.
ON_FIRST_LAYER: list[Callable[[], None]] = []


def announce() -> None:
    """Run the callbacks of the first layer. Layers that change their class call this; others derive from Announced."""
    while ON_FIRST_LAYER:
        ON_FIRST_LAYER.pop(0)()


_Layer = TypeVar("_Layer", bound="Announced")


class Announced:
    """Base of layers that call ``announce`` when they are created; copies and pickles go through ``__new__`` too."""

    def __new__(cls: type[_Layer], *args: Any, **kwargs: Any) -> _Layer:
        announce()
        return super().__new__(cls)


def kind(module: nn.Module) -> str | None:
    """The entry of ``KINDS`` for a layer, or None if it is not a lowbit layer."""
    declared: str | property | None = getattr(type(module), "lowbit_kind", None)
    return str(module.lowbit_kind) if isinstance(declared, property) else declared


def full_name(cls: type) -> str:
    """``module.Class``: tables name classes this way if their library need not be installed."""
    return f"{cls.__module__}.{cls.__qualname__}"
