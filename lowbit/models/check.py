"""What a function that is given a model looks at first: whether it is one, and the model that was compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["check_model", "uncompiled"]


def check_model(model: Any) -> None:
    """Raises TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}; make one of it" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"the model must be an nn.Module, got {got}")


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that torch.compile was given, if ``model`` is what it made of it."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner
