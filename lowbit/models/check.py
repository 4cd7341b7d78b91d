"""Checks of a ``model`` argument: that it is a module, and the original of a compiled model."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["check_model", "uncompiled"]


def check_model(model: Any) -> None:
    """Raise TypeError if ``model`` is not an nn.Module."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}; create an instance" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"the model must be an nn.Module, got {got}")


def uncompiled(model: nn.Module) -> nn.Module:
    """The original model if ``model`` is a result of torch.compile, else ``model``."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner
